"""Exact match and F1 of answers in a context, as the benchmark SQuAD defines them.

A long context is seen in several windows, each a sample; the answer to a question is the best span of all its windows.
Which span that is follows transformers' example `run_qa.py`; how texts are compared, SQuAD's own script.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

BEST, LONGEST = 20, 30
"""First and last tokens that are looked at, those with the highest logits; most tokens of an answer."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class AnswerWindow:
    """The part of a context that one sample has, and what its question asks for."""

    text: str
    spans: Sequence[tuple[int, int]]
    """Characters of `text` that each token of the context covers, [start, stop)."""
    first: int
    """Place of the first of these tokens in the sample."""
    answers: tuple[str, ...]
    """Texts that are right, each by itself; none: the context has no answer."""
    begins: bool
    """Whether it is its question's first window."""

    def answer(self, first: int, last: int) -> str:
        """The text from token `first` to token `last` of the sample."""
        return self.text[self.spans[first - self.first][0] : self.spans[last - self.first][1]]


class OfAnswers:
    """Means over questions of exact match and F1, each the best over the right answers.

    Where some question has no answer, "no answer" competes with the best span of each, by the lowest score that its
    windows give it. A question of which the validation has not all windows is left out.
    """

    names = ("exact-match", "f1")
    width = 4

    def __init__(self, windows: Sequence[AnswerWindow]) -> None:
        """`windows`: of the held-out samples, in their order; those of a question lie together."""
        self._windows = windows

    def of_samples(self, outputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """Score of the best span, its first and last token, and the score of no answer, which is the first token's. A
        window without any span has the score -inf.

        Args:
            outputs: (logits float[B, T, 2],): of each token as the first one of the answer, and as its last.
            targets: (first and last token of the answer, int64[B] each; the context's first token and the one after its
                last, int64[B, 2]).
        """
        logits, (*_, context) = outputs[0].double(), targets
        # Of equal logits those of the first tokens, on every device.
        order = logits.sort(dim=1, descending=True, stable=True)
        scores, places = order.values[:, :BEST], order.indices[:, :BEST]
        first, last = places[..., 0, None], places[..., 1].unsqueeze(1)
        begin, stop = context[:, 0, None, None], context[:, 1, None, None]
        valid = (first >= begin) & (last < stop) & (first <= last) & (last - first < LONGEST)
        pairs = scores[..., 0, None] + scores[..., 1].unsqueeze(1)
        best, place = pairs.masked_fill(~valid, -math.inf).flatten(1).max(1)
        of_pair = torch.stack(
            [each.expand_as(pairs).flatten(1).gather(1, place[:, None])[:, 0] for each in (first, last)], 1
        )
        return torch.stack((best, *of_pair.double().unbind(1), logits[:, 0].sum(-1)), 1)

    def values(self, samples: NDArray[Any], loss: float) -> Mapping[str, float]:
        questions = self._questions(len(samples))
        if not questions:
            return {}
        answers = [self._windows[start].answers for start, _ in questions]
        may_have_none = not all(answers)
        exact = common = 0.0
        for (start, stop), right in zip(questions, answers, strict=True):
            found = self._found(samples, start, stop, may_have_none=may_have_none)
            accepted = [each for each in right if normalized(each)] or [""]
            exact += max(float(normalized(found) == normalized(each)) for each in accepted)
            common += max(word_f1(found, each) for each in accepted)
        return {"exact-match": exact / len(questions), "f1": common / len(questions)}

    def _questions(self, samples: int) -> list[tuple[int, int]]:
        """The first sample of each question, and the one after its last, of the first `samples` ones."""
        begins = [number for number in range(samples) if self._windows[number].begins]
        if samples == len(self._windows) or self._windows[samples].begins:
            begins.append(samples)
        return [*pairwise(begins)]

    def _found(self, samples: NDArray[Any], start: int, stop: int, *, may_have_none: bool) -> str:
        """The answer to the question with the windows from `start` to `stop`; empty: there is none."""
        of_question = samples[start:stop]
        best = int(of_question[:, 0].argmax())
        score, first, last, _ = of_question[best]
        if score == -math.inf or (may_have_none and of_question[:, 3].min() > score):
            return ""
        return self._windows[start + best].answer(int(first), int(last))


def normalized(text: str) -> str:
    """`text` in lower case, without punctuation, articles and superfluous whitespace (Rajpurkar et al. 2016)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(found: str, right: str) -> float:
    """F1 of the words of two answers, as bags; where one of them has none, whether both have none."""
    words, asked = normalized(found).split(), normalized(right).split()
    if not words or not asked:
        return float(words == asked)
    common = (Counter(words) & Counter(asked)).total()
    return 2.0 * common / (len(words) + len(asked))
