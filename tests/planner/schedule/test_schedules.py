"""Golden tables, closed forms and properties of every family."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import lines, text

from planner.ir import ActionKind, Schedule
from planner.schedule.graph import build_graph
from planner.schedule.in_flight import in_flight
from planner.schedule.registry import Family, build, families
from planner.schedule.validate import ScheduleError
from planner.simulation.simulate import Costs, simulate

UNIT = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)

GOLDEN = {
    ("gpipe", 3, 2, 1): """
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
        2F0 2F1 2B0 2B1
    """,
    ("1f1b", 4, 6, 1): """
        0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
        1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
        3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    """,
    ("1f1b", 3, 1, 1): """
        0F0 0B0
        1F0 1B0
        2F0 2B0
    """,
    ("interleaved", 2, 4, 2): """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
        1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """,
    ("interleaved", 2, 2, 3): """
        0F0 0F1 2F0 2F1 4F0 4F1 4B0 4B1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3F1 5F0 5B0 5F1 5B1 3B0 3B1 1B0 1B1
    """,
    ("zb-h1", 3, 4, 1): """
        0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """,
    ("zb-h1", 3, 1, 1): """
        0F0 0I0 0W0
        1F0 1I0 1W0
        2F0 2I0 2W0
    """,
    ("zbv", 2, 4, 2): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """,
    ("zbv", 1, 2, 2): """
        0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """,
    ("zbv", 2, 1, 2): """
        0F0 3F0 3I0 3W0 0I0 0W0
        1F0 2F0 2I0 2W0 1I0 1W0
    """,
}


@pytest.mark.parametrize("arguments", GOLDEN, ids=str)
def test_golden_table(arguments: tuple[str, int, int, int]):
    assert text(build(*arguments)) == lines(GOLDEN[arguments])


def makespan(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> float:
    return simulate(build(name, ranks, microbatches, chunks), UNIT).makespan_s


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_take_3_m_plus_p_minus_1(name: str, ranks: int):
    for microbatches in range(1, 25):
        assert makespan(name, ranks, microbatches) == 3 * (microbatches + ranks - 1)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_interleaved_takes_3_m_v_plus_3_p_minus_1(ranks: int, chunks: int):
    for microbatches in range(ranks, 4 * ranks + 1, ranks):
        expected = 3 * microbatches * chunks + 3 * (ranks - 1)
        assert makespan("interleaved", ranks, microbatches, chunks) == expected


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zbv_takes_6_m_plus_p_minus_1(ranks: int):
    for microbatches in range(2 * ranks - 1, 4 * ranks + 1):
        assert makespan("zbv", ranks, microbatches) == 6 * microbatches + ranks - 1


@pytest.mark.parametrize("ranks", range(1, 9))
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(ranks: int):
    for microbatches in range(1, 25):
        expected = 3 * microbatches + ranks - 1 if microbatches >= ranks else 2 * (microbatches + ranks) - 1
        assert makespan("zb-h1", ranks, microbatches) == expected
    assert 3 * (makespan("zb-h1", ranks, 24) - 72) == makespan("1f1b", ranks, 24) - 72


@given(
    ranks=st.integers(1, 6),
    extra=st.integers(0, 8),
    forward=st.integers(1, 9),
    input_grad=st.integers(1, 9),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_zb_h1_bubble_is_p_minus_1_times_f_plus_i_minus_w(
    ranks: int, extra: int, forward: int, input_grad: int, data: st.DataObject
):
    weight_grad = data.draw(st.integers(0, min(forward, input_grad)))
    microbatches = ranks + extra
    costs = Costs.uniform(forward_s=forward, input_grad_s=input_grad, weight_grad_s=weight_grad)
    work = microbatches * (forward + input_grad + weight_grad)
    bubble = (ranks - 1) * (forward + input_grad - weight_grad)
    assert simulate(build("zb-h1", ranks, microbatches), costs).makespan_s == work + bubble


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 14, 20])
def test_in_flight_per_rank(ranks: int, microbatches: int):
    reach = [min(microbatches, ranks - rank) for rank in range(ranks)]
    assert list(in_flight(build("gpipe", ranks, microbatches))) == [microbatches] * ranks
    assert list(in_flight(build("1f1b", ranks, microbatches))) == reach
    zb_h1 = build("zb-h1", ranks, microbatches)
    assert list(in_flight(zb_h1, until_weight_grad=False)) == reach
    assert list(in_flight(zb_h1)) == [min(microbatches, ranks)] * ranks
    zbv = in_flight(build("zbv", ranks, microbatches))
    assert max(zbv) == 2 * min(microbatches, ranks)
    if microbatches >= 2 * ranks - 1:
        assert list(zbv) == [2 * ranks] * ranks


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_in_flight_of_interleaved(ranks: int, chunks: int, rounds: int):
    microbatches = rounds * ranks
    expected = [
        min(microbatches * chunks, 2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1) for rank in range(ranks)
    ]
    assert list(in_flight(build("interleaved", ranks, microbatches, chunks))) == expected


@st.composite
def built(draw: st.DrawFn) -> tuple[Family, int, int, int, Schedule]:
    family = draw(st.sampled_from(sorted(families().values(), key=lambda family: family.name)))
    ranks = draw(st.integers(1, 8))
    microbatches = draw(st.integers(1, 24)) if not family.whole_rounds else ranks * draw(st.integers(1, 3))
    chunks = draw(st.integers(family.least_chunks, family.most_chunks or 4))
    return family, ranks, microbatches, chunks, build(family.name, ranks, microbatches, chunks)


@given(case=built())
@settings(max_examples=100, deadline=None)
def test_every_family_keeps_its_word(case: tuple[Family, int, int, int, Schedule]):
    """`build` validates the schedule; here it must also have the properties that the registry states."""
    family, ranks, microbatches, chunks, schedule = case
    assert schedule.name == family.name
    assert schedule.stages == family.stages(ranks, chunks) == ranks * chunks
    assert schedule.microbatches == microbatches
    placement = family.placement(ranks, chunks)
    assert [schedule.rank_of_stage[stage] for stage in range(schedule.stages)] == list(placement)
    kinds = {action.kind for program in schedule.programs for action in program}
    split = {ActionKind.FORWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD}
    assert kinds == (split if family.splits_backward else {ActionKind.FORWARD, ActionKind.BACKWARD})
    assert family.function(ranks, microbatches, chunks) == schedule


@given(case=built())
@settings(max_examples=50, deadline=None)
def test_no_family_holds_more_than_gpipe_nor_beats_its_work(case: tuple[Family, int, int, int, Schedule]):
    _, ranks, microbatches, chunks, schedule = case
    simulation = simulate(schedule, UNIT)
    assert max(simulation.in_flight) <= microbatches * chunks
    assert simulation.busy_s == (3 * microbatches * chunks,) * ranks
    assert simulation.makespan_s >= 3 * microbatches * chunks
    assert len(build_graph(schedule).actions) == sum(map(len, schedule.programs))


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ScheduleError, match=r"unknown schedule 'zb_h1', did you mean 'zb-h1'\?"):
        build("zb_h1", 2, 2)
    with pytest.raises(ScheduleError, match=r"unknown schedule '1F1B', did you mean '1f1b'\?"):
        build("1F1B", 2, 2)
    with pytest.raises(ScheduleError, match="Known: gpipe, 1f1b, interleaved, zb-h1, zbv, and csv:PATH"):
        build("quux", 2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 6), "6 microbatches on 4 ranks, needs a multiple of the ranks: use 4 or 8"),
        (("interleaved", 4, 2), "2 microbatches on 4 ranks, needs a multiple of the ranks: use 4 microb"),
        (("interleaved", 4, 8, 1), "1 chunks per rank, needs at least 2"),
        (("zbv", 4, 8, 3), "3 chunks per rank, must be 2"),
        (("zbv", 4, 8, 1), "1 chunks per rank, needs at least 2"),
        (("1f1b", 4, 8, 2), "2 chunks per rank, must be 1; interleaved takes any number"),
        (("gpipe", 0, 8), "ranks = 0, must be at least 1"),
        (("gpipe", 2, 0), "microbatches = 0, must be at least 1"),
        (("gpipe", 2, 2, 0), "chunks = 0, must be at least 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: tuple[str, int, int], message: str):
    with pytest.raises(ScheduleError, match=f"^{arguments[0]}: {message}"):
        build(*arguments)


def test_a_schedule_takes_no_hash_along_to_another_process() -> None:
    """Strings have another hash there."""
    schedule = build("1f1b", 2, 4)
    assert hash(schedule) == hash(build("1f1b", 2, 4))
    there = (
        "import pickle, sys; from planner.schedule.registry import build;"
        "print({build('1f1b', 2, 4): 'found'}.get(pickle.load(sys.stdin.buffer)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", there], input=pickle.dumps(schedule), stdout=subprocess.PIPE, check=True
    )
    assert run.stdout == b"found\n"
