"""`classification`: a class, or a number, for a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from workers.data.dataset import Batch
from workers.data.tasks.task import (
    SECOND,
    Columns,
    EncodedRow,
    Setting,
    fitted,
    label_number,
    padded,
    text_of,
)
from workers.protocol.errors import JobError


class Classification:
    """Rows of at most T tokens, with the tokenizer's special ones, and a label."""

    roles: tuple[str, ...] = ("text", "label")
    optional: tuple[str, ...] = ("pair",)
    draws = False

    def __init__(self, setting: Setting) -> None:
        if setting.classes < 1:
            raise JobError('data.task = "classification" needs a model that tells classes: set model.classes')
        self._setting = setting

    def rows(self, columns: Columns, where: str, first: int) -> Iterator[EncodedRow]:
        setting, pairs = self._setting, columns.get("pair")
        places = [f"{where}, row {first + number}" for number in range(len(columns["text"]))]
        texts, seconds = (
            None
            if found is None
            else [text_of(*each) for each in zip(found, [role] * len(places), places, strict=True)]
            for role, found in (("text", columns["text"]), ("pair", pairs))
        )
        assert texts is not None
        encoded = setting.tokenizer.encoded(texts, seconds)
        for each, label, place in zip(encoded, columns["label"], places, strict=True):
            row = EncodedRow(
                np.array(each.tokens, dtype=np.int64),
                np.array(each.segments, dtype=np.uint8) * np.uint8(SECOND),
                label_number(label, setting.classes, setting.labels, place),
            )
            kept = fitted(row, setting.length, setting.too_long, place)
            if kept is not None:
                yield kept

    def batch(self, rows: Sequence[EncodedRow], draws: Sequence[int]) -> Batch:
        """inputs: tokens, mask and segments, int64[B, T] each; targets: classes int64[B], or numbers float32[B]."""
        length = self._setting.length
        labels = torch.tensor([row.label for row in rows], dtype=torch.float64)
        return Batch(
            inputs=(
                padded([row.tokens for row in rows], length, 0),
                padded([np.ones(len(row.tokens), dtype=np.int64) for row in rows], length, 0),
                padded([row.flags // SECOND for row in rows], length, 0),
            ),
            targets=(labels.float() if self._setting.classes == 1 else labels.long(),),
        )
