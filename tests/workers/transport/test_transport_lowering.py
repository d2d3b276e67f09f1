"""The lowered order: every message once on both sides, one order for all ranks, and no deadlock however
strictly each rank's groups run one after the other."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir import Action, ActionKind, Schedule
from planner.lowering import Group, WindowTransfer, first_forwards, lower
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build, families

Groups = tuple[tuple[Group, ...], ...]


def table(text: str, **fields: int) -> Schedule:
    programs = tuple(tuple(map(Action.parse, line.split())) for line in text.strip().splitlines())
    stages = {action.stage for program in programs for action in program}
    microbatches = {action.index for program in programs for action in program}
    return Schedule("table", len(stages), len(microbatches), programs, **fields)


def text(groups: tuple[Group, ...]) -> list[str]:
    return [" ".join(f"{t.direction[0]}{t.stage}.{t.microbatch}" for t in group) for group in groups]


def messages(schedule: Schedule) -> dict[Action, WindowTransfer]:
    """The message that each receiving action gets from another rank, in program order."""
    rank_of, found = schedule.rank_of_stage, {}
    for program in schedule.programs:
        for action in program:
            before = action.stage - 1 if action.kind is ActionKind.FORWARD else action.stage + 1
            if (
                action.kind not in (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
                or before not in rank_of
            ):
                continue
            if rank_of[before] != rank_of[action.stage]:
                direction = "forward" if action.kind is ActionKind.FORWARD else "backward"
                found[action] = WindowTransfer(
                    direction, action.stage, action.index, rank_of[before], rank_of[action.stage]
                )
    return found


class StrictRanks:
    """Runs a schedule's programs, with each rank's groups strictly one after the other.

    A group starts once all its sends are ready and the group before is over. It is over once each transfer in
    it has started on both sides. With `in_the_way` a rank that has started a group does nothing else until it
    is over.
    """

    def __init__(self, schedule: Schedule, groups: Groups, *, in_the_way: bool) -> None:
        self.programs = schedule.programs
        self.groups = groups
        self.in_the_way = in_the_way
        self.received = messages(schedule)
        self.heads = [0] * schedule.ranks
        self.made: set[WindowTransfer] = set()
        self.over = [0] * schedule.ranks
        """For each rank, the number of groups that are over."""
        self.started = [0] * schedule.ranks
        sent_by = {}
        for action, transfer in self.received.items():
            stage = action.stage + (-1 if action.kind is ActionKind.FORWARD else 1)
            kinds = (
                (ActionKind.FORWARD,)
                if action.kind is ActionKind.FORWARD
                else (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)
            )
            for kind in kinds:
                sent_by[Action(kind, stage, action.index)] = transfer
        self.sent_by = sent_by

    def run(self) -> bool:
        """Whether all ranks reach the end of their programs and of their groups."""
        while any(self._step(rank) for rank in range(len(self.programs))):
            pass
        return all(
            head == len(program) and over == len(groups)
            for head, program, over, groups in zip(
                self.heads, self.programs, self.over, self.groups, strict=True
            )
        )

    def _step(self, rank: int) -> bool:
        moved = False
        groups = self.groups[rank]
        if self.started[rank] == self.over[rank] < len(groups) and self._ready(rank, self.over[rank]):
            self.started[rank] += 1
            moved = True
        if self.started[rank] > self.over[rank] and all(
            self._has_started(t) for t in groups[self.over[rank]]
        ):
            self.over[rank] += 1
            moved = True
        standing = self.in_the_way and self.started[rank] > self.over[rank]
        if not standing and self.heads[rank] < len(self.programs[rank]):
            action = self.programs[rank][self.heads[rank]]
            if self._may_run(rank, action):
                self.made |= {self.sent_by[action]} if action in self.sent_by else set()
                self.heads[rank] += 1
                moved = True
        return moved

    def _ready(self, rank: int, number: int) -> bool:
        return all(t in self.made for t in self.groups[rank][number] if t.source == rank)

    def _has_started(self, transfer: WindowTransfer) -> bool:
        return all(
            any(transfer in group for group in self.groups[rank][: self.started[rank]])
            for rank in (transfer.source, transfer.target)
        )

    def _may_run(self, rank: int, action: Action) -> bool:
        if action not in self.received:
            return True
        number = next(i for i, group in enumerate(self.groups[rank]) if self.received[action] in group)
        # The channel asserts this: no rank waits for a group before all sends in it and in earlier groups are
        # ready.
        assert all(self._ready(rank, i) for i in range(number + 1)), (rank, str(action))
        return self.over[rank] > number


schedules = st.tuples(
    st.sampled_from(sorted(families())),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(2, 3),
    st.booleans(),
)


def built(drawn: tuple[str, int, int, int, bool]) -> Schedule:
    name, ranks, rounds, chunks, recompute = drawn
    schedule = build(name, ranks, ranks * rounds, chunks if name == "interleaved" else None)
    return add_recompute(schedule, range(schedule.stages)) if recompute else schedule


@given(drawn=schedules)
@settings(max_examples=60, deadline=None)
def test_every_message_once_on_both_sides_in_one_order(drawn: tuple[str, int, int, int, bool]) -> None:
    schedule = built(drawn)
    groups = lower(schedule)
    expected = set(messages(schedule).values())
    flat = [[transfer for group in of_rank for transfer in group] for of_rank in groups]
    for rank, transfers in enumerate(flat):
        assert all(groups[rank])
        assert len(set(transfers)) == len(transfers)
        assert set(transfers) == {t for t in expected if rank in (t.source, t.target)}
        for other in range(rank):
            shared = [t for t in transfers if other in (t.source, t.target)]
            assert shared == [t for t in flat[other] if rank in (t.source, t.target)]


@given(drawn=schedules, in_the_way=st.booleans())
@settings(max_examples=60, deadline=None)
def test_nothing_deadlocks_under_strict_order(
    drawn: tuple[str, int, int, int, bool], in_the_way: bool
) -> None:
    schedule = built(drawn)
    assert StrictRanks(schedule, lower(schedule), in_the_way=in_the_way).run()


@given(drawn=schedules, in_the_way=st.booleans(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_forwards_of_the_first_microbatches(
    drawn: tuple[str, int, int, int, bool], in_the_way: bool, data: st.DataObject
) -> None:
    schedule = built(drawn)
    count = data.draw(st.integers(1, schedule.microbatches))
    forwards = replace(
        schedule,
        programs=tuple(
            tuple(a for a in program if a.kind is ActionKind.FORWARD and a.index < count)
            for program in schedule.programs
        ),
        microbatches=count,
        frozen_stages=schedule.stages,
    )
    groups = tuple(first_forwards(of_rank, count) for of_rank in lower(schedule))
    assert {t for of_rank in groups for group in of_rank for t in group} == set(messages(forwards).values())
    assert StrictRanks(forwards, groups, in_the_way=in_the_way).run()


def test_opposite_transfers_are_one_group_on_both_sides() -> None:
    first, second = lower(build("1f1b", 2, 4))
    assert first == second
    assert text(first) == ["f1.0", "f1.1", "b0.0", "f1.2 b0.1", "f1.3 b0.2", "b0.3"]
    assert first[3] == (WindowTransfer("forward", 1, 2, 0, 1), WindowTransfer("backward", 0, 1, 1, 0))


def test_stages_on_one_rank_exchange_nothing() -> None:
    assert lower(build("zbv", 1, 2)) == ((),)
    # zbv folds the pipeline: stages 1 and 2 share the last of two ranks.
    assert {t.stage for group in lower(build("zbv", 2, 4))[1] for t in group if t.direction == "forward"} == {
        1,
        3,
    }


def test_nothing_goes_back_into_a_frozen_prefix() -> None:
    frozen = table("0F0 0F1\n1F0 1F1 1B0 1B1", frozen_stages=1)
    assert [text(of_rank) for of_rank in lower(frozen)] == [["f1.0", "f1.1"]] * 2


@pytest.mark.parametrize("in_the_way", [False, True])
def test_another_order_on_one_rank_does_deadlock(in_the_way: bool) -> None:
    schedule = build("gpipe", 3, 3)
    first, second, third = lower(schedule)
    assert not StrictRanks(schedule, (first, second, third[1::-1] + third[2:]), in_the_way=in_the_way).run()
