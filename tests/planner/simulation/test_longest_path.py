"""The longest-path problem against the simulator, which must agree with it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.profile import Link
from planner.schedule.graph import build_graph
from planner.schedule.registry import build, families
from planner.simulation.longest_path import Network, build_network
from planner.simulation.simulate import Costs, Messages, simulate


def network(name: str, ranks: int, microbatches: int, costs: Costs, shortest: float = 0.0) -> Network:
    schedule = build(name, ranks, microbatches)
    graph = build_graph(schedule)
    return build_network(schedule, graph, costs, [shortest] * len(graph.actions))


def linked(link: Link, ranks: int, stages: int, blocking: bool = False) -> Costs:
    links = tuple(tuple(None if a == b else link for b in range(ranks)) for a in range(ranks))
    messages = Messages(forward_bytes=(8,) * stages, backward_bytes=(4,) * stages, links=links)
    uniform = Costs.uniform(forward_s=1, input_grad_s=2, weight_grad_s=1)
    return replace(uniform, messages=messages, blocking=blocking)


@given(
    name=st.sampled_from(sorted(families())),
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 3),
    link_s=st.sampled_from([0.0, 0.5, 1.0, 3.0, 20.0]),
    latency_s=st.sampled_from([0.0, 0.25, 5.0]),
    sender_s=st.sampled_from([0.0, 0.125]),
    receiver_s=st.sampled_from([0.0, 0.375]),
    blocking=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_it_gives_the_simulators_times_however_long_actions_take(
    name: str,
    ranks: int,
    rounds: int,
    link_s: float,
    latency_s: float,
    sender_s: float,
    receiver_s: float,
    blocking: bool,
    seed: int,
):
    schedule = build(name, ranks, ranks * rounds)
    graph = build_graph(schedule)
    link = Link(
        latency_s=latency_s,
        bytes_per_s=8 / link_s if link_s else 1e18,
        sender_s=sender_s,
        receiver_s_per_byte=receiver_s / 8,
    )
    costs = linked(link, ranks, schedule.stages, blocking)
    generator = np.random.default_rng(seed)
    shortest = generator.uniform(0, 2, len(graph.actions))
    made = build_network(schedule, graph, costs, shortest.tolist())
    for stretch in (0.0, 3.0):
        seconds = shortest + stretch * generator.random(len(graph.actions))
        given_costs = replace(costs, actions=dict(zip(graph.actions, seconds.tolist(), strict=True)))
        simulation = simulate(schedule, given_costs)
        start = made.starts(seconds.tolist())
        assert start[made.sink] == pytest.approx(simulation.makespan_s, rel=1e-12)
        assert start[: made.actions] == pytest.approx(simulation.start_s, rel=1e-12)
        several = made.makespans(np.stack([seconds, shortest], axis=1))
        assert several[0] == pytest.approx(start[made.sink], rel=1e-12)
        assert several[1] == pytest.approx(made.starts(shortest.tolist())[made.sink], rel=1e-12)


def test_messages_become_nodes_only_where_they_may_queue():
    slow = linked(Link(latency_s=0.0, bytes_per_s=8 / 3), 2, 2)
    # A forward takes 1 and its message 3, so the second of two messages waits 2 if forwards are never
    # shorter.
    made = network("gpipe", 2, 2, slow, shortest=1.0)
    assert made.nodes == 8 + 1 + 2
    # A message of 3 after an action of 3 has its link to itself.
    assert network("gpipe", 2, 2, slow, shortest=3.0).nodes == 8 + 1
    assert (
        network("gpipe", 2, 2, linked(Link(latency_s=9.0, bytes_per_s=1e18), 2, 2), shortest=1.0).nodes == 9
    )


def test_latest_starts_keep_the_makespan():
    costs = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)
    made = network("1f1b", 2, 2, costs)
    seconds = costs.of_nodes(made.graph)
    start = made.starts(seconds)
    slack = {
        str(action): latest - begin
        for action, begin, latest in zip(
            made.graph.actions, start, made.latest_starts(seconds, start[made.sink]), strict=False
        )
    }
    # 0F1 ends at 2, and rank 1 needs it at 4; 0B0 ends at 6, and 0B1 begins at 7.
    assert slack == {
        "0F0": 0,
        "0F1": 2,
        "0B0": 1,
        "0B1": 0,
        "1F0": 0,
        "1B0": 0,
        "1F1": 0,
        "1B1": 0,
    }
