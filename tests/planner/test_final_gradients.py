"""When gradients are final before the window ends: none while others wait for this rank's messages."""

import pytest

from planner.final_gradients import FinalGradients, final_gradients
from planner.ir import Schedule
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build


def of_ranks(schedule: Schedule) -> list[tuple[dict[str, tuple[int, ...]], list[str]]]:
    """Per rank: what leaves before which action, and during which."""
    found: list[tuple[dict[str, tuple[int, ...]], list[str]]] = []
    for rank, program in enumerate(schedule.programs):
        final: FinalGradients = final_gradients(
            program,
            rank=rank,
            stages=schedule.stages,
            frozen_stages=schedule.frozen_stages,
            rank_of_stage=schedule.rank_of_stage,
        )
        before = {str(program[number]): stages for number, stages in final.before.items()}
        found.append((before, [str(program[number]) for number in sorted(final.during)]))
    return found


def test_in_1f1b_those_of_the_first_rank_leave_during_its_last_backward() -> None:
    assert of_ranks(build("1f1b", 3, 4)) == [({}, ["0B3"]), ({}, []), ({}, [])]
    assert of_ranks(add_recompute(build("1f1b", 2, 4), range(2))) == [({}, ["0B3"]), ({}, [])]
    assert of_ranks(build("1f1b", 1, 4)) == [({}, ["0B3"])]


def test_deferred_weight_gradients_leave_on_every_rank() -> None:
    assert of_ranks(build("zb-h1", 2, 4)) == [({}, ["0W3"]), ({}, ["1W3"])]


def test_of_two_chunks_one_leaves_when_the_rank_has_nothing_more_to_send() -> None:
    (before, during), (other_before, other_during) = of_ranks(build("interleaved", 2, 4, 2))
    assert (before, during) == ({"0B2": (2,)}, ["0B3"])
    assert (other_before, other_during) == ({}, [])
    zbv = build("zbv", 2, 4, 2)
    for program, (before, during) in zip(zbv.programs, of_ranks(zbv), strict=True):
        last = {action.stage: number for number, action in enumerate(program) if action.kind in "BW"}
        named = [stage for stages in before.values() for stage in stages]
        assert sorted([*named, *(int(action[0]) for action in during)]) == sorted(last)


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_leaves_is_final_and_nothing_is_sent_to_neighbours_afterwards(family: str, ranks: int) -> None:
    chunks = 2 if family in ("interleaved", "zbv") else 1
    schedule = build(family, ranks, 8, chunks)
    for rank, program in enumerate(schedule.programs):
        final = final_gradients(
            program,
            rank=rank,
            stages=schedule.stages,
            frozen_stages=0,
            rank_of_stage=schedule.rank_of_stage,
        )
        for number in [*final.before, *(number + 1 for number in final.during)]:
            for action in program[number:]:
                target = action.stage + 1 if action.kind == "F" else action.stage - 1
                crosses = schedule.rank_of_stage.get(target, rank) != rank
                assert not crosses or action.kind == "W"
        for number, stages in final.before.items():
            assert not [a for a in program[number:] if a.stage in stages and a.kind in "BW"]
        for number in final.during:
            stage = program[number].stage
            assert not [a for a in program[number + 1 :] if a.stage == stage and a.kind in "BW"]
