"""Named points in a rank's life where an armed fault fires; no-ops while nothing is armed.

This module decides when a fault fires and reports it; `effects.py` holds the effects. Knows no engine, no network,
no checkpoint and no torch.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from workers.fault_injection import effects
from workers.fault_injection.fault import AT_ANY_TIME, Fault
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.protocol.errors import JobError
from workers.protocol.reports import FaultReport, NoticeReport, Report, WarningReport

__all__ = ["Fault", "FaultKind", "FaultPhase", "FaultPoints"]

ANSWER_S = 0.1
"""A fault that fires at once waits so long, so that the answer to `arm` leaves first."""
_LASTING = (FaultKind.SLOW, FaultKind.THROTTLE_LINK, FaultKind.OOM)
"""Kinds that begin with a window and last for several."""


@dataclass
class _Armed:
    fault: Fault
    not_before_s: float
    """On the monotonic clock."""
    left: int
    """Number of times that it will still fire."""
    began: int | None = None
    """First step that it lasts for."""
    until_s: float | None = None
    """On the monotonic clock: every write until then fails."""


class FaultPoints:
    """The faults armed on one rank. Call `arm` from any thread, `reach` from those that train and save.

    Args:
        report: takes a `FaultReport` before each fault fires (after it, where a file is damaged), on the thread where
            it fires. The report must be sent when it returns: it may be the last.
        rank: this rank's number.
        allowed: whether the job allows faults.
        sever: closes this rank's connections to the others.
        corrupt: damages the newest checkpoint of the job; returns the damaged file, None where there is no checkpoint.
    """

    def __init__(
        self,
        report: Callable[[Report], None],
        *,
        rank: int = 0,
        allowed: bool = False,
        sever: Callable[[], None] | None = None,
        corrupt: Callable[[], str | None] | None = None,
    ) -> None:
        self.armed = False
        """Whether any fault is armed: the only check on the fast path."""
        self._report = report
        self._rank = rank
        self._allowed = allowed
        self._sever = sever
        self._corrupt_newest = corrupt
        self._faults: list[_Armed] = []
        self._timers: list[threading.Timer] = []
        self._lock = threading.Lock()

    def arm(self, fault: Fault) -> None:
        """Arm `fault`.

        Raises:
            JobError: the job allows no faults.
        """
        if not self._allowed:
            raise JobError("this job allows no faults: start it with elastic.allow_faults = true")
        if fault.kind in AT_ANY_TIME and fault.step is None and fault.phase is None:
            self._arm_timer(fault, fault.times)
            return
        with self._lock:
            self._faults.append(_Armed(fault, time.monotonic() + fault.after_s, fault.times))
            self.armed = True

    def reach(self, phase: FaultPhase, step: int) -> None:
        """Fire what is armed for `phase` of `step`, where this rank is now.

        Raises:
            DrillError: a fault of kind RAISE fired.
            ChannelError: one of kind BLIND.
            OSError: one of kind FILL_DISK.
        """
        if not self.armed:
            return
        for fault in self._due(phase, step):
            self._inject(fault, step, phase)

    def slowdown(self, step: int) -> float:
        """Factor by which the actions of `step` are slowed down."""
        factor = 1.0
        for fault in self._lasting(FaultKind.SLOW, step):
            factor *= fault.factor or 1.0
        return factor

    def bytes_per_s(self, step: int) -> float | None:
        """The bandwidth limit of this rank's sends in the window of `step`; None: no limit."""
        return min((f.bytes_per_s or 0.0 for f in self._lasting(FaultKind.THROTTLE_LINK, step)), default=None)

    def memory_limit_bytes(self, step: int) -> int | None:
        """Memory limit of this rank's tensors in the window of `step`; None: no limit."""
        return min((f.limit_bytes or 0 for f in self._lasting(FaultKind.OOM, step)), default=None)

    def poison(self, step: int, put: Callable[[], bool]) -> None:
        """Have a NaN put into the gradients of `step`, where that is due.

        Args:
            put: does it; returns whether there is any gradient.
        """
        for fault in self._take(lambda fault: fault.kind is FaultKind.NAN, FaultPhase.BACKWARD, step):
            if put():
                self._tell(fault, step, FaultPhase.BACKWARD)
            else:
                self._did_nothing(
                    fault,
                    f"no gradient is formed here in step {step}: choose a rank whose layers are trained",
                )

    def close(self) -> None:
        """Disarm everything."""
        with self._lock:
            self._faults.clear()
            self.armed = False
            for timer in self._timers:
                timer.cancel()

    def _arm_timer(self, fault: Fault, times: int) -> None:
        def inject() -> None:
            self._inject(fault, 0, None)
            if times > 1:
                self._arm_timer(fault, times - 1)

        self._start_timer(max(fault.after_s, ANSWER_S), inject)

    def _start_timer(self, seconds: float, inject: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, inject)
        timer.daemon = True
        with self._lock:
            self._timers = [t for t in self._timers if t.is_alive()] + [timer]
        timer.start()

    def _due(self, phase: FaultPhase, step: int) -> list[Fault]:
        apart = (*_LASTING, FaultKind.NAN)
        return self._take(lambda fault: fault.kind not in apart, phase, step)

    def _take(self, wanted: Callable[[Fault], bool], phase: FaultPhase, step: int) -> list[Fault]:
        """Return and count those of `wanted` that fire here."""
        now_s = time.monotonic()
        due: list[Fault] = []
        with self._lock:
            for armed in list(self._faults):
                if not wanted(armed.fault) or not _matches(armed, phase, step, now_s):
                    continue
                if armed.until_s is not None and now_s >= armed.until_s:
                    self._faults.remove(armed)
                    continue
                due.append(armed.fault)
                self._count(armed, now_s)
            self.armed = bool(self._faults)
        return due

    def _count(self, armed: _Armed, now_s: float) -> None:
        if armed.fault.kind is FaultKind.FILL_DISK and armed.fault.seconds is not None:
            armed.until_s = armed.until_s or now_s + armed.fault.seconds
            return
        armed.left -= 1
        if armed.left == 0:
            self._faults.remove(armed)

    def _lasting(self, kind: FaultKind, step: int) -> list[Fault]:
        now_s = time.monotonic()
        active: list[Fault] = []
        begun: list[Fault] = []
        with self._lock:
            for armed in list(self._faults):
                fault = armed.fault
                if fault.kind is not kind or not _matches(armed, FaultPhase.FORWARD, step, now_s):
                    continue
                if armed.began is None:
                    armed.began = step
                    begun.append(fault)
                if fault.steps is not None and step >= armed.began + fault.steps:
                    self._faults.remove(armed)
                else:
                    active.append(fault)
            self.armed = bool(self._faults)
        for fault in begun:
            self._tell(fault, step, FaultPhase.FORWARD)
        return active

    def _inject(self, fault: Fault, step: int, phase: FaultPhase | None) -> None:
        if fault.kind is FaultKind.CORRUPT_CHECKPOINT:
            self._corrupt(fault, step, phase)
            return
        self._tell(fault, step, phase)
        match fault.kind:
            case FaultKind.KILL:
                effects.kill()
            case FaultKind.STOP:
                assert fault.seconds is not None
                effects.stop(fault.seconds)
            case FaultKind.DROP_LINK:
                if self._sever is not None:
                    self._sever()
            case FaultKind.DRAIN:
                assert fault.seconds is not None
                self._drain(fault.seconds)
            case FaultKind.RAISE:
                raise effects.DrillError(f"a drill raised this in phase {phase} of step {step}")
            case FaultKind.FILL_DISK:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (a drill)")
            case FaultKind.BLIND:
                effects.lose_records(step)

    def _corrupt(self, fault: Fault, step: int, phase: FaultPhase | None) -> None:
        """Report afterwards: only then is it known which file was damaged, if any."""
        why_not = "the job has no checkpoint yet; set checkpoint.every_steps, or inject it once one is saved"
        try:
            file = self._corrupt_newest() if self._corrupt_newest is not None else None
        except OSError as error:
            file, why_not = None, f"the newest checkpoint cannot be changed: {error}; inject it again"
        if file is None:
            self._did_nothing(fault, why_not)
        else:
            self._tell(fault, step, phase, file)

    def _did_nothing(self, fault: Fault, why: str) -> None:
        self._send(WarningReport(rank=self._rank, text=f"drill: {fault} did nothing: {why}"))

    def _drain(self, seconds: float) -> None:
        # As a cloud does: a notice first, and SIGKILL when the time is over.
        self._send(NoticeReport(rank=self._rank, source="sigterm", left_s=seconds, text="a drill"))
        self._start_timer(seconds, effects.kill)

    def _tell(self, fault: Fault, step: int, phase: FaultPhase | None, file: str = "") -> None:
        self._send(
            FaultReport(
                rank=self._rank,
                fault=str(fault),
                step=step,
                phase=phase or "",
                fired_s=time.time(),
                file=file,
            )
        )

    def _send(self, report: Report) -> None:
        # A fault that cannot be reported fires all the same.
        with suppress(Exception):
            self._report(report)


def _matches(armed: _Armed, phase: FaultPhase, step: int, now_s: float) -> bool:
    fault = armed.fault
    return (
        fault.where in (None, phase)
        and (fault.step is None or step >= fault.step)
        and now_s >= armed.not_before_s
    )
