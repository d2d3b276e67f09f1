"""Histories as columns in JSON: the same bits come back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from orchestrator.history.columns import Columns


@dataclass(frozen=True)
class Row:
    number: int
    value: float
    text: str = ""
    maybe: int | None = None


SERIES = TypeAdapter(Annotated[dict[int, Row], Columns(Row)])
LIST = TypeAdapter(Annotated[list[Row], Columns(Row)])
ROWS = [Row(1, 0.1), Row(2, math.inf, "é", 3), Row(3, 5e-324)]


@pytest.mark.parametrize("rows", [[], ROWS])
def test_the_same_entries_come_back(rows: list[Row]) -> None:
    by_step = {7 * row.number: row for row in rows}
    assert SERIES.validate_json(SERIES.dump_json(by_step)) == by_step
    assert LIST.validate_json(LIST.dump_json(rows)) == rows


def test_a_nan_stays_one() -> None:
    (row,) = LIST.validate_json(LIST.dump_json([Row(1, math.nan)]))
    assert math.isnan(row.value)


@pytest.mark.parametrize(
    "text",
    [
        b"[]",
        b"1",
        b"{}",
        b'{"number":[1],"value":"AAAA","text":[""],"maybe":[null]}',
        b'{"number":[1,2],"value":"AAAAAAAAAAA=","text":[""],"maybe":[null]}',
    ],
)
def test_what_are_no_columns_is_refused(text: bytes) -> None:
    with pytest.raises(ValidationError):
        LIST.validate_json(text)
