"""What the codec refuses, how small it packs, and that what earlier versions wrote is read."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import dataclass, field, replace
from typing import Annotated

import pytest
from test_plan import even, plan

from planner.codec import NOT_WRITTEN, Packed, from_json, json_values, to_json
from planner.plan import Plan
from planner.schedule.expand import schedule_of
from planner.shards import Piece, Shard
from workers.protocol.orders import Generation

WRITTEN_BEFORE = (
    '{"chunks": 1, "epoch": 1, "layers": [[0, 1], [1, 2], [2, 4], [4, 5]], "microbatches": 2, "partition": "",'
    ' "pipelines": 2, "predicted_bubble": 1e-05, "predicted_peak_memory_bytes": 9400000000, "predicted_step_s":'
    ' 0.30000000000000004, "reason": "as it began", "recompute": [1, 3], "replicas": 3, "schedule": "1f1b", "shard":'
    ' "none", "shares": [4, 2], "snapshot_every": 0, "snapshots": [], "stage_ranks": [2, 0, 1, 2], "standbys": [[],'
    ' [0], [3, 1], [5], []], "version": 1}'
)
COPIED = replace(
    plan(replicas=3),
    reason="as it began",
    pipelines=2,
    shares=(4, 2),
    standbys=((), (0,), (3, 1), (5,), ()),
    recompute=(1, 3),
    predicted_step_s=0.1 + 0.2,
    predicted_bubble=1e-05,
    predicted_peak_memory_bytes=9_400_000_000,
)


def test_a_plan_that_an_earlier_version_wrote_is_read_and_written_alike() -> None:
    assert from_json(Plan, WRITTEN_BEFORE) == COPIED
    before = json.loads(WRITTEN_BEFORE)
    now = json_values(COPIED)
    assert json.dumps({name: now[name] for name in sorted(before)}) == WRITTEN_BEFORE


def test_a_plan_of_before_shares_standbys_and_snapshots_is_read() -> None:
    values = json.loads(WRITTEN_BEFORE)
    for name in ("shares", "standbys", "snapshots", "snapshot_every", "shard", "pipelines"):
        del values[name]
    old = replace(COPIED, pipelines=None, shares=(), standbys=())
    assert from_json(Plan, json.dumps(values)) == old


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": [[0, 1], [1, "2"]]}, "Plan.layers[1][1] is '2': Input should be a valid integer"),
        ({"epoch": 1.5}, "Plan.epoch is 1.5: Input should be a valid integer"),
        ({"epoch": True}, "Plan.epoch is True: Input should be a valid integer"),
        ({"reason": None}, "Plan.reason is None: Input should be a valid string"),
        ({"reason": ["x" * 50]}, f"Plan.reason is ['{'x' * 38}…: Input should be a valid string"),
        ({"copies": 2}, "Plan.copies is unknown: another version wrote it, and can read it"),
        ({"layers": [[0, 1, 2]]}, "Plan.layers[0]"),
    ],
)
def test_a_mistake_is_named_by_its_place(change: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match="Plan") as caught:
        from_json(Plan, json.dumps({**json.loads(WRITTEN_BEFORE), **change}))
    assert str(caught.value).startswith(said)


def test_a_text_is_one_whole_record() -> None:
    text = WRITTEN_BEFORE
    for wrong in ("", "{", "[]", "null", "3", f"{text},{text}", f"{text}],[{text}", f"{text}]", text[:-1]):
        with pytest.raises(ValueError, match=r"^(Plan|it is no JSON)"):
            from_json(Plan, wrong)
    lacking = {key: value for key, value in json.loads(text).items() if key != "stage_ranks"}
    with pytest.raises(ValueError, match=r"^Plan\.stage_ranks is missing$"):
        from_json(Plan, json.dumps(lacking))


@dataclass(frozen=True, kw_only=True)
class Leaf:
    a: int


@dataclass(frozen=True, kw_only=True)
class Other:
    b: str


@dataclass(frozen=True, kw_only=True)
class Holder(Packed):
    one: Leaf | Other
    pieces: tuple[Piece, ...] = ()
    seconds: float = math.inf
    content: bytes = b"\x00\xff"
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)
    remembered: Annotated[dict[int, int], NOT_WRITTEN] = field(
        default_factory=dict, init=False, compare=False
    )


HELD = Holder(
    one=Other(b="x"), pieces=(Piece(1), Piece(2, Shard(1, 3))), named={"": (5, 7), "of": (), "x": (-1,)}
)


def test_whatever_is_nested_arrives() -> None:
    HELD.remembered[3] = 4
    for kept in (HELD, replace(HELD, one=Leaf(a=3), seconds=-math.inf)):
        assert from_json(Holder, to_json(kept)) == kept
        sent = replace(kept, named={"x": (-1, 7), "of": ()})
        assert pickle.loads(pickle.dumps(sent)) == sent
    assert "remembered" not in json_values(HELD)
    assert from_json(Holder, to_json(HELD)).remembered == {}
    with pytest.raises(ValueError, match=r"^Holder\.remembered is unknown"):
        from_json(Holder, to_json(HELD)[:-1] + b',"remembered":{}}')


def test_a_program_is_a_text() -> None:
    schedule = schedule_of(even(3))
    assert json_values(schedule)["programs"][0] == " ".join(map(str, schedule.programs[0]))
    assert from_json(type(schedule), to_json(schedule)) == schedule
    for wrong, said in ((b"0X0", "'0X0' is not an action"), (b"0F", "is not an action")):
        with pytest.raises(ValueError, match=said):
            from_json(type(schedule), to_json(schedule).replace(b'"0F0 ', b'"%b ' % wrong))


def test_members_take_hardly_more_bytes_however_many_they_are() -> None:
    few, many = (
        Generation(
            number=1, epoch=1, members=tuple(range(ranks)), store_host="a", store_port=1, timeout_s=1.0
        )
        for ranks in (8, 1000)
    )
    assert pickle.loads(pickle.dumps(many)) == many
    assert len(pickle.dumps(many)) < len(pickle.dumps(few)) + 30
