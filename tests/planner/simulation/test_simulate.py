"""Graph and simulator: exact times, and agreement between the two."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import forwards_of, table

from planner.ir import Action, ActionKind, Schedule
from planner.schedule.graph import build_graph
from planner.schedule.in_flight import in_flight
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.simulation.simulate import Costs, simulate

SMALL = table("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", 2, 2)


def times_by_token(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, float]]:
    timeline = simulate(schedule, costs).timeline
    return {str(span.action): (span.start_s, span.end_s) for rank in timeline for span in rank}


def test_every_start_and_end():
    assert times_by_token(SMALL, Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0B0": (4, 6),
        "0B1": (7, 9),
        "1F0": (1, 2),
        "1B0": (2, 4),
        "1F1": (4, 5),
        "1B1": (5, 7),
    }


def test_a_message_delays_the_receiver_and_never_the_sender():
    costs = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1, communication_s=0.5)
    assert times_by_token(SMALL, costs) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0B0": (5, 7),
        "0B1": (8, 10),
        "1F0": (1.5, 2.5),
        "1B0": (2.5, 4.5),
        "1F1": (4.5, 5.5),
        "1B1": (5.5, 7.5),
    }


def test_stages_on_one_rank_pass_without_a_message():
    """zbv turns around on the last rank: 1F0 to 2F0 and 2I0 to 1I0 stay there."""
    costs = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1, communication_s=10)
    times = times_by_token(build("zbv", 2, 1), costs)
    assert times["1F0"] == (11, 12)
    assert times["2F0"] == (12, 13)
    assert times["3F0"] == (23, 24)
    assert simulate(build("zbv", 1, 4), costs).makespan_s == 24


def test_costs_per_stage_and_kind():
    costs = Costs(
        {ActionKind.FORWARD: (1.0, 4.0), ActionKind.BACKWARD: (2.0, 8.0), ActionKind.RECOMPUTE: 3.0},
        communication_s=0.0,
    )
    assert times_by_token(add_recompute(table("0F0 0B0\n1F0 1B0", 2, 1), {1}), costs) == {
        "0F0": (0, 1),
        "1F0": (1, 5),
        "1R0": (5, 8),
        "1B0": (8, 16),
        "0B0": (16, 18),
    }


def test_uniform_costs():
    costs = Costs.uniform(forward_s=2, input_grad_s=3, weight_grad_s=5)
    assert [costs.of_action(Action(kind, 7, 0)) for kind in "FBIWR"] == [2, 8, 3, 5, 2]


@pytest.mark.parametrize(
    "seconds", [{ActionKind.FORWARD: 1.0}, {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: (1.0,)}]
)
def test_a_missing_cost_is_named(seconds: dict[ActionKind, float]):
    with pytest.raises(ValueError, match="no cost for 1B0: the costs lack kind B on stage 1"):
        simulate(table("0F0\n1F0 1B0", 2, 1, frozen_stages=1), Costs(seconds))


def test_bubble_is_the_share_of_the_makespan_without_work():
    simulation = simulate(SMALL, Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1))
    assert simulation.makespan_s == 9
    assert simulation.busy_s == (6, 6)
    assert simulation.bubble == (3 / 9, 3 / 9)
    nothing = simulate(SMALL, Costs.uniform(forward_s=0, input_grad_s=0, weight_grad_s=0))
    assert nothing.bubble == (0, 0)


def test_in_flight_counts_until_the_gradient_asked_for():
    split = table("0F0 0I0 0F1 0I1 0W0 0F2 0W1 0I2 0W2", 1, 3)
    assert in_flight(split) == (2,)
    assert in_flight(split, until_weight_grad=False) == (1,)
    both = simulate(split, Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1))
    assert (both.in_flight, both.in_flight_input_grad) == ((2,), (1,))


def test_what_has_no_backward_is_in_flight_only_while_it_runs():
    assert in_flight(forwards_of(build("gpipe", 2, 8))) == (1, 1)
    assert in_flight(table("0F0 0F1\n1F0 1F1 1B0 1B1", 2, 2, frozen_stages=1)) == (1, 2)


def test_the_graph_has_one_source_and_one_sink():
    graph = build_graph(SMALL)
    names = [str(action) for action in graph.actions]
    assert names == ["0F0", "0F1", "0B0", "0B1", "1F0", "1B0", "1F1", "1B1"]
    assert graph.ranks == (0, 0, 0, 0, 1, 1, 1, 1)
    assert graph.predecessors[names.index("0F0")] == (graph.source,)
    assert graph.predecessors[names.index("0B0")] == (names.index("0F1"), names.index("1B0"))
    assert graph.predecessors[names.index("1F0")] == (names.index("0F0"),)
    assert graph.predecessors[graph.source] == ()
    assert graph.predecessors[graph.sink] == (names.index("0B1"),)
    assert (graph.order[0], graph.order[-1]) == (graph.source, graph.sink)


def test_every_action_without_a_successor_joins_the_sink():
    """In zb-h1 all ranks end with weight gradients that nothing waits for."""
    graph = build_graph(build("zb-h1", 3, 4))
    assert [str(graph.actions[node]) for node in graph.predecessors[graph.sink]] == ["0W3", "1W3", "2W3"]


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]),
    ranks=st.integers(1, 6),
    rounds=st.integers(1, 4),
    recompute=st.booleans(),
    communication_s=st.integers(0, 5),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_the_longest_path_is_the_makespan(
    name: str, ranks: int, rounds: int, recompute: bool, communication_s: int, data: st.DataObject
):
    schedule = build(name, ranks, ranks * rounds)
    if recompute:
        schedule = add_recompute(schedule, range(schedule.stages))
    per_stage = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    costs = Costs({kind: data.draw(per_stage) for kind in ActionKind}, communication_s)
    graph = build_graph(schedule)

    # Unlike the simulator this goes backwards from the sink: the longest path from each node to the end.
    ahead = dict.fromkeys(graph.order, 0.0)
    for node in reversed(graph.order):
        for earlier in graph.predecessors[node]:
            own = costs.of_action(graph.actions[earlier]) if earlier < len(graph.actions) else 0
            hop = communication_s if graph.crosses_ranks(earlier, node) else 0
            ahead[earlier] = max(ahead[earlier], own + hop + ahead[node])
    simulation = simulate(schedule, costs)
    assert simulation.makespan_s == ahead[graph.source]

    for program, timed in zip(schedule.programs, simulation.timeline, strict=True):
        assert tuple(span.action for span in timed) == program
        assert all(one.end_s <= next_.start_s for one, next_ in pairwise(timed))
        assert all(span.end_s - span.start_s == costs.of_action(span.action) for span in timed)


def test_a_large_schedule_is_laid_out():
    """32 ranks, 128 microbatches and 4 chunks have 32,768 actions."""
    simulation = simulate(
        build("interleaved", 32, 128, 4), Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)
    )
    assert simulation.makespan_s == 3 * 128 * 4 + 3 * 31
