"""When ranks write checkpoints for a lost head: at once, again before the end, and once for all ranks."""

from __future__ import annotations

from workers.control.rescues import HEAD_LOST, HEAD_LOST_S, NOTICED_S, Rescues, patience_s


def commits(rescues: Rescues, start_s: float, stop_s: float, every_s: float, took_s: float) -> list[float]:
    """When `rescues` had checkpoints written in a run of commits, each of which takes `took_s`."""
    written, now_s = [], start_s
    while now_s < stop_s:
        if rescues.due(now_s):
            written.append(now_s)
            now_s += took_s
            rescues.wrote(written[-1], now_s)
        now_s += every_s
    return written


def test_the_first_is_due_at_once_and_the_last_before_the_end() -> None:
    rescues = Rescues(60.0)
    assert commits(rescues, 0.0, 100.0, every_s=1.0, took_s=2.0) == []
    rescues.lost(100.5)
    first, last = commits(rescues, 101.0, 170.0, every_s=1.0, took_s=2.0)
    assert first == 101.0
    # A quarter of the time is left, and no later commit would have left as much.
    assert 160.5 - 15.0 - 1.0 <= last <= 160.5 - 15.0


def test_slow_disks_and_long_steps_have_the_last_one_written_earlier() -> None:
    slow = Rescues(60.0)
    slow.lost(0.0)
    _, last = commits(slow, 0.0, 70.0, every_s=1.0, took_s=10.0)
    assert last <= 60.0 - 2 * 10.0
    long = Rescues(60.0)
    long.due(-25.0)
    long.lost(-5.0)
    written = commits(long, 0.0, 70.0, every_s=25.0, took_s=1.0)
    # The commit after the second one would come at 52 s, 3 s before the end.
    assert written == [0.0, 26.0]


def test_a_rank_that_notices_late_counts_what_others_had_written() -> None:
    late = Rescues(60.0)
    late.wrote(10.0, 11.0)  # asked for by a rank that noticed at once
    late.lost(11.0 + NOTICED_S - 1.0)
    written = commits(late, 26.0, 90.0, every_s=1.0, took_s=1.0)
    assert len(written) == 1
    assert written[0] > 60.0


def test_a_head_that_comes_back_needs_no_more_and_may_be_lost_again() -> None:
    rescues = Rescues(60.0)
    rescues.lost(0.0)
    assert rescues.due(1.0)
    rescues.wrote(1.0, 2.0)
    rescues.back()
    assert rescues.lost_s is None
    assert commits(rescues, 3.0, 500.0, every_s=1.0, took_s=1.0) == []
    rescues.lost(500.0)
    assert commits(rescues, 501.0, 505.0, every_s=1.0, took_s=1.0) == [501.0]


def test_each_rank_is_called_after_each_checkpoint() -> None:
    called: list[str] = []
    rescues = Rescues(60.0, lambda: called.append("then"))
    rescues.wrote(1.0, 2.0)
    assert called == ["then"]


def test_rays_variable_says_how_long_its_processes_go_on() -> None:
    assert patience_s({}) == HEAD_LOST_S == 60.0
    assert patience_s({HEAD_LOST: "20"}) == 20.0
    assert patience_s({HEAD_LOST: "soon"}) == HEAD_LOST_S
