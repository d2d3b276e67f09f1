"""`masked-language`: tokens that are hidden in their context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.random import Generator, Philox

from workers.data.dataset import Batch
from workers.data.tasks.task import SPECIAL, Columns, EncodedRow, Setting, fitted, padded, text_of
from workers.models.loss import IGNORED
from workers.protocol.errors import JobError

_HIDDEN, _OTHER = 0.8, 0.1
"""Shares of the chosen tokens that become the mask token, and any token; the rest stay (Devlin et al. 2019, 3.1)."""


class MaskedLanguage:
    """Rows of at most T tokens; which of them are hidden is drawn anew each time that a row is read."""

    roles: tuple[str, ...] = ("text",)
    optional: tuple[str, ...] = ()
    draws = True

    def __init__(self, setting: Setting) -> None:
        mask = setting.tokenizer.mask
        if mask is None:
            raise JobError(
                'data.task = "masked-language" needs a tokenizer with a mask token: tokenizer_config.json beside it'
                " names none"
            )
        self._setting, self._mask = setting, mask

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        setting = self._setting
        places = [f"{where}, row {first + number}" for number in range(len(columns["text"]))]
        texts = [text_of(each, "text", place) for each, place in zip(columns["text"], places, strict=True)]
        for each, place in zip(setting.tokenizer.encoded(texts), places, strict=True):
            flags = np.array(each.special, dtype=np.uint8) * np.uint8(SPECIAL)
            row = EncodedRow(np.array(each.tokens, dtype=np.int64), flags)
            kept = fitted(row, setting.length, setting.too_long, place)
            if kept is not None:
                yield kept

    def batch(self, rows: Sequence[EncodedRow], draws: Sequence[int]) -> Batch:
        """inputs: tokens and mask, int64[B, T] each; targets: int64[B, T], `IGNORED` where nothing is asked."""
        length = self._setting.length
        hidden = [self._hide(row, draw) for row, draw in zip(rows, draws, strict=True)]
        return Batch(
            inputs=(
                padded([tokens for tokens, _ in hidden], length, 0),
                padded([np.ones(len(row.tokens), dtype=np.int64) for row in rows], length, 0),
            ),
            targets=(padded([targets for _, targets in hidden], length, IGNORED),),
        )

    def _hide(self, row: EncodedRow, draw: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens with some of them hidden, and the targets."""
        numbers = Generator(Philox(key=draw % 2**64)).random((3, len(row.tokens)))
        chosen = (numbers[0] < self._setting.mask_fraction) & ((row.flags & SPECIAL) == 0)
        anything = (numbers[2] * self._setting.tokenizer.vocabulary).astype(np.int64)
        given = row.tokens.astype(np.int64)
        tokens = np.where(chosen & (numbers[1] < _HIDDEN), self._mask, given)
        tokens = np.where(chosen & (numbers[1] >= 1 - _OTHER), anything, tokens)
        return tokens, np.where(chosen, given, IGNORED)
