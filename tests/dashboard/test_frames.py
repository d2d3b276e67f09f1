"""Numbered events for readers who come and go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dashboard.jobs.frames import KEPT_FRAMES, MOST_CHARACTERS, Frame, Frames


def kept(first: int, last: int, size: int = 10) -> Frames:
    frames = Frames(first - 1)
    for number in range(first, last + 1):
        frames.append(Frame(number, "step", "x" * size))
    return frames


@given(first=st.integers(1, 50), count=st.integers(0, 60), after=st.integers(0, 150), most=st.integers(1, 20))
def test_a_reader_gets_each_event_once_or_is_told_of_it(
    first: int, count: int, after: int, most: int
) -> None:
    frames = kept(first, first + count - 1)
    newest, read, missed = frames.newest, [], 0
    asked = min(after, newest)
    while True:
        found = frames.after(after, most)
        read += [frame.number for frame in found.frames]
        missed += found.missed
        assert len(found.frames) <= most
        if not found.frames:
            break
        after = found.next
    assert found.next == newest
    assert read == list(range(asked + missed + 1, newest + 1))


def test_no_more_events_are_kept_than_said() -> None:
    frames = kept(1, KEPT_FRAMES + 7)
    assert frames.after(0, 10).missed == 7
    assert frames.newest == KEPT_FRAMES + 7


def test_no_more_text_is_kept_than_said() -> None:
    size = MOST_CHARACTERS // 10
    frames = kept(1, 25, size)
    assert frames.after(0, 100).missed == 15
    assert len(frames.after(0, 100).frames) == 10


def test_events_of_other_kinds_are_passed_over_and_not_asked_for_again() -> None:
    frames = Frames()
    for number in range(1, 31):
        frames.append(Frame(number, "StepReport" if number % 10 else "Issued", ""))
    found = frames.after(0, 2, ("Issued",))
    assert ([frame.number for frame in found.frames], found.next) == ([10, 20], 20)
    rest = frames.after(found.next, 2, ("Issued",))
    assert ([frame.number for frame in rest.frames], rest.next) == ([30], 30)
    none = frames.after(0, 2, ("Failed",))
    assert (none.frames, none.next) == ((), 30)
