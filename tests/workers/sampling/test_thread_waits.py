"""How long the busiest thread of a process waited for a core, of the time in which it could have run."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from workers.sampling.readings import Reading, between
from workers.sampling.thread_waits import ALL_EVERY_S, WATCHED, ThreadWaits


def waiting(before: dict[int, tuple[float, float]], after: dict[int, tuple[float, float]]) -> float | None:
    sample = between(Reading(time_s=0.0, threads=before), Reading(time_s=1.0, threads=after))
    return dict(sample.values).get("own_waiting")


def test_the_busiest_thread_tells_what_share_of_its_time_it_waited() -> None:
    assert waiting({1: (1.0, 1.0), 2: (0.0, 0.0)}, {1: (1.3, 1.6), 2: (0.0, 0.1)}) == pytest.approx(2 / 3)
    assert waiting({1: (1.0, 1.0)}, {1: (1.5, 1.0)}) == 0.0


def test_threads_that_are_new_or_idle_tell_nothing() -> None:
    assert waiting({1: (1.0, 1.0)}, {2: (9.0, 9.0)}) is None
    assert waiting({1: (1.0, 1.0)}, {1: (1.001, 1.0)}) is None
    assert waiting({}, {}) is None


def write(folder: Path, times: dict[int, tuple[int, int]]) -> None:
    for thread, (ran, waited) in times.items():
        place = folder / "self" / "task" / str(thread)
        place.mkdir(parents=True, exist_ok=True)
        (place / "schedstat").write_text(f"{ran} {waited} 7\n")


def test_the_busiest_threads_are_looked_at_each_time_and_all_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    threads = WATCHED + 2
    write(tmp_path, {thread: (thread * 10**9, 0) for thread in range(threads)})
    waits = ThreadWaits(tmp_path)
    assert set(waits.read()) == set(range(threads))
    write(tmp_path, {5: (6 * 10**9, 2 * 10**9)})
    assert dict(waits.read()) == {2: (2.0, 0.0), 3: (3.0, 0.0), 4: (4.0, 0.0), 5: (6.0, 2.0)}
    write(tmp_path, {0: (90 * 10**9, 0)})
    now_s += ALL_EVERY_S
    assert set(waits.read()) == set(range(threads))
    assert 0 in waits.read()
    (tmp_path / "self" / "task" / "0" / "schedstat").unlink()
    assert 0 not in waits.read()


def test_this_process_tells_the_times_of_its_threads() -> None:
    found = ThreadWaits().read()
    ran_s, waited_s = found[threading.get_native_id()]
    assert ran_s > 0
    assert waited_s >= 0


def test_a_system_that_tells_no_times_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        ThreadWaits(tmp_path).read()
