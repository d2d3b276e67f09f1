"""Observations are sent in batches beside training; what nobody takes in time is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from planner.observed import StepTimes
from workers.control import telemetry_lane
from workers.control.telemetry_lane import KEPT, TelemetryLane

EVERY_S = 0.01
LONG_S = 30.0
"""Much longer than anything here takes."""


def observed(step: int) -> StepTimes:
    return StepTimes(rank=0, place=0, step=step, plan=(1, 1), times=(), frozen=False)


class Controller:
    """Takes batches; `arrives` says when a batch is there."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []
        self.arrives = threading.Event()
        self.came = threading.Condition()

    def send(self, batch: Sequence[StepTimes]) -> int:
        with self.came:
            self.steps.append([one.step for one in batch])
            self.came.notify_all()
        return len(self.steps)

    def done(self, handle: int) -> bool:
        return self.arrives.is_set()

    def wait_for(self, step: int) -> None:
        with self.came:
            assert self.came.wait_for(lambda: any(step in batch for batch in self.steps), LONG_S)


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture(autouse=True)
def no_thread_stays(controller: Controller) -> Iterator[None]:
    yield
    controller.arrives.set()
    for thread in threading.enumerate():
        if thread.name == "telemetry":
            thread.join(LONG_S)
            assert not thread.is_alive()


def lane(controller: Controller, send: Callable[[Sequence[StepTimes]], int] | None = None) -> TelemetryLane:
    return TelemetryLane(send or controller.send, controller.done, every_s=EVERY_S)


def test_what_comes_while_a_batch_is_on_its_way_is_the_next_batch(controller: Controller) -> None:
    made = lane(controller)
    made.offer(observed(1))
    controller.wait_for(1)
    for step in (2, 3, 4):
        made.offer(observed(step))
    assert controller.steps == [[1]]
    controller.arrives.set()
    controller.wait_for(4)
    assert controller.steps == [[1], [2, 3, 4]]


def test_the_oldest_are_dropped_where_too_many_wait(controller: Controller) -> None:
    made = lane(controller)
    made.offer(observed(0))
    controller.wait_for(0)
    for step in range(1, 2 * KEPT + 1):
        made.offer(observed(step))
    controller.arrives.set()
    controller.wait_for(2 * KEPT)
    assert controller.steps[1:] == [list(range(KEPT + 1, 2 * KEPT + 1))]


def test_a_batch_that_does_not_arrive_counts_as_lost(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry_lane, "PATIENCE_S", 0.05)
    made = lane(controller)
    made.offer(observed(1))
    controller.wait_for(1)
    made.offer(observed(2))
    controller.wait_for(2)
    assert controller.steps == [[1], [2]]


def test_a_batch_that_cannot_be_sent_costs_only_itself(controller: Controller) -> None:
    failed = threading.Event()

    def failing(batch: Sequence[StepTimes]) -> int:
        if not failed.is_set():
            failed.set()
            raise ConnectionError("the controller is gone")
        return controller.send(batch)

    controller.arrives.set()
    made = lane(controller, failing)
    made.offer(observed(1))
    assert failed.wait(LONG_S)
    made.offer(observed(2))
    controller.wait_for(2)
    assert controller.steps == [[2]]


def test_another_controller_gets_what_comes_from_then_on(controller: Controller) -> None:
    later = Controller()
    made = lane(controller)
    made.offer(observed(1))
    controller.wait_for(1)
    made.send_with(later.send)
    made.offer(observed(2))
    controller.arrives.set()
    later.wait_for(2)
    assert (controller.steps, later.steps) == ([[1]], [[2]])


def test_the_thread_ends_when_nothing_is_left_and_begins_again(controller: Controller) -> None:
    controller.arrives.set()
    made = lane(controller)
    for step in (1, 2):
        made.offer(observed(step))
        controller.wait_for(step)
        (thread,) = (one for one in threading.enumerate() if one.name == "telemetry")
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert controller.steps == [[1], [2]]
