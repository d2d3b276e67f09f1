"""A job's generations and the stretches of time in them: steps as they were trained, and gaps.

Knows nodes only by the ids of ranks' nodes, and no cost; see `effective_time.py`. Part of a `JobView`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Annotated

import numpy as np

from orchestrator.events.rehearsed import Rehearsed
from orchestrator.events.types import Formed, Paused, RankStarted, Record, Regrouped, Stalled
from orchestrator.history.columns import Columns
from orchestrator.history.thinning import Grid, same_as_next
from workers.protocol.reports import StepReport

KEPT_GENERATIONS = 400
"""The newest generations are kept; the commits of earlier ones are forgotten too."""
KEPT_HOMES = 2_000
KEPT_PAUSES = 400
KEPT_STALLS = 100
USUAL_STEPS = 20
"""Number of preceding steps whose median is a step's usual time."""


@dataclass(kw_only=True)
class LoggedGeneration:
    """A generation, as the log shows it."""

    number: int
    members: tuple[int, ...]
    """Ranks by place."""
    formed_s: float
    step: int
    """Steps committed where it began."""
    regrouped: Regrouped | None = None
    trains_s: float | None = None
    """When it began to train, if it replaced another one."""
    committed_s: float | None = None
    """Time of the first commit after it formed."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A committed step, or several in a row."""

    step: int
    """The last of them."""
    time_s: float
    """Time of the last commit."""
    step_s: float
    """From the commit before, as the rank measured it."""
    samples: int
    """Samples, or tokens if the model has them."""
    generation: int
    """Index in `RecoveryHistory.generations`; -1 if in none."""
    voided_by: int | None = None
    """Index of the generation that went back before it."""
    steps: int = 1
    stalled_s: float = 0.0
    """The part of `step_s` that standstills of ranks have added to what a step usually takes."""


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A rank stood still and went on."""

    event: Stalled
    end_s: float

    @property
    def start_s(self) -> float:
        return self.end_s - self.event.seconds


@dataclass(frozen=True, kw_only=True)
class CommittedStretch:
    """A stretch of time in which one generation committed steps that all stand or are all voided."""

    start_s: float
    end_s: float
    generation: int
    """Index in `RecoveryHistory.generations`."""
    voided_by: int | None
    """Index of the generation that went back before it; None if it stands."""
    stalled_s: float = 0.0
    """Extra time over the usual that its steps took because ranks stood still."""

    @property
    def stands(self) -> bool:
        return self.voided_by is None


@dataclass
class RecoveryHistory:
    """The generations of a job and its commits. Seconds are since the Unix epoch."""

    homes: dict[int, str] = field(default_factory=dict)
    """Rank -> node id of the cluster."""
    generations: list[LoggedGeneration] = field(default_factory=list)
    commits: Annotated[list[Commit], Columns(Commit)] = field(default_factory=list)
    """Ordered by time."""
    pauses: list[float] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    """The newest standstills, oldest first."""
    undone: int = 0
    """Committed steps that a return to a checkpoint voided, over the whole log."""
    rehearsed: Rehearsed | None = None

    def fold(self, record: Record) -> None:
        """Fold one more event in."""
        match record.event:
            case StepReport() as report:
                self._commit(report)
            case RankStarted(rank=rank, node=node):
                self.homes[rank] = node
                if len(self.homes) > KEPT_HOMES:
                    del self.homes[min(self.homes)]
            case Formed() as formed:
                self._form(formed, record.time_s)
            case Regrouped() as regrouped:
                for generation in self.generations:
                    if generation.number == regrouped.generation:
                        generation.regrouped, generation.trains_s = regrouped, record.time_s
            case Paused():
                self.pauses = [*self.pauses[1 - KEPT_PAUSES :], record.time_s]
            case Stalled() as stalled:
                self._stall(Stall(event=stalled, end_s=record.time_s))
            case Rehearsed() as rehearsed:
                self.rehearsed = rehearsed
            case _:
                pass

    def take_back(self, step: int, undone: int) -> None:
        """Void the commits after `step`, from which the newest generation goes on: `undone` steps."""
        self.undone += undone
        by = len(self.generations) - 1
        self.commits = [
            replace(commit, voided_by=by) if commit.step > step and commit.voided_by is None else commit
            for commit in self.commits
        ]

    def thin(self, grid: Grid) -> None:
        """Keep one commit per bucket of `grid`, generation and `voided_by`."""
        commits, count = list(self.commits), len(self.commits)
        places = same_as_next(
            grid.buckets(np.fromiter((commit.step for commit in commits), np.int64, count)),
            np.fromiter((commit.generation for commit in commits), np.int64, count),
            np.fromiter(
                (-1 if (by := commit.voided_by) is None else by for commit in commits), np.int64, count
            ),
        )
        for place in places:
            commits[place + 1] = _sum(commits[place], commits[place + 1])
        merged = set(places)
        self.commits = [commit for place, commit in enumerate(commits) if place not in merged]

    @property
    def regroupings(self) -> tuple[LoggedGeneration, ...]:
        """The generations that replaced others."""
        return tuple(generation for generation in self.generations if generation.regrouped is not None)

    def stretches(self) -> Iterator[CommittedStretch]:
        """The stretches that were trained, ordered by time; a gap between them belongs to no step.

        The time of a step that a failure interrupted is in no stretch: only its repetition was committed.
        """
        current: CommittedStretch | None = None
        last_s = float("-inf")
        for commit in self.commits:
            start_s = last_s
            if current is None or current.generation != commit.generation:
                generation = self.generations[commit.generation] if commit.generation >= 0 else None
                trains_s = generation.trains_s if generation is not None else None
                # The first generation of a run has no `trains_s`; a rank may commit before the controller learns of it.
                if trains_s is None or trains_s > commit.time_s:
                    trains_s = commit.time_s - commit.step_s
                start_s = max(last_s, trains_s)
            same = current is not None and (current.generation, current.stands) == (
                commit.generation,
                commit.voided_by is None,
            )
            if current is not None and not same:
                yield current
            current = CommittedStretch(
                start_s=current.start_s if current is not None and same else start_s,
                end_s=commit.time_s,
                generation=commit.generation,
                voided_by=commit.voided_by,
                stalled_s=commit.stalled_s + (current.stalled_s if current is not None and same else 0.0),
            )
            last_s = commit.time_s
        if current is not None:
            yield current

    def _stall(self, stall: Stall) -> None:
        """Keep a standstill, and find the steps that it made longer: some may have been committed already."""
        self.stalls = [*self.stalls[1 - KEPT_STALLS :], stall]
        for index in range(len(self.commits) - 1, -1, -1):
            commit = self.commits[index]
            if commit.time_s <= stall.start_s:
                break
            self.commits[index] = replace(commit, stalled_s=self._stalled_s(commit, index))

    def _stalled_s(self, commit: Commit, index: int) -> float:
        """Extra time over the usual that a step took while ranks stood still; 0 if no usual steps are known.

        Args:
            index: of the commit.
        """
        if not self.stalls or self.stalls[-1].end_s <= (start_s := commit.time_s - commit.step_s):
            return 0.0
        before = [each.step_s / each.steps for each in self.commits[max(0, index - USUAL_STEPS) : index]]
        still_s, until_s = 0.0, start_s
        for stall in sorted(self.stalls, key=lambda stall: stall.start_s):
            begin_s, end_s = max(stall.start_s, until_s), min(stall.end_s, commit.time_s)
            if end_s > begin_s:
                still_s, until_s = still_s + end_s - begin_s, end_s
        return min(still_s, max(0.0, commit.step_s - median(before))) if before else 0.0

    def _form(self, formed: Formed, time_s: float) -> None:
        self.generations.append(
            LoggedGeneration(
                number=formed.generation.number,
                members=formed.generation.members,
                formed_s=time_s,
                step=formed.step,
            )
        )
        if len(self.generations) > KEPT_GENERATIONS:
            self._forget_first()

    def _forget_first(self) -> None:
        del self.generations[0]
        self.commits = [
            replace(
                commit,
                generation=commit.generation - 1,
                voided_by=commit.voided_by - 1 if commit.voided_by is not None else None,
            )
            for commit in self.commits
            if commit.generation > 0 and commit.voided_by != 0
        ]

    def _commit(self, report: StepReport) -> None:
        time_s, index = report.committed_s, len(self.generations) - 1
        while index >= 0 and self.generations[index].formed_s >= time_s:
            index -= 1
        commit = Commit(
            step=report.step,
            time_s=time_s,
            step_s=report.step_s,
            samples=report.tokens or report.samples,
            generation=index,
        )
        self.commits.append(replace(commit, stalled_s=self._stalled_s(commit, len(self.commits))))
        for generation in reversed(self.generations[: index + 1]):
            if generation.committed_s is not None:
                break
            generation.committed_s = time_s


def _sum(earlier: Commit, later: Commit) -> Commit:
    began_s = earlier.time_s - earlier.step_s
    return replace(
        later,
        step_s=later.time_s - began_s,
        samples=earlier.samples + later.samples,
        steps=earlier.steps + later.steps,
        stalled_s=earlier.stalled_s + later.stalled_s,
    )
