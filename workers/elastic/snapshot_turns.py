"""When the ranks of a generation take a snapshot, which all decide alike, and what one of them says of it."""

from __future__ import annotations

from workers.elastic.snapshots import Snapshots
from workers.protocol import Report, StandbyReport, WarningReport


class SnapshotTurns:
    """One rank's part. Lasts for a generation, whatever plans it follows.

    Args:
        rank: its number.
        place: its place in the generation.
    """

    def __init__(self, snapshots: Snapshots, rank: int, place: int) -> None:
        self._snapshots = snapshots
        self._rank = rank
        self._place = place
        self._begun = self._over = 0
        self._told_complete = self._told_late = self._told_given_up = False

    def due(self, step: int, every: int) -> bool:
        """Whether it is time for a snapshot, and all ranks are done with the one before."""
        return bool(every) and step % every == 0 and self._begun <= self._over

    def late(self, step: int, every: int) -> Report | None:
        """A word from the first place, once, if it is time for a snapshot and the one before is not complete."""
        if not every or step % every or self._begun <= self._over or self._place or self._told_late:
            return None
        self._told_late = True
        text = (
            f"the snapshot of step {self._begun} is not complete by step {step}: copies take longer than {every} steps,"
            f" and a lost rank undoes more than {2 * every - 1}; use a greater elastic.copy_every, or faster links"
        )
        return WarningReport(rank=self._rank, text=text)

    def begin(self, step: int) -> None:
        """The snapshot of `step` begins."""
        self._begun = step

    def commit(self, step: int, complete: int, given_up: int) -> list[Report]:
        """Take what the commit of `step` says of all ranks; returns new reports.

        Args:
            complete: step of the newest snapshot that all have.
            given_up: step of the newest one that some rank could not complete.
        """
        snapshots, reports = self._snapshots, list[Report]()
        self._over = max(self._over, complete, given_up)
        if complete or given_up:
            snapshots.all_have(complete, given_up)
        mine = snapshots.given_up
        if snapshots.failure is not None and mine and mine == given_up and not self._told_given_up:
            self._told_given_up = True
            back = f"to step {complete}" if complete else "to the newest checkpoint"
            text = f"{snapshots.failure}; until there is, a lost rank takes the job back {back}"
            reports.append(WarningReport(rank=self._rank, text=text))
        if complete and complete == self._begun:
            self._told_given_up = False
            if not self._told_complete and (layers := snapshots.fetched_layers):
                self._told_complete = True
                reports.append(
                    StandbyReport(
                        step=step,
                        rank=self._place,
                        layers=layers,
                        bytes=snapshots.fetched_bytes,
                        seconds=snapshots.fetched_s,
                    )
                )
        return reports
