"""The memory that partition programs count for a stage equals what the simulated stage needs."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import table
from small_profile import layer, plan, profile

from planner.ir import Schedule
from planner.partition.stage_costs import StageCosts
from planner.plan import Plan
from planner.profile import LayerProfile, Profile
from planner.schedule.expand import recomputing_stages, with_recompute
from planner.schedule.in_flight import Counts, largest_counts
from planner.schedule.passes import freeze_stages
from planner.schedule.registry import build, families
from planner.simulation.memory import memory_over_time
from planner.simulation.simulate import Costs, simulate

NO_BYTES = dict.fromkeys(
    (
        "parameter_bytes",
        "gradient_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "input_bytes",
        "weight_grad_hold_bytes",
        "boundary_bytes",
        "boundary_grad_bytes",
    ),
    0,
)
sizes = st.integers(0, 100)


@st.composite
def layers(draw: st.DrawFn, *, last: bool) -> LayerProfile:
    """A layer whose messages have no bytes, because partition programs do not count them."""
    inputs, loss_inputs, loss_rest = draw(sizes), draw(sizes), draw(sizes)
    if not last:
        loss_inputs = loss_rest = 0
    return layer(
        parameter_bytes=draw(sizes),
        optimizer_bytes=draw(sizes),
        gradient_bytes=draw(sizes),
        statistics_bytes=draw(sizes),
        sample_bytes=draw(sizes),
        input_bytes=inputs,
        activation_bytes=inputs + loss_inputs + loss_rest + draw(sizes),
        weight_grad_hold_bytes=draw(sizes),
        loss_bytes=loss_inputs + loss_rest,
        loss_input_bytes=loss_inputs,
        boundary_bytes=0,
        boundary_grad_bytes=0,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, Plan, Schedule]:
    """A cut of a random model for any family and any layers that recompute; `Schedule` has no recomputes."""
    family = draw(st.sampled_from(sorted(families().values(), key=lambda family: family.name)))
    ranks = draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 3)) * (ranks if family.whole_rounds else 1)
    schedule = build(family.name, ranks, microbatches)
    if draw(st.booleans()):
        schedule = freeze_stages(schedule, draw(st.integers(0, schedule.stages - 1)))
    counts = [draw(st.integers(1, 2)) for _ in range(schedule.stages)]
    count = sum(counts)
    model = profile(*(draw(layers(last=number == count - 1)) for number in range(count)), ranks=ranks)
    recompute = tuple(sorted(draw(st.sets(st.integers(0, count - 1)))))
    cut = plan(
        *counts,
        schedule=family.name,
        microbatches=microbatches,
        chunks=family.default_chunks,
        recompute=recompute,
    )
    return model, cut, schedule


def alone(model: Profile, kept: tuple[int, int]) -> Profile:
    """`model` with no bytes outside the layers `kept`."""
    first, stop = kept
    reduced = tuple(
        each if first <= number < stop else replace(each, **NO_BYTES, loss_bytes=0, loss_input_bytes=0)
        for number, each in enumerate(model.model.layers)
    )
    emptied = tuple(
        each if first <= number < stop else replace(each, statistics_bytes=0, sample_bytes=0)
        for number, each in enumerate(reduced)
    )
    return replace(model, model=replace(model.model, layers=emptied))


def simulated_bytes(model: Profile, cut: Plan, schedule: Schedule, rank: int) -> int:
    """The rank's peak without the working memory of actions, which partition programs do not count."""
    full = with_recompute(schedule, recomputing_stages(cut.layers, cut.recompute))
    simulation = simulate(full, Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1))
    timeline = memory_over_time(model, cut, simulation)[rank]
    return max(parts.total - parts.working for _, parts in timeline)


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_a_stage_needs_what_its_simulation_needs(case: tuple[Profile, Plan, Schedule]) -> None:
    model, cut, schedule = case
    costs = StageCosts.of(model, schedule, cut.recompute)
    counted = [costs.memory_bytes(stage)[stop, first] for stage, (first, stop) in enumerate(cut.layers)]
    for stage, rank in enumerate(cut.stage_ranks):
        assert simulated_bytes(alone(model, cut.layers[stage]), cut, schedule, rank) == counted[stage]
    for rank in range(cut.pipeline_ranks):
        of_rank = [size for size, owner in zip(counted, cut.stage_ranks, strict=True) if owner == rank]
        # The stages of one rank need not peak at the same time.
        assert max(of_rank) <= simulated_bytes(model, cut, schedule, rank) <= sum(of_rank)


def test_siblings_that_share_out_states_keep_a_part_of_statistics_and_samples_too() -> None:
    each = layer(
        parameter_bytes=40,
        gradient_bytes=40,
        optimizer_bytes=80,
        statistics_bytes=24,
        sample_bytes=60,
        boundary_bytes=0,
        boundary_grad_bytes=0,
    )
    model = profile(replace(each, trained=(5, 5)), replace(each, trained=(5, 5)), ranks=1)
    schedule = build("gpipe", 1, 1)
    cut = replace(plan(2, microbatches=1), replicas=2)
    whole, shared = (
        simulated_bytes(model, one, schedule, 0) for one in (cut, replace(cut, shard="optimizer"))
    )
    assert whole - shared == 2 * (80 + 24 + 60) // 2
    counted = [StageCosts.of(model, schedule, shards=shards).memory_bytes(0)[2, 0] for shards in (1, 2)]
    assert counted == [whole, shared]


def test_the_largest_counts_of_a_stage() -> None:
    assert largest_counts(build("1f1b", 2, 4), 0) == (Counts(activations=2, rebuilt=1, gradients=1),)
    # 0F0 0F1 0I0 0W0 0F2 0I1 0W1 ...: after 0I0 one microbatch waits and one is kept.
    assert largest_counts(build("zb-h1", 2, 4), 0) == (
        Counts(activations=2, rebuilt=1, gradients=1),
        Counts(activations=1, waiting=1, gradients=1),
    )
    # A single microbatch is no longer kept when it waits.
    assert largest_counts(build("zb-h1", 1, 1), 0) == (
        Counts(activations=1, rebuilt=1, gradients=1),
        Counts(waiting=1, gradients=1),
    )
    assert largest_counts(table("0F0 0F1\n1F0 1F1 1B0 1B1", 2, 2, frozen_stages=1), 0) == (
        Counts(activations=1),
    )
