"""Uneven shares of a step for pipelines of unlike speed: moved microbatch by microbatch, judged by simulation.

DynPipe, sections IV-C1 and V-B: data parallelism within a stage, balanced by speed. Pure. Knows no other cut: the
layers stay where `plan` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.freezing import Ratios
from planner.ir import Schedule
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.expand import schedule_of_pipeline
from planner.schedule.registry import families
from planner.simulation.costs import action_costs
from planner.simulation.predict import Prediction, predict
from planner.simulation.simulate import simulate

JUDGED = 6
"""Most shares that are simulated as a whole: on the way from even ones to the most balanced."""


def balanced_shares(
    profile: Profile, plan: Plan, schedule: Schedule, ratios: Ratios | None = None, *, judged: int = JUDGED
) -> Prediction:
    """The prediction of `plan` with the shares that make the shortest step, and without shares if none makes a shorter
    one: each microbatch that changes pipelines costs memory and a longer exchange.

    Args:
        profile: with the slowdown of every place's device.
        plan: its own shares do not count.
        schedule: the plan's for one replica.
        ratios: as for `predict`.
        judged: how many shares to simulate at most, beside even ones.

    Raises:
        ValueError: the arguments do not fit together.
    """
    even = replace(plan, shares=())
    best = predict(profile, even, schedule, ratios)
    path = towards_balance(profile, even, schedule)
    every = -(-len(path) // judged) if path else 1
    for shares in path[::-every]:
        found = predict(profile, replace(plan, shares=shares), schedule, ratios)
        if (sum(found.excess_bytes), found.step_s) < (sum(best.excess_bytes), best.step_s):
            best = found
    return best


def towards_balance(profile: Profile, plan: Plan, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Shares from nearly even ones to those with the shortest windows, each with one microbatch (or whole round) more
    that has changed pipelines; exchange and memory do not count. Empty if even ones are best, or if there is nothing to
    share: one pipeline, or a table of the user's own.

    Raises:
        ValueError: the arguments do not fit together.
    """
    known = families()
    if plan.pipeline_count == 1 or plan.schedule not in known:
        return ()
    unit = plan.pipeline_ranks if known[plan.schedule].whole_rounds else 1
    times = [_affine(profile, plan, schedule, pipeline) for pipeline in range(plan.pipeline_count)]
    own = [
        len(range(pipeline, plan.replicas, plan.pipeline_count)) * plan.microbatches
        for pipeline in range(plan.pipeline_count)
    ]
    return _path(own, times, unit)


def _affine(profile: Profile, plan: Plan, schedule: Schedule, pipeline: int) -> tuple[float, float]:
    """(fill_s, each_s): a pipeline's window of n microbatches takes fill_s + n * each_s."""
    few, many = plan.microbatches, 2 * plan.microbatches
    spans = []
    for count in (few, many):
        some = replace(plan, shares=(count,) * plan.pipeline_count)
        window = schedule_of_pipeline(some, schedule, pipeline)
        spans.append(simulate(window, action_costs(profile, plan, window, pipeline=pipeline)).makespan_s)
    each_s = (spans[1] - spans[0]) / (many - few)
    return spans[0] - few * each_s, each_s


def _path(
    even: Sequence[int], times: Sequence[tuple[float, float]], unit: int
) -> tuple[tuple[int, ...], ...]:
    """Moves `unit` after `unit` from the pipeline that ends last to the one that ends first with it, while that
    shortens the longest window. A pipeline keeps at least one unit."""
    shares, path = list(even), []

    def end_s(pipeline: int, more: int = 0) -> float:
        fill_s, each_s = times[pipeline]
        return fill_s + (shares[pipeline] + more) * each_s

    pipelines = range(len(shares))
    while True:
        last = max(pipelines, key=end_s)
        first = min(pipelines, key=lambda pipeline: end_s(pipeline, unit))
        if first == last or end_s(first, unit) >= end_s(last) or shares[last] <= unit:
            return tuple(path)
        shares[last] -= unit
        shares[first] += unit
        path.append(tuple(shares))
