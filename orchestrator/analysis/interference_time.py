"""Cost of a disturbed rank to jobs that differ only in their adaptation. Pure: views in, numbers out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from orchestrator.analysis.decided_plans import DecidedPlan, decided_plans
from orchestrator.events.rehearsed import DisturbedSteps
from orchestrator.events.types import Finished
from orchestrator.history.job_view import JobView
from orchestrator.quantities import percent
from planner.wording import counted

WARM_STEPS = 5
"""The first steps of a job are slower than the rest and are not counted."""
LEAST_STEPS = 8
"""Steps beside the neighbour with one cut, of which a median is the time of that cut."""
DISTURBED = 0.15
"""Share of the processors that, taken by other work, makes a rehearsal inconclusive."""
SMALL_GAIN = 0.02
"""Relative difference of productive times that counts as none."""
NOTICED = 1.1
"""Factor by which the slowest rank's slowdown grows when the neighbour is noticed."""


@dataclass(frozen=True, kw_only=True)
class VisitResponse:
    """A job's response to one visit."""

    first: int
    last: int
    noticed: int | None
    """Steps of the visit that were committed before the slowdown was known; None if it was not."""
    slowdown: float | None
    """Largest slowdown of a rank that was known in the visit; None if it was not noticed. What is known first may lie
    between those of the steps before and those of the visit."""
    slowdown_before: float | None
    """Slowdown of the slowest rank before it was noticed; None if it was not."""
    in_force: int | None
    """Steps of the visit that were committed before the ranks followed another cut; None if they did not."""
    step_s: float
    """Median step of the visit's second half."""


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A plan that was taken up for the ranks' speeds."""

    step: int
    """After which it was decided."""
    layers: tuple[int, ...]
    """Per stage."""
    predicted_s: float
    """A step with it."""
    measured_s: float | None
    """The same as measured at the speeds for which it was predicted, until the next change; None: there was no such
    step."""
    unmeasured: str
    """Why there was none, in words; empty: it was measured, or there was no step at all."""
    off_by: float | None
    """Measured over predicted, less 1."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One of the jobs."""

    policy: str
    steps: int
    """Counted steps."""
    seconds: float
    """Time of these steps, from commit to commit."""
    disturbed_s: float | None
    """Median step beside the neighbour; None without a visit."""
    productive: float | None
    """Time that the counted steps take an oracle over the time that they took. The oracle follows the best cut from
    each visit's first step on, and the first cut otherwise."""
    undisturbed: float | None
    """Time that they take without any neighbour over the time that they took."""
    steps_lost: int
    """Committed steps that were undone."""
    steps_rerun: int
    moves: int
    """Number of layer moves."""
    plans: tuple[PlanChange, ...]
    state_sha256: str | None
    answers: tuple[VisitResponse, ...]
    early: int = 0
    """Number of layer moves before the neighbour's first visit."""
    others: float | None = None
    """Share of the machine's processors that other work took meanwhile; None: unknown."""
    out_of_time: bool = False
    """Whether it was stopped before its last step, as the time was over."""


@dataclass(frozen=True, kw_only=True)
class InterferenceTime:
    """The jobs beside each other."""

    undisturbed_s: float | None
    """Median step of all jobs before the first visit."""
    best_s: float | None
    """Median step beside the neighbour with the cut for which it is least, of all jobs and cuts."""
    emulated: bool
    trials: tuple[Trial, ...]

    @property
    def same_state(self) -> bool | None:
        """Whether all jobs ended with the same state; None if one did not end, or there is only one."""
        hashes = [trial.state_sha256 for trial in self.trials]
        return None if None in hashes or len(hashes) < 2 else len(set(hashes)) == 1

    @property
    def conclusive(self) -> bool:
        """Whether the numbers are the neighbour's: all jobs came to their end, and nothing else disturbed them."""
        return not self._against()

    @property
    def verdict(self) -> str:
        """Result of the rehearsal, in words, or the reason why there is none."""
        if against := self._against():
            return f"inconclusive: {'; '.join(against)}"
        base, *rest = self.trials
        known = [trial for trial in rest if trial.productive is not None]
        if base.productive is None or not known:
            return "nothing to compare: one job, or no step beside the neighbour, was measured"
        best = max(known, key=lambda trial: trial.productive or 0.0)
        assert best.productive is not None
        gain = best.productive / base.productive - 1 if base.productive > 0 else 0.0
        numbers = f"productive time {percent(base.productive)} -> {percent(best.productive)}"
        if abs(gain) < SMALL_GAIN:
            return f"adapt.policy = {best.policy!r} makes no difference: {numbers}"
        pays = "pays" if gain > 0 else "does not pay"
        return f"adapt.policy = {best.policy!r} {pays}: {numbers}"

    def _against(self) -> list[str]:
        """Why the numbers cannot be trusted."""
        found: list[str] = []
        shares = [trial.others for trial in self.trials if trial.others is not None]
        early = sum(trial.early for trial in self.trials)
        if shares and max(shares) > DISTURBED:
            moved = f", and layers moved {counted(early, 'time')} before the neighbour came" if early else ""
            found.append(
                f"the machine was disturbed, other work took {percent(max(shares))} of its processors{moved}"
            )
        late = [trial for trial in self.trials if trial.out_of_time]
        if late:
            policies = ", ".join(repr(trial.policy) for trial in late)
            found.append(f"the time was over before the last step with adapt.policy = {policies}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            **asdict(self),
            "same_state": self.same_state,
            "conclusive": self.conclusive,
            "verdict": self.verdict,
        }


def interference_time(runs: Sequence[JobView]) -> InterferenceTime:
    """Compare `runs`, of which there is at least one, whose logs say when they were disturbed."""
    took = [_took(run) for run in runs]
    before = [
        each
        for run, times in zip(runs, took, strict=True)
        for step, each in times.items()
        if step < min((visit.first for visit in _visits(run)), default=run.step + 1)
    ]
    undisturbed_s = median(before) if before else None
    best_s = min(
        (each for run, times in zip(runs, took, strict=True) for each in _cuts_s(run, times)), default=None
    )
    return InterferenceTime(
        undisturbed_s=undisturbed_s,
        best_s=best_s,
        emulated=runs[0].emulated,
        trials=tuple(
            _trial(run, times, undisturbed_s, best_s) for run, times in zip(runs, took, strict=True)
        ),
    )


def _visits(run: JobView) -> tuple[DisturbedSteps, ...]:
    return run.disturbed.visits if run.disturbed is not None else ()


def _took(run: JobView) -> dict[int, float]:
    """Step -> seconds from the commit before to its own, of the counted steps."""
    found: dict[int, float] = {}
    for step, report in run.steps.items():
        if step <= WARM_STEPS:
            continue
        before = run.steps.get(step - 1)
        known = before is not None and report.committed_s > before.committed_s > 0
        found[step] = report.committed_s - before.committed_s if known and before else report.step_s
    return found


def _of(times: dict[int, float], steps: Iterable[int]) -> list[float]:
    return [times[step] for step in steps if step in times]


def _cuts_s(run: JobView, times: dict[int, float]) -> list[float]:
    """The median step beside the neighbour with each cut that was in force there for a while."""
    changes = [0, *sorted(move.step for move in run.moves), run.step]
    found = []
    for visit in _visits(run):
        # A visit's first and last step may be disturbed in part only, and a cut's first step waits for the switch.
        inside = range(visit.first + 1, visit.last)
        for begin, end in pairwise(changes):
            steps = _of(times, (step for step in inside if begin + 1 < step <= end))
            if len(steps) >= LEAST_STEPS:
                found.append(median(steps))
    return found


def _trial(run: JobView, times: dict[int, float], undisturbed_s: float | None, best_s: float | None) -> Trial:
    visits = _visits(run)
    inside = {step for visit in visits for step in range(visit.first, visit.last + 1)} & times.keys()
    seconds = sum(times.values())
    productive = undisturbed = None
    if undisturbed_s is not None and seconds > 0:
        undisturbed = len(times) * undisturbed_s / seconds
        if best_s is not None or not inside:
            oracle_s = (len(times) - len(inside)) * undisturbed_s + len(inside) * (best_s or 0.0)
            productive = oracle_s / seconds
    return Trial(
        policy=run.spec.get("adapt", {}).get("policy", "off"),
        steps=len(times),
        seconds=seconds,
        disturbed_s=median(_of(times, inside)) if inside else None,
        productive=productive,
        undisturbed=undisturbed,
        steps_lost=run.recovery.undone,
        steps_rerun=run.steps_rerun,
        moves=len(run.moves),
        plans=tuple(_change(plan) for plan in decided_plans(run) if plan.changes),
        state_sha256=run.outcome.state_sha256 if isinstance(run.outcome, Finished) else None,
        answers=tuple(answer for visit in visits if (answer := _answer(run, visit, times)) is not None),
        early=sum(move.step < visits[0].first - 1 for move in run.moves) if visits else len(run.moves),
        others=run.disturbed.others if run.disturbed is not None else None,
        out_of_time=run.disturbed is not None and run.disturbed.out_of_time,
    )


def _change(plan: DecidedPlan) -> PlanChange:
    return PlanChange(
        step=plan.decisions[0].step,
        layers=plan.decisions[0].layers,
        predicted_s=plan.predicted_s,
        measured_s=plan.measured_s,
        unmeasured=plan.unmeasured,
        off_by=plan.off_by,
    )


def _answer(run: JobView, visit: DisturbedSteps, times: dict[int, float]) -> VisitResponse | None:
    later = _of(times, range((visit.first + visit.last) // 2, visit.last + 1))
    if not later:
        return None
    known = [known for known in run.adapt.speeds if known.step <= visit.last]
    levels = [1.0, *(each.slowest for each in known)]
    # What is known before a step is committed is known with the steps before it.
    noticed = next(
        (
            place
            for place, each in enumerate(known)
            if each.step >= visit.first - 1 and each.slowest > NOTICED * levels[place]
        ),
        None,
    )
    in_force = min((move.step for move in run.moves if visit.first <= move.step <= visit.last), default=None)
    return VisitResponse(
        first=visit.first,
        last=visit.last,
        noticed=known[noticed].step - visit.first + 1 if noticed is not None else None,
        slowdown=max(each.slowest for each in known[noticed:]) if noticed is not None else None,
        slowdown_before=levels[noticed] if noticed is not None else None,
        in_force=in_force - visit.first + 1 if in_force is not None else None,
        step_s=median(later),
    )
