"""A rank's silence: which part of it speaks for a hang, and which the rank, its host or the controller explains.

Decides only: the clock and what was seen come in as arguments. A second counts only if the rank could have answered in
it and had nothing to do: not while it runs or waits for a core or a disk, not while nothing on its host answers, and
not while the controller itself stood still. `patience.py` looks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from orchestrator.controller.ranks.hangs import Verdict
from orchestrator.quantities import percent, seconds
from workers.process.process_times import ProcessTimes, Standing, starved_s

LATE = 1.5
"""The controller is late if it looks after this many times as long as it meant to."""
AWAKE = 0.1
"""A process that runs, or could, for a smaller share of the time sleeps: some of its threads wake now and then."""
TOLD_AT = 0.1
"""The share of a silence from which on a part of it is named."""


@dataclass(frozen=True, kw_only=True)
class SilenceObservation:
    """The controller's observation of a silent rank at one moment."""

    at_s: float
    """By the controller's monotonic clock."""
    process: ProcessTimes | None = None
    """The rank's process, if someone on its host has just looked."""
    dark: bool = False
    """Whether nothing on its host answers: no other rank, and nobody who could look."""


@dataclass(frozen=True, kw_only=True)
class Silence:
    """Duration of a rank's silence, and its reasons. All times in seconds; no second counts twice."""

    since_s: float
    """When it answered last, by the controller's monotonic clock."""
    at_s: float
    """When the controller looked last."""
    late_s: float = 0.0
    """The controller itself stood still, or ran late."""
    dark_s: float = 0.0
    """Nothing on the rank's host answered."""
    starved_s: float = 0.0
    """The rank's threads could have run, and waited for a core; or all waited for a disk."""
    ran_s: float = 0.0
    """The rank's process ran."""
    pressed_s: float = 0.0
    """Someone on its host waited for a core: time of the host, not of the rank."""
    process: ProcessTimes | None = None
    """The rank's process as it was seen last."""
    unread_s: float = 0.0
    """Time that no look explains yet, without `late_s` and `dark_s`."""

    @property
    def silent_s(self) -> float:
        """Time since the last answer."""
        return self.at_s - self.since_s

    @property
    def listened_s(self) -> float:
        """The part in which the controller would have heard an answer."""
        return self.silent_s - self.late_s

    @property
    def own_s(self) -> float:
        """The part that is the rank's own, and not of the controller, the network or its host's load."""
        return max(0.0, self.listened_s - self.dark_s - self.starved_s)

    @property
    def idle_s(self) -> float:
        """The part that speaks for a hang: the rank could have answered, and did nothing else."""
        return max(0.0, self.own_s - self.ran_s)

    def after(self, look: SilenceObservation, every_s: float) -> Silence:
        """Return the silence after one more look.

        Args:
            every_s: time between two looks, if the controller is not late.
        """
        passed_s = max(0.0, look.at_s - self.at_s)
        late_s = passed_s - every_s if passed_s > LATE * every_s else 0.0
        here_s = passed_s - late_s
        seen = replace(self, at_s=look.at_s, late_s=self.late_s + late_s)
        if look.process is None and look.dark:
            return replace(seen, dark_s=seen.dark_s + here_s)
        unread_s = seen.unread_s + here_s
        if look.process is None:
            return replace(seen, unread_s=unread_s)
        if seen.process is None:  # the time before counts as the time until the next look
            return replace(seen, process=look.process, unread_s=unread_s)
        starved, ran, pressed = _shares(seen.process, look.process)
        return replace(
            seen,
            starved_s=seen.starved_s + starved * unread_s,
            ran_s=seen.ran_s + ran * unread_s,
            pressed_s=seen.pressed_s + pressed * unread_s,
            process=look.process,
            unread_s=0.0,
        )

    def reasons(self) -> str:
        """Return what explains a part of it, in words; empty if nothing does."""
        parts = (
            (self.starved_s, "it waited for a processor or a disk"),
            (self.ran_s, "it ran"),
            (self.dark_s, "nothing on its host answered"),
            (self.late_s, "the controller itself stood still"),
        )
        told = [
            f"{what} for {seconds(spent_s)}"
            for spent_s, what in parts
            if spent_s >= max(TOLD_AT * self.silent_s, 1e-3)
        ]
        if self.process is not None and self.process.standing is Standing.STOPPED:
            told.append("its process is stopped")
        if self.starved_s >= TOLD_AT * self.silent_s and self.pressed_s > 0:
            share = self.pressed_s / self.silent_s
            told.append(f"processors were short on its host for {percent(share)} of the time")
        return ", ".join(told)


def _shares(before: ProcessTimes, after: ProcessTimes) -> tuple[float, float, float]:
    """Return the shares of the time between two looks in which the process starved, in which it ran, and in which
    anything on its host waited for a core."""
    passed_s = after.at_s - before.at_s
    if passed_s <= 0 or after.standing in (Standing.STOPPED, Standing.GONE):
        return 0.0, 0.0, 0.0
    ran = min(1.0, max(0.0, after.ran_s - before.ran_s) / passed_s)
    if after.standing is Standing.BLOCKED:
        starved = 1.0
    elif (waited_s := starved_s(before, after)) is not None:
        starved = waited_s / passed_s
    else:
        starved = 1.0 if after.standing is Standing.RUNNABLE else 0.0
    starved = min(starved, 1.0 - ran)
    if starved + ran < AWAKE:
        return 0.0, 0.0, 0.0
    pressed = ((after.pressure_s or 0.0) - (before.pressure_s or 0.0)) / passed_s
    return starved, ran, min(1.0, max(0.0, pressed))


def judge_silence(
    silence: Silence, *, limit_s: float, most_s: float, works: bool, what: str, setting: str
) -> tuple[Verdict, str]:
    """Decide whether a rank that does not answer has hung, and say why.

    Args:
        limit_s: how long it may be silent with nothing that explains it.
        most_s: how long at most.
        works: whether it is at work for the answer: then running explains nothing.
        what: what it does not do, in words that a duration follows.
        setting: what sets `limit_s`, for the message.
    """
    if silence.listened_s < limit_s:
        return Verdict.FINE, ""
    why, told = silence.reasons(), f"{what} {limit_s:g} s ({setting})"
    if (silence.own_s if works else silence.idle_s) >= limit_s:
        return (
            Verdict.HUNG,
            f"{told}{f', {seconds(silence.silent_s)} in all: {why}' if why else ''}, and was killed",
        )
    told = f"{told}, {seconds(silence.silent_s)} in all{f': {why}' if why else ''}"
    if silence.listened_s >= most_s:
        return Verdict.HUNG, f"{told}. That is the most that a rank is waited for, and it was killed"
    return Verdict.SLOW, f"{told}. It has not hung: it is waited for, {seconds(most_s)} at most"
