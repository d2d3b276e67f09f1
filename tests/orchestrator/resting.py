"""Whether a job has come to rest, judged by its events, so that no fault interferes with the next one."""

from __future__ import annotations

from orchestrator.events import types as events
from workers.protocol.reports import CheckpointReport, StandbyReport, StepReport

LEAST_MEMBERS = 3


class Resting:
    """What is known of a running job.

    Args:
        least: number of ranks that must be up, with or without a place.
        standbys: whether every copy must be current, or the first snapshot complete.
        checkpoint: whether a checkpoint of the newest generation must be complete.
    """

    def __init__(self, *, least: int, standbys: bool, checkpoint: bool = False) -> None:
        self._least = least
        self._standbys = standbys
        self._checkpoint = checkpoint
        self.members: tuple[int, ...] = ()
        """The members by place."""
        self.up: set[int] = set()
        """Live ranks."""
        self.step = 0
        """The newest announced step."""
        self.saved = 0
        """Step of the newest complete checkpoint."""
        self._generation = 0
        self._failed_at = -1
        """Furthest step that a failure interrupted: until the job is beyond it, another failure is one more attempt."""
        self._trained = False
        self._fresh = False
        self._copies: dict[int, bool] = {}
        """For each place, whether the copies that it keeps are current."""

    def see(self, event: events.Event) -> None:
        match event:
            case events.RankStarted(rank=rank):
                self.up.add(rank)
            case events.RankFailed(rank=rank, error=error):
                if "DrillError" not in error:
                    self.up.discard(rank)
            case events.Issued(plan=plan):
                places = {place for copies in (*plan.standbys, *plan.snapshots) for place in copies}
                self._copies = dict.fromkeys(places, False)
            case events.Formed(generation=generation, failed_at=failed_at):
                self.members, self._generation = generation.members, generation.number
                self._failed_at = max(self._failed_at, failed_at)
                self._trained = self._fresh = False
                self._copies = dict.fromkeys(self._copies, False)
            case StepReport(step=step, generation=number):
                self.step = step
                self._trained |= number == self._generation
            case StandbyReport(rank=place):
                self._copies[place] = True
            case CheckpointReport(step=step, error=None, path=path):
                self.saved = step
                self._fresh |= path.endswith(f"-gen-{self._generation}")
            case _:
                pass

    @property
    def at_rest(self) -> bool:
        """Whether the newest generation trains, beyond the last failure, and has everything that is required."""
        return (
            self._trained
            and self.step > self._failed_at
            and len(self.members) >= LEAST_MEMBERS
            and len(self.up) >= self._least
            and (not self._standbys or all(self._copies.values()))
            and (not self._checkpoint or self._fresh)
        )
