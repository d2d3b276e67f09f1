"""Legal schedules with one change: each that `validate` still accepts runs and adds gradients in order."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ir import Action, ActionKind, Schedule
from planner.schedule.passes import add_recompute
from planner.schedule.registry import build
from planner.schedule.validate import (
    ScheduleError,
    _check_actions,
    _check_complete,
    _check_deadlock,
    _check_microbatch_order,
    _check_needs,
    _check_sizes,
    _plainly_valid,
    validate,
)
from planner.simulation.simulate import Costs, simulate

UNIT = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)


@st.composite
def right(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]))
    ranks = draw(st.integers(1, 4))
    schedule = build(name, ranks, ranks * draw(st.integers(1, 3)))
    stages = draw(st.sets(st.integers(0, schedule.stages - 1)))
    return add_recompute(schedule, stages)


def accepted(schedule: Schedule, rank: int, program: list[Action]) -> bool:
    programs = (*schedule.programs[:rank], tuple(program), *schedule.programs[rank + 1 :])
    changed = replace(schedule, programs=programs)
    try:
        validate(changed)
    except ScheduleError:
        return False
    simulate(changed, UNIT)
    for kinds in (
        (ActionKind.FORWARD,),
        (ActionKind.BACKWARD, ActionKind.INPUT_GRAD),
        (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD),
    ):
        for stage in range(schedule.stages):
            order = [action.index for action in program if action.stage == stage and action.kind in kinds]
            assert order == sorted(order)
    return True


@given(schedule=right(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_moving_an_action(schedule: Schedule, data: st.DataObject):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    program = list(schedule.programs[rank])
    places = st.integers(0, len(program) - 1)
    program.insert(data.draw(places), program.pop(data.draw(places)))
    accepted(schedule, rank, program)


@given(schedule=right(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_leaving_one_out_or_doubling_one(schedule: Schedule, data: st.DataObject):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    program = list(schedule.programs[rank])
    place = data.draw(st.integers(0, len(program) - 1))
    without = program[:place] + program[place + 1 :]
    assert accepted(schedule, rank, without) == (program[place].kind is ActionKind.RECOMPUTE)
    other = data.draw(st.integers(0, schedule.ranks - 1))
    assert not accepted(schedule, other, [*schedule.programs[other], program[place]])


@given(schedule=right(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_the_quick_look_accepts_what_the_checks_accept(schedule: Schedule, data: st.DataObject):
    programs = [list(program) for program in schedule.programs]
    for _ in range(data.draw(st.integers(0, 2))):
        rank = data.draw(st.integers(0, schedule.ranks - 1))
        place = data.draw(st.integers(0, len(programs[rank]) - 1))
        action = programs[rank].pop(place)
        changed = replace(
            action,
            kind=data.draw(st.sampled_from([action.kind, *ActionKind])),
            index=data.draw(st.sampled_from([action.index, action.index, 0, -1, schedule.microbatches])),
        )
        target = data.draw(st.sampled_from([rank, rank, 0]))
        programs[target].insert(data.draw(st.integers(0, len(programs[target]))), changed)
    odd = replace(
        schedule,
        programs=tuple(map(tuple, programs)),
        frozen_stages=data.draw(st.sampled_from([0, 0, 0, 1])),
        synchronous=data.draw(st.sampled_from([True, True, False])),
    )
    quick = all(odd.programs) and _plainly_valid(odd)
    try:
        _check_sizes(odd)
        places = _check_actions(odd)
        _check_needs(odd, places)
        _check_complete(odd, places)
        if odd.synchronous:
            _check_microbatch_order(odd)
        _check_deadlock(odd, places)
    except ScheduleError:
        assert not quick
    else:
        assert quick
