"""Messages: which ranks they occupy, how they queue, when they arrive."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import table

from planner.ir import Action, ActionKind, Schedule
from planner.profile import Link
from planner.schedule.graph import build_graph
from planner.schedule.registry import build
from planner.schedule.validate import validate
from planner.simulation.simulate import Costs, Messages, simulate

FORWARDS = table("0F0 0F1 0F2\n1F0 1F1 1F2", 2, 3, frozen_stages=2)
SLOW = Link(
    latency_s=0.5,
    bytes_per_s=50.0,
    sender_s=0.125,
    sender_s_per_byte=0.00125,
    receiver_s=0.0625,
    receiver_s_per_byte=0.000625,
)
"""100 bytes occupy the sender for 0.25 s and the link for 2 s, arrive 0.5 s later, then occupy the receiver
for 0.125 s."""


def costs(link: Link, stages: int = 2, seconds: float = 1.0, size: int = 100) -> Costs:
    return replace(
        Costs.uniform(forward_s=seconds, input_grad_s=seconds, weight_grad_s=seconds),
        messages=Messages(
            forward_bytes=(size,) * stages, backward_bytes=(size,) * stages, links=((link,) * 8,) * 8
        ),
    )


def times_by_token(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, float]]:
    timeline = simulate(schedule, costs).timeline
    return {str(span.action): (span.start_s, span.end_s) for rank in timeline for span in rank}


def test_a_message_holds_its_sender_queues_travels_and_holds_its_receiver():
    simulation = simulate(FORWARDS, costs(SLOW))
    assert {str(s.action): (s.start_s, s.end_s) for rank in simulation.timeline for s in rank} == {
        "0F0": (0, 1),
        "0F1": (1.25, 2.25),
        "0F2": (2.5, 3.5),
        "1F0": (3.875, 4.875),
        "1F1": (5.875, 6.875),
        "1F2": (7.875, 8.875),
    }
    assert [(str(t.action), t.start_s, t.end_s, t.arrival_s) for t in simulation.transfers] == [
        ("0F0", 1.25, 3.25, 3.75),
        ("0F1", 3.25, 5.25, 5.75),
        ("0F2", 5.25, 7.25, 7.75),
    ]
    assert {(t.source, t.target) for t in simulation.transfers} == {(0, 1)}
    assert simulation.busy_s == (3, 3)
    assert simulation.makespan_s == 8.875


def test_a_message_travels_while_its_receiver_computes_and_holds_it_afterwards():
    """The second message arrives at 2.75 while 1F0 runs until 4.25."""
    link = replace(SLOW, bytes_per_s=400.0, sender_s_per_byte=0.0, sender_s=0.0)
    slow_stage = replace(costs(link), seconds={ActionKind.FORWARD: (1.0, 2.375)})
    times = times_by_token(FORWARDS, slow_stage)
    assert times["0F1"] == (1, 2)
    assert times["1F0"] == (1.875, 4.25)
    assert times["1F1"] == (4.375, 6.75)


def test_the_two_directions_of_a_pair_do_not_share_a_link():
    """0F1's message and 1B0's are both on the wire from 3 to 4."""
    schedule = table("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", 2, 2)
    link = Link(latency_s=0.0, bytes_per_s=50.0)
    both = replace(costs(link), seconds={ActionKind.FORWARD: (2.0, 0.5), ActionKind.BACKWARD: 0.5})
    on_the_way = {
        str(t.action): (t.source, t.target, t.start_s, t.end_s) for t in simulate(schedule, both).transfers
    }
    assert on_the_way == {
        "0F0": (0, 1, 2, 4),
        "0F1": (0, 1, 4, 6),
        "1B0": (1, 0, 5, 7),
        "1B1": (1, 0, 7, 9),
    }


def test_sizes_are_those_of_the_sending_stage_and_direction():
    schedule = table("0F0 0B0\n1F0 1B0\n2F0 2B0", 3, 1)
    sized = replace(
        costs(Link(latency_s=0.0, bytes_per_s=1.0), stages=3),
        messages=Messages(
            forward_bytes=(1, 2, 64),
            backward_bytes=(64, 3, 4),
            links=((Link(latency_s=0.0, bytes_per_s=1.0),) * 3,) * 3,
        ),
    )
    lasted = {str(t.action): t.end_s - t.start_s for t in simulate(schedule, sized).transfers}
    assert lasted == {"0F0": 1, "1F0": 2, "2B0": 4, "1B0": 3}


def test_stages_of_one_rank_hand_over_without_a_message():
    simulation = simulate(build("zbv", 2, 1), costs(SLOW, stages=4))
    assert {str(t.action) for t in simulation.transfers} == {"0F0", "2F0", "1I0", "3I0"}


def test_single_actions_may_cost_something_else():
    own = replace(
        costs(Link(latency_s=0.0, bytes_per_s=1e18)), actions={Action(ActionKind.FORWARD, 0, 1): 5.0}
    )
    simulation = simulate(FORWARDS, own)
    assert [s.end_s - s.start_s for s in simulation.timeline[0]] == [1, 5, 1]
    assert simulation.busy_s == (7, 3)
    assert own.of_action(Action(ActionKind.FORWARD, 0, 1)) == 5
    only = Costs({}, actions={action: 2.0 for program in FORWARDS.programs for action in program})
    assert simulate(FORWARDS, only).makespan_s == 8


def test_a_missing_link_or_size_is_named():
    no_link = replace(
        costs(SLOW), messages=Messages(forward_bytes=(1, 1), backward_bytes=(1, 1), links=((None,),))
    )
    with pytest.raises(ValueError, match="no link from rank 0 to rank 1, over which stage 0 sends"):
        simulate(FORWARDS, no_link)
    no_size = replace(costs(SLOW), messages=replace(no_link.messages, forward_bytes=(), links=((SLOW,) * 2,)))
    with pytest.raises(ValueError, match="lack the size of the message that F of stage 0 sends"):
        simulate(FORWARDS, no_size)


def test_a_blocking_message_holds_both_ranks_for_as_long_as_it_takes():
    blocking = replace(Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1), blocking=True)
    blocking = replace(blocking, communication_s=0.5)
    # The receiver waits for the first message. It computes when the second comes, and pays for that one
    # afterwards.
    assert times_by_token(FORWARDS, blocking) == {
        "0F0": (0, 1),
        "0F1": (1.5, 2.5),
        "0F2": (3, 4),
        "1F0": (1.5, 2.5),
        "1F1": (3, 4),
        "1F2": (4.5, 5.5),
    }
    slow_stage = replace(blocking, seconds={ActionKind.FORWARD: (1.0, 4.0)})
    assert times_by_token(FORWARDS, slow_stage)["1F1"] == (6, 10)
    # All parts of a link's time count: 0.25 + 2 + 0.5 + 0.125 seconds.
    assert times_by_token(FORWARDS, replace(costs(SLOW), blocking=True))["1F0"] == (3.875, 4.875)
    assert times_by_token(FORWARDS, replace(costs(SLOW), blocking=True))["0F1"] == (3.875, 4.875)


def chronos(ranks: int, microbatches: int) -> Schedule:
    """Chronos-Pipe with two chunks, as a modulo schedule of period 6."""
    a, b = ceil((ranks - 3) / 6), ceil((2 * ranks - 3) / 6)
    programs = []
    for s in range(ranks):
        starts: list[tuple[int, Action]] = []
        for k in range(microbatches):
            backward = 6 * k + 3 + 6 * a + 3 * ranks - 2 - 2 * s
            starts += [
                (6 * k + s, Action(ActionKind.FORWARD, s, k)),
                (6 * k + 3 + 6 * a + s, Action(ActionKind.FORWARD, ranks + s, k)),
                (backward, Action(ActionKind.BACKWARD, ranks + s, k)),
                (backward + 3 + 6 * b, Action(ActionKind.BACKWARD, s, k)),
            ]
        programs.append(tuple(action for _, action in sorted(starts, key=lambda start: start[0])))
    schedule = Schedule("chronos", 2 * ranks, microbatches, tuple(programs))
    validate(schedule)
    return schedule


def test_chronos_pipes_bubble_formulas():
    """ChronosPipe, section III: T_c = 0.05 T_unit, m = 128, p = 4. The formulas count one or two T_c more
    than any rank waits. With messages that overlap computation the bubbles are far smaller."""

    def bubble(schedule: Schedule, forward_s: float, message_s: float, *, blocking: bool) -> float:
        unit = Costs.uniform(
            forward_s=forward_s,
            input_grad_s=forward_s,
            weight_grad_s=forward_s,
            communication_s=message_s,
        )
        simulation = simulate(schedule, replace(unit, blocking=blocking))
        assert simulation.busy_s == (6 * 128,) * 4
        return simulation.bubble[0]

    two_chunks, one = chronos(4, 128), build("1f1b", 4, 128)
    assert bubble(two_chunks, 1, 0.05, blocking=True) == pytest.approx(0.08277, abs=3e-4)
    assert bubble(one, 2, 0.05, blocking=True) == pytest.approx(0.05372, abs=3e-4)
    assert bubble(two_chunks, 1, 0.05, blocking=False) == pytest.approx(0.0468, abs=5e-5)
    assert bubble(one, 2, 0.05, blocking=False) == pytest.approx(0.0349, abs=5e-5)


@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
@pytest.mark.parametrize("microbatches", [8, 16, 40])
def test_blocking_1f1b_in_closed_form(ranks: int, microbatches: int):
    """The makespan is 6(m + p - 1) T_unit + (2p + 4(m - 2) - 2) T_c."""
    blocking = Costs.uniform(forward_s=2, input_grad_s=2, weight_grad_s=2, communication_s=0.125)
    makespan_s = simulate(build("1f1b", ranks, microbatches), replace(blocking, blocking=True)).makespan_s
    assert makespan_s == 6 * (microbatches + ranks - 1) + (2 * ranks + 4 * (microbatches - 2) - 2) * 0.125


cases = {
    "name": st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]),
    "ranks": st.integers(1, 5),
    "rounds": st.integers(1, 3),
    "data": st.data(),
}


def random_case(name: str, ranks: int, rounds: int, data: st.DataObject) -> tuple[Schedule, Costs]:
    schedule = build(name, ranks, ranks * rounds)
    per_stage = st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    links = st.builds(
        Link,
        latency_s=st.integers(0, 5),
        bytes_per_s=st.sampled_from([0.25, 0.5, 1.0, 4.0]),
        sender_s=st.integers(0, 2),
        sender_s_per_byte=st.sampled_from([0.0, 0.5]),
        receiver_s=st.integers(0, 2),
        receiver_s_per_byte=st.sampled_from([0.0, 0.25]),
    )
    row = st.lists(links, min_size=ranks, max_size=ranks).map(tuple)
    return schedule, Costs(
        {kind: data.draw(per_stage) for kind in ActionKind},
        messages=Messages(
            forward_bytes=data.draw(per_stage),
            backward_bytes=data.draw(per_stage),
            links=data.draw(st.lists(row, min_size=ranks, max_size=ranks).map(tuple)),
        ),
    )


@given(**cases)
@settings(max_examples=60, deadline=None)
def test_times_are_the_longest_ways_through_actions_and_messages(
    name: str, ranks: int, rounds: int, data: st.DataObject
):
    """The same rules, written again as recursions from each event to those that it waits for."""
    schedule, case_costs = random_case(name, ranks, rounds, data)
    graph = build_graph(schedule)
    messages = case_costs.messages
    assert messages is not None

    def link_and_size(node: int) -> tuple[Link, int] | None:
        consumer = graph.consumers[node]
        if consumer is None or graph.ranks[consumer] == graph.ranks[node]:
            return None
        link = messages.links[graph.ranks[node]][graph.ranks[consumer]]
        assert link is not None
        action = graph.actions[node]
        sizes = messages.forward_bytes if action.kind is ActionKind.FORWARD else messages.backward_bytes
        return link, sizes[action.stage]

    senders = defaultdict(list)
    for node, consumer in enumerate(graph.consumers):
        if consumer is not None:
            senders[graph.ranks[node], graph.ranks[consumer]].append(node)
    before_on_link = {later: earlier for nodes in senders.values() for earlier, later in pairwise(nodes)}

    @cache
    def start_s(node: int) -> float:
        first = node == 0 or graph.ranks[node - 1] != graph.ranks[node]
        rank_free = 0.0 if first else released_s(node - 1)
        needed = graph.inputs[node]
        if needed is None:
            return rank_free
        sent = link_and_size(needed)
        if sent is None:
            return max(rank_free, end_s(needed))
        link, size = sent
        arrival = left_s(needed) + link.latency_s
        return max(rank_free, arrival) + link.receiver_s + size * link.receiver_s_per_byte

    @cache
    def end_s(node: int) -> float:
        return start_s(node) + case_costs.of_action(graph.actions[node])

    @cache
    def released_s(node: int) -> float:
        sent = link_and_size(node)
        if sent is None:
            return end_s(node)
        link, size = sent
        return end_s(node) + link.sender_s + size * link.sender_s_per_byte

    @cache
    def left_s(node: int) -> float:
        sent = link_and_size(node)
        assert sent is not None
        link, size = sent
        begin = released_s(node)
        if node in before_on_link:
            begin = max(begin, left_s(before_on_link[node]))
        return begin + size / link.bytes_per_s

    simulation = simulate(schedule, case_costs)
    assert list(simulation.start_s) == [start_s(node) for node in range(len(graph.actions))]
    assert list(simulation.end_s) == [end_s(node) for node in range(len(graph.actions))]
    assert [left for _, _, left, _ in sorted(simulation.on_link)] == [
        left_s(node) for node in range(len(graph.actions)) if link_and_size(node) is not None
    ]


@given(**cases)
@settings(max_examples=40, deadline=None)
def test_what_never_helps(name: str, ranks: int, rounds: int, data: st.DataObject):
    """Longer actions, slower links and blocking never make a step shorter, nor shorter than a rank's work."""
    schedule, case_costs = random_case(name, ranks, rounds, data)
    simulation = simulate(schedule, case_costs)
    assert simulation.makespan_s >= max(simulation.busy_s)
    assert simulate(schedule, replace(case_costs, messages=None)).makespan_s <= simulation.makespan_s
    assert simulate(schedule, replace(case_costs, blocking=True)).makespan_s >= simulation.makespan_s
    program = data.draw(st.sampled_from(schedule.programs))
    action = data.draw(st.sampled_from(program))
    longer = replace(case_costs, actions={action: case_costs.of_action(action) + 3})
    assert simulate(schedule, longer).makespan_s >= simulation.makespan_s
