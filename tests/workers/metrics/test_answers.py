"""Answers are compared as SQuAD's script compares them, and found in windows as transformers' `run_qa.py` finds
them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers.metrics.answers import BEST, LONGEST, AnswerWindow, OfAnswers, normalized, word_f1

WORDS = ["the", "broncos", "of", "denver", "won", "the", "super", "bowl", "in", "2016", "again"]


def window(
    answers: tuple[str, ...], begins: bool = True, words: list[str] = WORDS, first: int = 2
) -> AnswerWindow:
    """A window of `words`, a token each, after `first` tokens of a question."""
    starts = [len(" ".join(words[:number])) + (number > 0) for number in range(len(words))]
    spans = [(start, start + len(word)) for start, word in zip(starts, words, strict=True)]
    return AnswerWindow(" ".join(words), spans, first, answers, begins)


def told(first: int, last: int, score: float = 1.0, none: float = -9.0) -> list[float]:
    """The statistics of a window whose best span is from word `first` to word `last` of the context."""
    return [score, first + 2, last + 2, none]


def measured(*samples: tuple[AnswerWindow, list[float]]) -> dict[str, float]:
    measure = OfAnswers([each for each, _ in samples])
    return dict(measure.values(np.array([numbers for _, numbers in samples]).reshape(-1, 4), 1.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Denver Broncos", "denver broncos"),
        ("  a   man,\tan\nisland and the U.S. ", "man island and us"),
        ("theatre than another", "theatre than another"),
        ("1,000 (one thousand)", "1000 one thousand"),
        ("'A'", ""),
        ("naïve — CAFÉ", "naïve — café"),
    ],
)
def test_case_punctuation_articles_and_whitespace_do_not_count(text: str, expected: str) -> None:
    assert normalized(text) == expected


@pytest.mark.parametrize(
    ("found", "right", "expected"),
    [
        ("Denver Broncos", "the Denver Broncos!", 1.0),
        ("Broncos", "Denver Broncos", 2 * 1.0 * 0.5 / 1.5),
        ("Denver Denver Broncos", "Denver Broncos", 2 * (2 / 3) * 1.0 / (5 / 3)),
        ("Carolina Panthers", "Denver Broncos", 0.0),
        ("the", "a", 1.0),
        ("the", "Denver", 0.0),
        ("", "Denver", 0.0),
    ],
)
def test_f1_is_that_of_the_words_as_bags(found: str, right: str, expected: float) -> None:
    assert word_f1(found, right) == pytest.approx(expected, abs=1e-15)


def test_the_best_of_the_right_answers_counts() -> None:
    # "broncos of denver"
    found = measured((window(("Denver", "Broncos of Denver", "x")), told(1, 3)))
    assert found == {"exact-match": 1.0, "f1": 1.0}
    found = measured((window(("broncos", "denver broncos")), told(1, 3)))
    assert found == {"exact-match": 0.0, "f1": pytest.approx(0.8)}  # 2 of 3 words and of 2


def test_both_are_means_over_questions() -> None:
    found = measured(
        (window(("2016",)), told(9, 9)), (window(("bowl",)), told(6, 7)), (window(("again",)), told(0, 1))
    )
    assert found == {"exact-match": 1 / 3, "f1": pytest.approx((1 + 2 / 3 + 0) / 3)}


def test_of_several_windows_the_one_with_the_best_score_answers() -> None:
    first, second = window(("denver",)), window(("denver",), begins=False, words=WORDS[3:])
    other = window(("again",))
    assert measured((first, told(1, 1, 2.0)), (second, told(0, 0, 3.0)), (other, told(10, 10)))["f1"] == 1.0
    assert measured((first, told(1, 1, 3.0)), (second, told(0, 0, 2.0)), (other, told(10, 10)))["f1"] == 0.5
    # Of equal scores the first window's.
    assert measured((first, told(3, 3, 2.0)), (second, told(1, 1, 2.0)))["f1"] == 1.0


def test_no_answer_competes_where_some_question_has_none() -> None:
    without = window(())
    denver = window(("denver",))
    found = measured((without, told(1, 1, 1.0, none=2.0)), (denver, told(3, 3, 1.0, none=0.5)))
    assert found == {"exact-match": 1.0, "f1": 1.0}
    found = measured((without, told(1, 1, 1.0, none=0.5)), (denver, told(3, 3, 1.0, none=2.0)))
    assert found == {"exact-match": 0.0, "f1": 0.0}
    # The lowest score that a window gives it.
    later = window((), begins=False)
    found = measured((without, told(1, 1, 1.0, none=2.0)), (later, told(1, 1, 0.0, none=0.5)))
    assert found == {"exact-match": 0.0, "f1": 0.0}
    # Where each has one, it does not compete.
    assert measured((denver, told(3, 3, 1.0, none=2.0)))["exact-match"] == 1.0


def test_a_question_of_which_windows_are_missing_is_left_out() -> None:
    windows = [window(("denver",)), window(("again",)), window(("again",), begins=False)]
    samples = np.array([told(3, 3), told(10, 10), told(10, 10)])
    assert OfAnswers(windows).values(samples[:2], 1.0)["f1"] == 1.0
    assert OfAnswers([windows[1], windows[2]]).values(samples[1:2], 1.0) == {}
    assert OfAnswers(windows).values(samples[:0], 1.0) == {}
    assert OfAnswers([]).values(samples[:0], 1.0) == {}


def test_a_window_without_any_span_answers_nothing() -> None:
    assert measured((window(("denver",)), [-math.inf, 0, 0, 1.0])) == {"exact-match": 0.0, "f1": 0.0}


def found_plainly(logits: np.ndarray, begin: int, stop: int) -> tuple[float, int, int]:
    """As `run_qa.py` goes over the best first and last tokens."""
    best = (-math.inf, -1, -1)
    order = np.argsort(-logits, axis=0, kind="stable")[:BEST]
    for first in order[:, 0]:
        for last in order[:, 1]:
            if not begin <= first < stop or not begin <= last < stop:
                continue
            if last < first or last - first + 1 > LONGEST:
                continue
            score = logits[first, 0] + logits[last, 1]
            if score > best[0]:
                best = (score, int(first), int(last))
    return best


@pytest.mark.parametrize("length", [8, 80])
def test_the_best_span_is_that_of_a_plain_search(length: int) -> None:
    draws = np.random.default_rng(length)
    logits = draws.normal(size=(64, length, 2)).astype(np.float32).astype(np.float64)
    begins = draws.integers(1, length - 2, 64)
    stops = np.array([draws.integers(begin + 1, length + 1) for begin in begins])
    targets = (torch.zeros(64).long(), torch.zeros(64).long(), torch.from_numpy(np.stack([begins, stops], 1)))
    samples = OfAnswers([]).of_samples((torch.from_numpy(logits).float(),), targets)
    assert samples.shape == (64, 4)
    assert samples.dtype == torch.float64
    searched = [found_plainly(each, *where) for each, where in zip(logits, targets[2].tolist(), strict=True)]
    assert any(score == -math.inf for score, *_ in searched) == (length == 80)
    for row, (score, first, last), of_window in zip(samples.tolist(), searched, logits, strict=True):
        assert row[0] == score
        assert row[3] == of_window[0].sum()
        if score > -math.inf:
            assert row[1:3] == [first, last]


def test_longer_spans_than_allowed_and_those_outside_the_context_are_no_answers() -> None:
    logits = torch.zeros(1, 60, 2)
    logits[0, 4, 0] = 9.0  # the first token of the best span
    logits[0, 4 + LONGEST, 1] = 8.0  # one too far
    logits[0, 4 + LONGEST - 1, 1] = 7.0
    logits[0, 2, 1] = 20.0  # of the question
    context = torch.tensor([[4, 60]])
    nothing = torch.zeros(1).long()
    (found,) = OfAnswers([]).of_samples((logits,), (nothing, nothing, context)).tolist()
    assert found == [16.0, 4.0, 4.0 + LONGEST - 1, 0.0]
