from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_text import forwards_of, lines, text
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, _Action, _validate_schedule

from planner.schedule.passes import add_recompute, freeze_stages
from planner.schedule.registry import build
from planner.schedule.table_format import dump, parse
from planner.schedule.validate import ScheduleError

FAMILIES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"]


def test_the_table_of_1f1b():
    """One column per action, each in a later column than its input."""
    assert (
        dump(build("1f1b", 2, 2))
        == lines("""
        0F0,0F1,,0B0,,0B1
        ,1F0,1B0,1F1,1B1,
    """)
        + "\n"
    )


@given(name=st.sampled_from(FAMILIES), ranks=st.integers(1, 6), rounds=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_round_trip(name: str, ranks: int, rounds: int):
    schedule = build(name, ranks, ranks * rounds)
    assert parse(dump(schedule), name) == schedule
    assert parse(dump(add_recompute(schedule, range(schedule.stages))), name) == schedule


@given(name=st.sampled_from(FAMILIES), ranks=st.integers(1, 6), rounds=st.integers(1, 4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_round_trip_with_a_frozen_prefix(name: str, ranks: int, rounds: int, data: st.DataObject):
    schedule = build(name, ranks, ranks * rounds)
    frozen = freeze_stages(schedule, data.draw(st.integers(0, schedule.stages - 1)))
    assert parse(dump(frozen), name) == frozen
    assert parse(dump(add_recompute(frozen, range(frozen.stages))), name) == frozen


def test_the_first_stages_may_only_go_forward():
    schedule = parse("0F0,0F1\n,1F0,1F1\n,,2F0,2I0,2F1,2I1,2W0,2W1", "csv:x")
    assert schedule.frozen_stages == 2
    assert text(schedule) == "0F0 0F1\n1F0 1F1\n2F0 2I0 2F1 2I1 2W0 2W1"


@pytest.mark.parametrize("name", FAMILIES)
def test_pytorch_reads_it(name: str):
    rows = [row.split(",") for row in dump(build(name, 3, 6)).splitlines()]
    actions = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    schedule = build(name, 3, 6)
    assert _validate_schedule(actions, 3, schedule.stages, 6) == schedule.rank_of_stage


def test_a_forward_only_window_can_be_written():
    assert dump(forwards_of(build("gpipe", 2, 2))) == "0F0,0F1,\n,1F0,1F1\n"


def test_bubbles_blanks_and_line_ends_do_not_matter():
    schedule = parse("\ufeff 0F0 ,,0B0\r\n\t,1F0,1B0,,\r\n\r\n", "csv:x")
    assert text(schedule) == "0F0 0B0\n1F0 1B0"
    assert (schedule.name, schedule.stages, schedule.microbatches) == ("csv:x", 2, 1)


def test_overlapped_actions_run_one_after_the_other():
    schedule = parse("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2", "csv:x")
    assert text(schedule) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_pytorchs_schedule_with_overlaps_is_read():
    stages = [SimpleNamespace(stage_index=stage, group_size=2, num_stages=4) for stage in (0, 3)]
    order = ScheduleDualPipeV._calculate_single_rank_operations
    own = SimpleNamespace(
        _num_stages=4, _n_microbatches=6, pp_group_size=2, rank=0, num_stages=4, rank_stages=stages
    )
    rows = [[str(action or "") for action in order(own, rank)] for rank in range(2)]
    assert any("OVERLAP_F_B" in cell for row in rows for cell in row)
    schedule = parse("\n".join(",".join(row) for row in rows), "csv:dualpipev")
    assert (schedule.stages, schedule.microbatches) == (4, 6)
    assert schedule.rank_of_stage == {0: 0, 3: 0, 1: 1, 2: 1}


TRAPS = {
    "prefix match": (
        "0F0,0B0\n1F0,2F0x",
        "csv:x: row 2, column 2: '2F0x' is not an action: expected <stage>",
    ),
    "not a token": ("0F0;0B0", "csv:x: row 1, column 1: '0F0;0B0' is not an action"),
    "communication": ("0F0,0SEND_F0", "csv:x: row 1, column 2: '0SEND_F0' is communication or bookkeeping"),
    "sharding": ("0UNSHARD,0F0", "csv:x: row 1, column 1: '0UNSHARD' is communication or bookkeeping"),
    "gradient reduction": ("0F0,0B0,0REDUCE_GRAD", "csv:x: row 1, column 3: '0REDUCE_GRAD' is communication"),
    "overlap of a send": (
        "0F0,(0SEND_F1;0B0)OVERLAP_F_B",
        "csv:x: row 1, column 2: '0SEND_F1' is communication",
    ),
    "overlap of nothing": ("0F0,()OVERLAP_F_B", "csv:x: row 1, column 2: '' is not an action"),
    "overlap with itself": (
        "0F0,(0F1;0F1)OVERLAP_F_B",
        "row 1, column 2: csv:x: rank 0, position 2, 0F1: doubled: already at",
    ),
    "recompute": ("0F0,0R0,0B0", "csv:x: row 1, column 2: 0R0 has kind R, which this format does not know"),
    "update": ("0F0,0B0,0U0", "csv:x: row 1, column 3: 0U0 has kind U, which this format does not know"),
    "empty row": ("0F0,0B0\n,,\n1F0,1B0", "csv:x: row 2 has no action: its rank has nothing to do."),
    "empty last row": ("0F0,0B0\n,", "csv:x: row 2 has no action: its rank has nothing to do."),
    "empty file": ("", "csv:x: no actions: expected one row per rank"),
    "blank file": (" \n\n", "csv:x: no actions: expected one row per rank"),
    "open quote": ('0F0,"0B0', "csv:x: line 1 is not CSV: unexpected end of data"),
    "doubled": (",0F0,,0B0,0F0", "row 1, column 5: csv:x: rank 0, position 2, 0F0: doubled: already at"),
    "out of order": ("0F0,0F1,,0B1,0B0", "row 1, column 5: csv:x: rank 0, position 3, 0B0: comes after 0B1"),
    "two ranks": ("0F0,0F1\n,,0B0,0B1", "row 2, column 3: csv:x: rank 1, position 0, 0B0: stage 0 is on two"),
    "missing": ("0F0,0B0\n2F0,2B0", "csv:x: no rank holds stage 1: 1F0 is missing"),
    "missing backward of a later stage": (
        "0F0,,,0B0\n,1F0\n,,2F0,2B0",
        "row 2, column 2: csv:x: rank 1, position 0, 1F0: its backward is missing: 1B0, or 1I0 and 1W0",
    ),
    "missing backward above a frozen stage": (
        "0F0\n,1F0,,1B0\n,,2F0",
        "row 3, column 3: csv:x: rank 2, position 0, 2F0: its backward is missing: 2B0, or 2I0 and 2W0",
    ),
    "a backward of one microbatch only": (
        "0F0,0F1,,0B0\n,1F0,1B0,1F1,1B1",
        "row 1, column 2: csv:x: rank 0, position 1, 0F1: its backward is missing: 0B1, or 0I1 and 0W1",
    ),
    "no backward at all": (
        "0F0\n,1F0",
        "row 1, column 1: csv:x: rank 0, position 0, 0F0: its backward is missing: 0B0, or 0I0 and 0W0",
    ),
    "missing weight gradient": (
        "0F0,0I0",
        "row 1, column 2: csv:x: rank 0, position 1, 0I0: its weight grad",
    ),
    "huge stage": ("0F0,0B0\n99999999999F0", "csv:x: no rank holds stage 1: 1F0 is missing: of 100"),
    "deadlock": (
        "0F0,,0B0,0F1,,0B1\n,1F0,1F1,1B0,1B1",
        "row 1, column 3: csv:x: rank 0, position 1, 0B0: deadlock: rank 0 stands at 0B0",
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_trap_is_refused_with_row_and_column(trap: str):
    table, message = TRAPS[trap]
    with pytest.raises(ScheduleError) as caught:
        parse(table, "csv:x")
    assert str(caught.value).startswith(message)


def test_a_number_too_long_to_read_is_refused():
    with pytest.raises(ScheduleError, match=r"^csv:x: row 1, column 1: "):
        parse("9" * 5000 + "F0", "csv:x")


def test_the_size_is_held_against_what_is_asked_for():
    table = dump(build("1f1b", 2, 3))
    assert parse(table, "x", ranks=2, microbatches=3).stages == 2
    with pytest.raises(ScheduleError, match=r"x: the table has 2 ranks \(rows\), and the job has 4"):
        parse(table, "x", ranks=4)
    with pytest.raises(ScheduleError, match="x: the table has 3 microbatches, and the job has 8"):
        parse(table, "x", microbatches=8)
