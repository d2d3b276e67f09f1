"""A job's events folded into its generations and the stretches of time in them: steps as they were trained, and gaps.

Knows no node but by the id where a rank lives, and no cost; see `effective_time.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.events.rehearsed import Rehearsed
from orchestrator.events.types import Formed, Paused, RankStarted, Record, Regrouped
from workers.protocol import StepReport


@dataclass(kw_only=True)
class Membership:
    """A generation, as far as the log tells."""

    number: int
    members: tuple[int, ...]
    """Ranks by place."""
    formed_s: float
    step: int
    """Steps committed where it began."""
    regrouped: Regrouped | None = None
    trains_s: float | None = None
    """When it trained, if it took the place of another one."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A step that was committed."""

    step: int
    time_s: float
    step_s: float
    """From the commit before, as the rank measured it."""
    samples: int
    """Or tokens, where there are any."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A stretch of time in which one generation committed steps that all stand, or were all voided."""

    start_s: float
    end_s: float
    generation: int
    """Index in `RecoveryHistory.generations`."""
    stands: bool


@dataclass
class RecoveryHistory:
    """The generations of a job and its commits. Seconds are since the Unix epoch."""

    homes: dict[int, str] = field(default_factory=dict)
    """Rank -> node id of the cluster."""
    generations: list[Membership] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    """In order of time."""
    voided: dict[int, int] = field(default_factory=dict)
    """Index of a commit -> index of the generation that went back before it."""
    pauses: list[float] = field(default_factory=list)
    rehearsed: Rehearsed | None = None
    _standing: dict[int, int] = field(default_factory=dict)
    """Step -> index of the commit that stands."""

    def take(self, record: Record) -> None:
        """Fold one more event in."""
        match record.event:
            case RankStarted(rank=rank, node=node):
                self.homes[rank] = node
            case Formed() as formed:
                self._form(formed, record.time_s)
            case Regrouped() as regrouped:
                for generation in self.generations:
                    if generation.number == regrouped.generation:
                        generation.regrouped, generation.trains_s = regrouped, record.time_s
            case StepReport() as report:
                self._commit(report, record.time_s)
            case Paused():
                self.pauses.append(record.time_s)
            case Rehearsed() as rehearsed:
                self.rehearsed = rehearsed

    @property
    def regroupings(self) -> tuple[Membership, ...]:
        """The generations that took the place of others."""
        return tuple(generation for generation in self.generations if generation.regrouped is not None)

    def stretches(self) -> Iterator[Stretch]:
        """What was trained, in order of time; what lies between is no step's.

        The time of a step that a loss cut off is in no stretch: only its repetition was committed.
        """
        current: Stretch | None = None
        index = -1
        last_s = float("-inf")
        for number, commit in enumerate(self.commits):
            while index + 1 < len(self.generations) and self.generations[index + 1].formed_s < commit.time_s:
                index += 1
            start_s = last_s
            if current is None or current.generation != index:
                generation = self.generations[index] if index >= 0 else None
                trains_s = generation.trains_s if generation is not None else None
                # A generation that begins a run tells no time; a rank may commit before the controller hears of it.
                if trains_s is None or trains_s > commit.time_s:
                    trains_s = commit.time_s - commit.step_s
                start_s = max(last_s, trains_s)
            stands = number not in self.voided
            if current is not None and (current.generation, current.stands) == (index, stands):
                current = Stretch(
                    start_s=current.start_s, end_s=commit.time_s, generation=index, stands=stands
                )
            else:
                if current is not None:
                    yield current
                current = Stretch(start_s=start_s, end_s=commit.time_s, generation=index, stands=stands)
            last_s = commit.time_s
        if current is not None:
            yield current

    def _form(self, formed: Formed, time_s: float) -> None:
        step = formed.step
        if step is None:
            step = formed.start.step if formed.start is not None else 0
        self.generations.append(
            Membership(
                number=formed.generation.number,
                members=formed.generation.members,
                formed_s=time_s,
                step=step,
            )
        )
        for void in [number for number in self._standing if number > step]:
            self.voided[self._standing.pop(void)] = len(self.generations) - 1

    def _commit(self, report: StepReport, time_s: float) -> None:
        self._standing[report.step] = len(self.commits)
        self.commits.append(
            Commit(
                step=report.step,
                # Older logs do not tell; a step was announced right after its commit then.
                time_s=report.committed_s or time_s,
                step_s=report.step_s,
                samples=report.tokens or report.samples,
            )
        )


def history_of(records: list[Record]) -> RecoveryHistory:
    """The history that `records`, oldest first, tell of."""
    history = RecoveryHistory()
    for record in records:
        history.take(record)
    return history
