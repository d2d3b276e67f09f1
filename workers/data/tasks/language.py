"""`language`: the next token of documents. `chat`: the next token of answers in conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.data.dataset import Batch
from workers.data.tasks.task import ASKED, Columns, EncodedRow, Setting, fitted, padded, text_of
from workers.models.documents import positions_in
from workers.models.loss import IGNORED
from workers.protocol.errors import JobError

ROLE, CONTENT, ANSWERS = "role", "content", "assistant"


class NextToken:
    """Rows of at most T + 1 tokens: all but the last are inputs, all but the first targets where they are asked for."""

    optional: tuple[str, ...] = ()
    draws = False

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def batch(self, rows: Sequence[EncodedRow], draws: Sequence[int]) -> Batch:
        """inputs: int64[B, T], 0 after the end of a row; targets: int64[B, T], `IGNORED` where nothing is asked."""
        length = self._setting.length
        return Batch(
            inputs=(padded([row.tokens[:-1] for row in rows], length, 0),),
            targets=(padded([_targets(row) for row in rows], length, IGNORED),),
        )

    def packed(self, samples: Sequence[Sequence[EncodedRow]], draws: Sequence[int]) -> Batch:
        """The microbatch of samples of several rows. The first token of a row is nobody's target.

        inputs: tokens, documents and positions, int64[B, T] each, as in `workers/models/documents.py`; targets as in
        `batch`.
        """

        def joined(part: Callable[[int, EncodedRow], NDArray[Any]], filling: int) -> Tensor:
            rows = [np.concatenate([part(n, row) for n, row in enumerate(each, 1)]) for each in samples]
            return padded(rows, self._setting.length, filling)

        documents = joined(lambda n, row: np.full(len(row.tokens) - 1, n), 0)
        return Batch(
            inputs=(joined(lambda _, row: row.tokens[:-1], 0), documents, positions_in(documents)),
            targets=(joined(lambda _, row: _targets(row), IGNORED),),
        )


def _targets(row: EncodedRow) -> NDArray[Any]:
    """All tokens but the first, where they are asked for."""
    return np.where(row.flags[1:] & ASKED, row.tokens[1:].astype(np.int64), IGNORED)


class Language(NextToken):
    """Documents: each begins a row of its own, and a long one goes on in further rows, unless rows are packed."""

    roles: tuple[str, ...] = ("text",)

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        places = [f"{where}, row {first + number}" for number in range(len(columns["text"]))]
        texts = [text_of(each, "text", place) for each, place in zip(columns["text"], places, strict=True)]
        setting, end = self._setting, self._setting.tokenizer.end
        for encoded, place in zip(setting.tokenizer.encoded(texts), places, strict=True):
            tokens = np.array([*encoded.tokens, *(() if end is None else (end,))], dtype=np.int64)
            row: EncodedRow | None = EncodedRow(tokens, np.full(len(tokens), ASKED, dtype=np.uint8))
            if setting.pack:
                row = fitted(row, setting.length + 1, setting.too_long, place)
            if row is None:
                continue
            # Two rows share a token: it ends the one and begins the other, and is asked for once.
            for start in range(0, len(row.tokens) - 1, setting.length):
                part = slice(start, start + setting.length + 1)
                yield EncodedRow(row.tokens[part], row.flags[part])


class Chat(NextToken):
    """Conversations in the form of the tokenizer's chat template; the loss asks for the answers alone."""

    roles: tuple[str, ...] = ("messages",)

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        setting = self._setting
        told = [
            self._told(messages, f"{where}, row {first + number}")
            for number, messages in enumerate(columns["messages"])
        ]
        encoded = setting.tokenizer.encoded([text for text, _ in told], special=False)
        for number, (each, (_, answers)) in enumerate(zip(encoded, told, strict=True)):
            flags = np.zeros(len(each.tokens), dtype=np.uint8)
            for place, (start, stop) in enumerate(each.offsets):
                if any(begin <= start and stop <= finish for begin, finish in answers) and stop > start:
                    flags[place] = ASKED
            row = fitted(
                EncodedRow(np.array(each.tokens, dtype=np.int64), flags),
                setting.length + 1,
                setting.too_long,
                f"{where}, row {first + number}",
            )
            if row is not None and row.flags[1:].any():
                yield row

    def _told(self, messages: Any, where: str) -> tuple[str, list[tuple[int, int]]]:
        """(the conversation as text, [start, stop) of each answer in it)."""
        checked = _messages(messages, where)
        tokenizer = self._setting.tokenizer
        whole = tokenizer.conversation(checked)
        answers: list[tuple[int, int]] = []
        for number, message in enumerate(checked):
            if message[ROLE] != ANSWERS:
                continue
            before = tokenizer.conversation(checked[:number], answer_follows=True)
            after = tokenizer.conversation(checked[: number + 1])
            if not after.startswith(before) or not whole.startswith(after):
                raise JobError(
                    f"{where}: the chat template of data.tokenizer hides where answer {number + 1} begins: what it"
                    " writes of the messages before it is not the begin of what it writes with it. Use a template that"
                    " only appends"
                )
            answers.append((len(before), len(after)))
        if not answers:
            raise JobError(f"{where}: no message has the role {ANSWERS}: there is nothing to learn from it")
        return whole, answers


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    """Raises JobError where `value` is no list of messages."""
    if not isinstance(value, list) or not value:
        raise JobError(
            f"{where}: its messages are {'empty' if not value else f'a {type(value).__name__}'}: give a list of"
            ' {"role": ..., "content": ...}, or name another column (data.columns)'
        )
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in (ROLE, CONTENT)
        ):
            raise JobError(
                f"{where}: a message is {message!r:.80}: give each a role and a content, both text"
            )
    return [{ROLE: message[ROLE], CONTENT: message[CONTENT]} for message in value]
