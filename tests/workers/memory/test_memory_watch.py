"""The watch over a rank's memory: what counts as a fall, what it does then, and how long it holds a microbatch up."""

from __future__ import annotations

from workers.devices.device import CpuDevice
from workers.memory.watch import HOLD_S, POLL_S, MemoryWatch

TOTAL = 1000
RESERVE = 100


class Host(CpuDevice):
    """A device whose memory a test dictates, and its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.free = 500
        self.held: int | None = None
        self.now_s = 0.0
        self.released = 0
        self.comes_back_s = float("inf")
        self.told: list[tuple[int, int]] = []
        self.watch = MemoryWatch(
            self, 0.1, lambda *told: self.told.append(told), clock_s=lambda: self.now_s, sleep=self.sleep
        )

    def total_bytes(self) -> int:
        return TOTAL

    def free_bytes(self) -> int:
        return 500 if self.now_s >= self.comes_back_s else self.free

    def held_bytes(self) -> int | None:
        return self.held

    def release(self) -> None:
        self.released += 1

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def step(self, free: int, held: int | None = None) -> float:
        """One step with one microbatch; returns how long it was held up."""
        self.now_s += 1.0
        self.free, self.held = free, held
        self.watch.begin_step()
        begun_s = self.now_s
        self.watch.admit()
        return self.now_s - begun_s


def after_first_steps() -> Host:
    host = Host()
    for _ in range(3):
        assert host.step(500) == 0.0
    return host


def test_a_fall_is_told_once_and_holds_one_microbatch_up_for_a_bounded_time() -> None:
    host = after_first_steps()
    held_s = host.step(30)
    assert HOLD_S <= held_s <= HOLD_S + 2 * POLL_S
    assert host.told == [(30, RESERVE)]
    assert host.released == 1
    assert host.step(30) == 0.0
    assert host.told == [(30, RESERVE)]


def test_it_goes_on_as_soon_as_the_memory_is_back_and_tells_of_the_next_fall() -> None:
    host = after_first_steps()
    host.comes_back_s = host.now_s + 1.0 + 5 * POLL_S
    assert host.step(30) < HOLD_S / 2
    assert host.told == [(30, RESERVE)]
    host.step(500)
    host.comes_back_s = float("inf")
    host.step(20)
    assert host.told == [(30, RESERVE), (20, RESERVE)]


def test_little_memory_from_the_beginning_is_no_fall() -> None:
    host = Host()
    for _ in range(5):
        assert host.step(120) == 0.0
    assert host.step(60) == 0.0
    assert host.told == []


def test_the_first_step_is_not_watched_and_looks_are_rare() -> None:
    host = Host()
    host.step(500)
    host = Host()
    host.free = 10
    host.watch.begin_step()
    host.watch.admit()
    assert host.told == []
    host = after_first_steps()
    host.free = 10
    host.now_s += 0.01
    host.watch.admit()
    assert host.told == [], "the last look was a moment ago"


def test_what_a_step_will_still_take_is_not_left() -> None:
    """Where tensors are counted: 300 are free before the activations come, and these took 250 in earlier steps."""
    host = Host()
    for held in (50, 300, 50):
        host.step(800 - held, held)
    host.step(300, 50)
    assert host.told == [(300 + 50 - 300, RESERVE)]
