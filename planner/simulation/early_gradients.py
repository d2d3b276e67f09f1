"""When gradients leave for standbys before the window of their rank ends: `planner/final_gradients.py` in
seconds."""

from __future__ import annotations

from itertools import accumulate

from planner.final_gradients import final_gradients
from planner.freezing import Ratios
from planner.ir import Kind
from planner.plan import Plan
from planner.profile import Profile
from planner.simulation.costs import rank_slowdowns
from planner.simulation.simulate import Simulation


def early_gradients_s(
    profile: Profile, plan: Plan, window: Simulation, ratios: Ratios | None
) -> dict[int, float]:
    """Layer -> when its gradients may leave, of those that need not wait for the window's end.

    None need not where gradients are summed up further after the window (replicas, tied parameters, a loss scale), nor
    where statistics of freezing go with them (`workers.step.minibatch.Minibatch.run`).
    """
    layers = profile.model.layers
    if plan.replicas > 1 or ratios is not None or profile.model.precision == "float16":
        return {}
    if any(layer.tied_from is not None or layer.statistics_bytes for layer in layers):
        return {}
    schedule = window.schedule
    slowdowns = rank_slowdowns(profile.cluster, plan.pipeline_ranks, plan.pipeline_count)
    firsts = [0, *accumulate(len(program) for program in schedule.programs)]
    early: dict[int, float] = {}
    for rank, program in enumerate(schedule.programs):
        final = final_gradients(
            program,
            rank=rank,
            stages=schedule.stages,
            frozen_stages=schedule.frozen_stages,
            rank_of_stage=schedule.rank_of_stage,
        )
        for number, stages in final.before.items():
            for stage in stages:
                for layer in range(*plan.layers[stage]):
                    early[layer] = window.start_s[firsts[rank] + number]
        for number in final.during:
            action = program[number]
            left_s = window.end_s[firsts[rank] + number]
            for layer in range(*plan.layers[action.stage]):
                early[layer] = left_s
                one = layers[layer]
                taken_s = one.backward_s if action.kind is Kind.BACKWARD else one.weight_grad_s
                left_s -= slowdowns[rank] * taken_s
    return early
