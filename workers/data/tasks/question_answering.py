"""`question-answering`: the span of a context that answers a question, in the shape of SQuAD's tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workers.data.dataset import Batch
from workers.data.tasks.task import ASKED, SECOND, SPECIAL, Columns, EncodedRow, Setting, padded, text_of
from workers.data.tokenizer import EncodedText
from workers.metrics.answers import AnswerWindow, OfAnswers
from workers.metrics.measure import Measure
from workers.protocol.errors import JobError

_TEXT, _START = "text", "answer_start"


class QuestionAnswering:
    """Rows of at most T tokens, the question and as much of the context as there is room for.

    A longer context gives several rows, windows that overlap. The tokens of the answer are those that are asked for; a
    window that does not hold all of it asks for none, and its label is its number among those of its question.
    """

    roles: tuple[str, ...] = ("question", "context", "answers")
    optional: tuple[str, ...] = ()
    draws = False

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        places = [f"{where}, row {first + number}" for number in range(len(columns["question"]))]
        questions, contexts = (
            [_told(value, role, place) for value, place in zip(columns[role], places, strict=True)]
            for role in ("question", "context")
        )
        answers = [
            _answers(value, context, place)
            for value, context, place in zip(columns["answers"], contexts, places, strict=True)
        ]
        encoded = self._setting.tokenizer.encoded(questions, contexts)
        for each, context, right, place in zip(encoded, contexts, answers, places, strict=True):
            yield from self._windows(each, context, right, place)

    def _windows(
        self, pair: EncodedText, context: str, answers: list[tuple[str, int]], where: str
    ) -> Iterator[EncodedRow]:
        setting = self._setting
        special = np.array(pair.special, dtype=np.uint8)
        flags = (np.array(pair.segments, dtype=np.uint8) * SECOND | special * SPECIAL).astype(np.uint8)
        tokens = np.array(pair.tokens, dtype=np.int64)
        begin, stop = _context_of(flags)
        if begin == stop:
            raise JobError(
                f"{where}: the tokenizer does not tell the tokens of the context from those of the question: use the"
                " tokenizer that belongs to the model"
            )
        around = len(tokens) - (stop - begin)
        room = setting.length - around
        if room < stop - begin and room <= setting.overlap:
            if setting.too_long == "drop":
                return
            raise JobError(
                f"{where}: its question and special tokens take {around:,} of the {setting.length:,} tokens of a"
                f" window, which leaves {max(room, 0):,} to the context, and windows of a context share"
                f' {setting.overlap:,}: raise model.context, lower data.overlap, or set data.too_long = "drop"'
            )
        spans = pair.offsets[begin:stop]
        for number, start in enumerate(range(0, stop - begin, max(room - setting.overlap, 1))):
            end = min(start + room, stop - begin)
            kept = [*range(begin), *range(begin + start, begin + end), *range(stop, len(tokens))]
            inside = spans[start:end]
            of_window = flags[kept]
            if answers and (asked := _tokens_of(answers[0], inside)) is not None:
                of_window[begin + asked[0] : begin + asked[1] + 1] |= ASKED
            yield EncodedRow(
                tokens[kept], of_window, float(number), _note(context, inside, [text for text, _ in answers])
            )
            if end == stop - begin:
                return

    def batch(self, rows: Sequence[EncodedRow], draws: Sequence[int]) -> Batch:
        """inputs: tokens, mask and segments, int64[B, T] each; targets: first and last token of the answer, int64[B]
        each, both the first of all where the window has none, and the context's tokens, int64[B, 2]: the first one and
        the one after the last."""
        length = self._setting.length
        asked = [np.flatnonzero(row.flags & ASKED) for row in rows]
        return Batch(
            inputs=(
                padded([row.tokens for row in rows], length, 0),
                padded([np.ones(len(row.tokens), dtype=np.int64) for row in rows], length, 0),
                padded([(row.flags & SECOND) // SECOND for row in rows], length, 0),
            ),
            targets=(
                *(torch.tensor([int(each[end]) if len(each) else 0 for each in asked]) for end in (0, -1)),
                torch.tensor([_context_of(row.flags) for row in rows]),
            ),
        )

    def begins(self, row: EncodedRow) -> bool:
        return row.label == 0

    def measure(self, held_out: Sequence[EncodedRow]) -> Measure:
        return OfAnswers(_Windows(held_out))


class _Windows(Sequence[AnswerWindow]):
    """The windows of rows, read where they are needed."""

    def __init__(self, rows: Sequence[EncodedRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        row = self._rows[number]
        noted = json.loads(row.note)
        return AnswerWindow(
            text=noted["text"],
            spans=noted["spans"],
            first=_context_of(row.flags)[0],
            answers=tuple(noted["answers"]),
            begins=row.label == 0,
        )


def _told(value: Any, role: str, where: str) -> str:
    """Raises JobError where `value` is no text, or blank."""
    text = text_of(value, role, where)
    if not text.strip():
        raise JobError(f"{where}: its {role} is empty: leave the row out")
    return text


def _answers(value: Any, context: str, where: str) -> list[tuple[str, int]]:
    """The right answers, each a text and the character of the context at which it begins.

    Raises:
        JobError: they are not of SQuAD's shape, or one is not where it should be.
    """
    texts: Any = None
    starts: Any = None
    if isinstance(value, dict):
        texts, starts = value.get(_TEXT), value.get(_START)
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        texts, starts = [each.get(_TEXT) for each in value], [each.get(_START) for each in value]
    if (
        not isinstance(texts, list)
        or not isinstance(starts, list)
        or len(texts) != len(starts)
        or not all(isinstance(each, str) for each in texts)
        or not all(isinstance(each, int) for each in starts)
    ):
        raise JobError(
            f'{where}: its answers are {value!r:.80}: give {{"text": [...], "answer_start": [...]}}, texts and the'
            " characters of the context at which they begin, with empty lists where there is no answer, or name another"
            " column (data.columns)"
        )
    given = [*zip(texts, starts, strict=True)]
    for text, start in given:
        there = context[max(start, 0) : max(start, 0) + len(text)]
        if not text.strip():
            raise JobError(f"{where}: an answer is empty: leave it out")
        if start < 0 or there != text:
            raise JobError(
                f"{where}: its answer {text!r:.60} should begin at character {start:,} of the context, where"
                f" {there!r:.60} stands: correct its answer_start, which counts characters from 0"
            )
    return given


def _context_of(flags: NDArray[np.uint8]) -> tuple[int, int]:
    """The first token of the context, and the one after its last."""
    found = np.flatnonzero((flags & (SECOND | SPECIAL)) == SECOND)
    return (int(found[0]), int(found[-1]) + 1) if len(found) else (0, 0)


def _tokens_of(answer: tuple[str, int], spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first and the last of the tokens with the characters `spans` that hold `answer`; None: not all of it is
    there."""
    start, stop = answer[1], answer[1] + len(answer[0])
    if spans[0][0] > start or spans[-1][1] < stop:
        return None
    first = next(number for number, (_, end) in enumerate(spans) if end > start)
    last = next(number for number in reversed(range(len(spans))) if spans[number][0] < stop)
    return (first, last) if first <= last else None


def _note(context: str, spans: Sequence[tuple[int, int]], answers: list[str]) -> bytes:
    """The part of the context that a window has, and the right answers, for the metrics."""
    first = spans[0][0]
    return json.dumps(
        {
            "text": context[first : spans[-1][1]],
            "spans": [(start - first, end - first) for start, end in spans],
            "answers": answers,
        },
        separators=(",", ":"),
    ).encode()
