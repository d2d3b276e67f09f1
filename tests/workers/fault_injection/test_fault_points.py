"""Faults fire when and where they are armed, report first, and do what they say, in real processes."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from drilled_process import steps_through, waiting

from planner.ir import Action, ActionKind
from workers.checkpoint.corruption import corrupt_newest_checkpoint
from workers.checkpoint.folder import checkpoint_folder, checkpoints, read_layer, write_layer, write_manifest
from workers.checkpoint.manifest import Manifest
from workers.checkpoint.writer import CheckpointWriter
from workers.devices.device import CpuDevice
from workers.devices.emulated import EmulatedDevice
from workers.fault_injection.effects import DrillError
from workers.fault_injection.fault import Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.fault_injection.points import FaultPoints
from workers.launch.processes import forkserver
from workers.protocol.errors import ChannelError, JobError
from workers.protocol.reports import FaultReport, NoticeReport, Report, WarningReport
from workers.state.layer_state import LayerState

ANSWER_S = 30.0


class Heard(list[Report]):
    """Reports, as a rank's controller receives them."""

    @property
    def faults(self) -> list[tuple[str, int, str]]:
        return [(r.fault, r.step, r.phase) for r in self if isinstance(r, FaultReport)]


def points(heard: Heard, **settings: Any) -> FaultPoints:
    return FaultPoints(heard.append, rank=3, allowed=True, **settings)


def fires_at(faults: FaultPoints, phase: FaultPhase, step: int) -> bool:
    try:
        faults.reach(phase, step)
    except DrillError:
        return True
    return False


def test_nothing_fires_where_nothing_is_armed() -> None:
    heard = Heard()
    faults = points(heard)
    assert not faults.armed
    for phase in FaultPhase:
        faults.reach(phase, 1)
    assert (faults.slowdown(1), faults.bytes_per_s(1)) == (1.0, None)
    faults.poison(1, lambda: pytest.fail("poisoned"))
    assert not heard


def test_a_job_that_allows_no_faults_fires_none() -> None:
    faults = FaultPoints(lambda report: None, rank=0, allowed=False)
    with pytest.raises(JobError, match=r"elastic\.allow_faults = true"):
        faults.arm(Fault(kind=FaultKind.KILL))
    assert not faults.armed


@pytest.mark.parametrize("phase", FaultPhase)
def test_it_fires_once_in_its_phase_and_step_and_says_so_before(phase: FaultPhase) -> None:
    heard = Heard()
    faults = points(heard)
    faults.arm(Fault(kind=FaultKind.RAISE, step=4, phase=phase))
    for step in (1, 2, 3):
        assert not any(fires_at(faults, p, step) for p in FaultPhase)
    others = [p for p in FaultPhase if p is not phase]
    assert not any(fires_at(faults, p, 4) for p in others)
    assert not heard
    with pytest.raises(DrillError, match=f"phase {phase} of step 4"):
        faults.reach(phase, 4)
    assert heard.faults == [("raise", 4, phase)]
    assert [report.rank for report in heard if isinstance(report, FaultReport)] == [3]
    assert not faults.armed
    assert not fires_at(faults, phase, 4)


def test_a_phase_that_its_step_does_not_have_fires_at_the_next_one_that_has() -> None:
    faults = points(Heard())
    faults.arm(Fault(kind=FaultKind.RAISE, step=4, phase=FaultPhase.SAVING))
    assert not fires_at(faults, FaultPhase.FORWARD, 9)
    assert fires_at(faults, FaultPhase.SAVING, 10)


def test_it_fires_as_often_as_it_is_told_to() -> None:
    faults = points(Heard())
    faults.arm(Fault(kind=FaultKind.RAISE, step=2, times=3))
    assert [fires_at(faults, FaultPhase.FORWARD, step) for step in range(1, 7)] == [
        False,
        *[True] * 3,
        False,
        False,
    ]


def test_it_fires_no_sooner_than_its_time() -> None:
    faults = points(Heard())
    faults.arm(Fault(kind=FaultKind.RAISE, step=1, after_s=3600))
    assert not fires_at(faults, FaultPhase.FORWARD, 1)
    assert faults.armed


def test_a_disarmed_fault_does_not_fire() -> None:
    faults = points(Heard())
    faults.arm(Fault(kind=FaultKind.RAISE, step=1))
    faults.arm(Fault(kind=FaultKind.KILL, after_s=3600))
    faults.close()
    assert not faults.armed
    assert not fires_at(faults, FaultPhase.FORWARD, 1)


def test_a_report_that_cannot_be_sent_does_not_hold_the_fault_back() -> None:
    def lost(report: Report) -> None:
        raise ConnectionError("the controller is gone")

    faults = FaultPoints(lost, rank=0, allowed=True)
    faults.arm(Fault(kind=FaultKind.RAISE, step=1))
    assert fires_at(faults, FaultPhase.FORWARD, 1)


def test_blind_raises_what_a_lost_connection_raises_and_only_in_the_commit() -> None:
    heard = Heard()
    faults = points(heard)
    faults.arm(Fault(kind=FaultKind.BLIND, step=2))
    faults.reach(FaultPhase.FORWARD, 2)
    faults.reach(FaultPhase.BEFORE_COMMIT, 2)
    with pytest.raises(ChannelError, match="commit 2"):
        faults.reach(FaultPhase.IN_COMMIT, 2)
    assert heard.faults == [("blind", 2, "in-commit")]


def test_a_link_is_severed_by_who_holds_it() -> None:
    severed: list[str] = []
    faults = points(Heard(), sever=lambda: severed.append("all"))
    faults.arm(Fault(kind=FaultKind.DROP_LINK, step=2, phase=FaultPhase.BACKWARD))
    faults.reach(FaultPhase.FORWARD, 2)
    assert severed == []
    faults.reach(FaultPhase.BACKWARD, 2)
    assert severed == ["all"]


def test_slow_and_throttled_last_for_their_steps_and_are_told_once() -> None:
    heard = Heard()
    faults = points(heard)
    faults.arm(Fault(kind=FaultKind.SLOW, step=3, factor=2.5, steps=2))
    faults.arm(Fault(kind=FaultKind.THROTTLE_LINK, step=4, bytes_per_s=1e6, steps=3))
    seen = [(faults.slowdown(step), faults.bytes_per_s(step)) for step in range(2, 9)]
    assert seen == [(1.0, None), (2.5, None), (2.5, 1e6), (1.0, 1e6), (1.0, 1e6), (1.0, None), (1.0, None)]
    assert heard.faults == [
        ("slow 2.5 times for 2 steps", 3, "forward"),
        ("throttle-link to 1e+06 bytes/s for 3 steps", 4, "forward"),
    ]
    assert not faults.armed


def test_two_slow_ones_multiply_and_the_tighter_throttle_counts() -> None:
    faults = points(Heard())
    for factor, rate in ((2.0, 100.0), (3.0, 50.0)):
        faults.arm(Fault(kind=FaultKind.SLOW, factor=factor))
        faults.arm(Fault(kind=FaultKind.THROTTLE_LINK, bytes_per_s=rate))
    assert (faults.slowdown(1), faults.bytes_per_s(1)) == (6.0, 50.0)
    assert (faults.slowdown(1000), faults.bytes_per_s(1000)) == (6.0, 50.0)


def test_a_slow_device_takes_its_factor_longer_and_its_clock_shows_it() -> None:
    device = CpuDevice()
    device.slowdown = 5.0
    device.start_window()
    device.begin()
    time.sleep(0.004)
    device.end(Action(ActionKind.FORWARD, 0, 0), [0])
    (span,) = device.spans()
    assert span.end_s - span.start_s >= 5 * 0.004


def test_a_slow_emulated_device_models_its_factor() -> None:
    device = EmulatedDevice({"forward_s": (0.004,)})
    device.slowdown = 5.0
    device.start_window()
    device.begin()
    device.end(Action(ActionKind.FORWARD, 0, 0), [0])
    (span,) = device.spans()
    assert span.end_s - span.start_s >= 5 * 0.004


def test_poison_fires_in_one_step() -> None:
    heard = Heard()
    faults = points(heard)
    faults.arm(Fault(kind=FaultKind.NAN, step=2))
    faults.reach(FaultPhase.BACKWARD, 2)
    poisoned: list[int] = []
    for step in (1, 2, 2, 3):
        faults.poison(step, lambda step=step: not poisoned.append(step))
    assert poisoned == [2]
    assert heard.faults == [("nan", 2, "backward")]


def state(layer: int) -> LayerState:
    generator = torch.Generator().manual_seed(layer)
    weights = {"weight": torch.randn(16, 16, generator=generator)}
    return LayerState(
        layer=layer,
        name=f"layer{layer}",
        weights=weights,
        buffers={},
        slots={"weight": {"m": torch.zeros(16, 16)}},
        updates={"weight": 1},
        freezing={},
    )


def test_a_full_disk_fails_as_many_writes_as_it_is_told_to(tmp_path: Path) -> None:
    heard = Heard()
    faults = points(heard)
    faults.arm(Fault(kind=FaultKind.FILL_DISK, times=2))
    writer = CheckpointWriter(faults)
    errors = []
    for step in (1, 2, 3):
        folder = checkpoint_folder(str(tmp_path), step, 1)
        writer.start(folder, step, [state(0), state(1)])
        result = writer.wait()
        assert result is not None
        errors.append(result.error)
        assert len(result.records) == (0 if result.error else 4)
    writer.close()
    full = os.strerror(errno.ENOSPC)
    assert [error is not None and error.startswith(full) for error in errors] == [True, True, False]
    assert heard.faults == [("fill-disk", 1, "saving"), ("fill-disk", 2, "saving")]


def test_a_disk_that_is_full_for_a_while_has_room_again() -> None:
    faults = points(Heard())
    faults.arm(Fault(kind=FaultKind.FILL_DISK, seconds=0.2))
    errors: list[int | None] = []
    while True:
        try:
            faults.reach(FaultPhase.SAVING, 1)
        except OSError as error:
            errors.append(error.errno)
        else:
            break
    assert len(errors) > 1
    assert set(errors) == {errno.ENOSPC}
    assert not faults.armed


def whole_checkpoint(output: Path, step: int) -> None:
    folder = checkpoint_folder(str(output), step, 1)
    records = [record for layer in (0, 1) for record in write_layer(folder, state(layer))]
    manifest = Manifest(
        step=step,
        generation=1,
        spec={},
        plan={},
        layers=("layer0", "layer1"),
        samples=step,
        files={record.name: record for record in records},
    )
    write_manifest(folder, manifest)


def test_a_corrupted_checkpoint_is_the_newest_and_is_seen_to_be_damaged(tmp_path: Path) -> None:
    from workers.checkpoint.folder import DamagedCheckpointError, read_manifest

    for step in (10, 20):
        whole_checkpoint(tmp_path, step)
    heard = Heard()
    faults = points(heard, corrupt=partial(corrupt_newest_checkpoint, str(tmp_path)))
    faults.arm(Fault(kind=FaultKind.CORRUPT_CHECKPOINT, step=21))
    faults.reach(FaultPhase.FORWARD, 21)
    newest, older = checkpoints(str(tmp_path))
    damaged = []
    for layer in (0, 1):
        read_layer(older, read_manifest(older), layer)
        try:
            read_layer(newest, read_manifest(newest), layer)
        except DamagedCheckpointError as error:
            damaged.append(error.damage.file)
    (report,) = heard
    assert isinstance(report, FaultReport)
    assert damaged == [Path(report.file).name]
    assert Path(report.file).parent == Path(newest.path)


def test_where_there_is_no_checkpoint_nothing_is_damaged_and_that_is_said(tmp_path: Path) -> None:
    heard = Heard()
    faults = points(heard, corrupt=partial(corrupt_newest_checkpoint, str(tmp_path)))
    faults.arm(Fault(kind=FaultKind.CORRUPT_CHECKPOINT, step=1))
    faults.reach(FaultPhase.FORWARD, 1)
    (warning,) = heard
    assert isinstance(warning, WarningReport)
    assert warning.rank == 3
    assert (
        "corrupt-checkpoint did nothing: the job has no checkpoint yet; set checkpoint.every" in warning.text
    )


# Faults in real processes.


@pytest.fixture
def rank() -> Any:
    """A function that starts a process running `steps_through` or `waiting`; it returns the process and a
    pipe to it."""
    context = forkserver()
    started: list[Any] = []

    def start(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        started.append(process)
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join()


def heard_until_closed(pipe: Connection) -> list[Any]:
    messages = []
    try:
        while pipe.poll(ANSWER_S):
            messages.append(pipe.recv())
    except EOFError:
        return messages
    raise AssertionError(f"the process goes on; it said {messages}")


@pytest.mark.parametrize("phase", FaultPhase)
def test_kill_ends_the_process_at_the_very_place(rank: Any, phase: FaultPhase) -> None:
    process, pipe = rank(steps_through, {"kind": "kill", "step": 2, "phase": phase}, 3)
    messages = heard_until_closed(pipe)
    process.join(ANSWER_S)
    assert process.exitcode == -signal.SIGKILL
    *_, place, report = messages
    assert place == (2, phase)
    assert isinstance(report, FaultReport)
    assert (report.rank, report.fault, report.step, report.phase) == (1, "kill", 2, phase)


def wait_for_status(process: psutil.Process, *statuses: str) -> None:
    for _ in range(10_000):
        if process.status() in statuses:
            return
        psutil.wait_procs([process], timeout=0.002)
    raise AssertionError(f"the process is {process.status()}, not {statuses}")


def test_stop_stops_all_threads_and_something_outside_continues_them(rank: Any) -> None:
    process, pipe = rank(steps_through, {"kind": "stop", "step": 1, "phase": "backward", "seconds": 5.0}, 1)
    seen = psutil.Process(process.pid)
    while not isinstance(message := pipe.recv(), FaultReport):
        assert message != "through"
    assert message.fault == "stop for 5 s"
    wait_for_status(seen, psutil.STATUS_STOPPED)
    (helper,) = seen.children()
    assert pipe.poll(ANSWER_S)
    assert pipe.recv() == (1, FaultPhase.BEFORE_COMMIT)
    wait_for_status(seen, psutil.STATUS_SLEEPING)
    assert not helper.is_running()
    assert seen.children() == []


def test_a_process_killed_while_it_is_stopped_leaves_nothing_behind(rank: Any) -> None:
    process, pipe = rank(steps_through, {"kind": "stop", "step": 1, "seconds": 3600.0}, 1)
    seen = psutil.Process(process.pid)
    while not isinstance(pipe.recv(), FaultReport):
        continue
    wait_for_status(seen, psutil.STATUS_STOPPED)
    (helper,) = seen.children()
    process.kill()
    process.join(ANSWER_S)
    assert process.exitcode == -signal.SIGKILL
    gone, alive = psutil.wait_procs([helper], timeout=ANSWER_S)
    assert (gone, alive) == ([helper], [])


def test_what_needs_no_place_fires_on_a_rank_that_waits(rank: Any) -> None:
    process, pipe = rank(waiting, {"kind": "kill", "after_s": 0.05})
    armed, report = heard_until_closed(pipe)
    process.join(ANSWER_S)
    assert process.exitcode == -signal.SIGKILL
    assert armed == "armed"
    assert (report.fault, report.step, report.phase) == ("kill", 0, "")


def test_a_drained_rank_is_told_how_long_it_has_and_is_gone_then(rank: Any) -> None:
    process, pipe = rank(waiting, {"kind": "drain", "seconds": 0.3})
    armed, report, notice = heard_until_closed(pipe)
    process.join(ANSWER_S)
    assert process.exitcode == -signal.SIGKILL
    assert (armed, report.fault) == ("armed", "drain for 0.3 s")
    assert notice == NoticeReport(rank=1, source="sigterm", left_s=0.3, text="a drill")
