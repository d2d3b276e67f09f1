"""Many assignments of costs to one schedule, laid out together, take what each takes alone."""

from __future__ import annotations

import numpy as np
import pytest

from planner.ir import ActionKind
from planner.profile import Link
from planner.schedule.passes import add_recompute, repeat, with_stage_ranks
from planner.schedule.registry import build, families
from planner.simulation.many import ManyMessages, levels_of, neighbour_of, rank_ends_s
from planner.simulation.simulate import Costs, Messages, simulate

N = 3


@pytest.mark.parametrize("by_action", [False, True])
@pytest.mark.parametrize("name", families())
def test_every_rank_ends_when_it_ends_alone(name: str, by_action: bool) -> None:
    rng = np.random.default_rng(7)
    schedule = repeat(add_recompute(build(name, 4, 8), {0, 2}), 2)
    schedule = with_stage_ranks(
        schedule, [(schedule.rank_of_stage[s] + 1) % 4 for s in range(schedule.stages)]
    )
    levels = levels_of(schedule)
    seconds = rng.uniform(0, 1, (N, len(ActionKind), schedule.stages))
    sizes = rng.integers(0, 100, (N, 2, schedule.stages))
    links = [[[_link(rng) for _ in range(4)] for _ in range(4)] for _ in range(N)]

    groups = np.array(
        [[seconds[n, list(ActionKind).index(kind), stage] for n in range(N)] for kind, stage in levels.groups]
    )
    parts = np.zeros((4, len(levels.groups), N))
    for group, (kind, stage) in enumerate(levels.groups):
        source = schedule.rank_of_stage[stage]
        target = schedule.rank_of_stage.get(neighbour_of(kind, stage))
        if kind in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD) and target not in (
            None,
            source,
        ):
            for n in range(N):
                size, link = (
                    int(sizes[n, int(kind is not ActionKind.FORWARD), stage]),
                    links[n][source][target],
                )
                parts[:, group, n] = (
                    link.sender_busy_s(size),
                    link.link_busy_s(size),
                    link.latency_s,
                    link.receiver_busy_s(size),
                )
    sender_s, link_s, latency_s, receiver_s = parts
    messages = ManyMessages(sender_s=sender_s, link_s=link_s, latency_s=latency_s, receiver_s=receiver_s)
    ends_s = rank_ends_s(levels, groups[levels.group_of] if by_action else groups, messages)

    for n in range(N):
        costs = Costs(
            {kind: tuple(seconds[n, number].tolist()) for number, kind in enumerate(ActionKind)},
            messages=Messages(
                forward_bytes=tuple(sizes[n, 0].tolist()),
                backward_bytes=tuple(sizes[n, 1].tolist()),
                links=tuple(map(tuple, links[n])),
            ),
        )
        timeline = simulate(schedule, costs).timeline
        assert ends_s[:, n].tolist() == pytest.approx([of_rank[-1].end_s for of_rank in timeline], rel=1e-12)


def _link(rng: np.random.Generator) -> Link:
    sender, per_byte, latency, receiver = rng.uniform(0, 0.2, 4).tolist()
    return Link(
        latency_s=latency,
        bytes_per_s=float(rng.uniform(50, 500)),
        sender_s=sender,
        sender_s_per_byte=per_byte / 100,
        receiver_s=receiver,
        receiver_s_per_byte=per_byte / 50,
    )
