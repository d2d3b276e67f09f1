"""When the ranks of a generation take a snapshot, which all decide alike, and what one of them says of it."""

from __future__ import annotations

from planner.plan import undone_steps
from planner.shards import shards_among
from planner.wording import counted
from workers.copies.snapshots import Snapshots
from workers.protocol.reports import Report, StandbyReport, WarningReport


class SnapshotTurns:
    """One rank's part. Lasts for a generation, whatever plans it follows.

    Args:
        rank: its number.
        place: its place in the generation.
        most_undone: committed steps that a lost rank may undo; 0: as many as where copying takes no longer than a turn.
    """

    def __init__(self, snapshots: Snapshots, rank: int, place: int, most_undone: int = 0) -> None:
        self._snapshots = snapshots
        self._rank = rank
        self._place = place
        self._most_undone = most_undone
        self._begun = self._over = 0
        self._told_complete = self._told_late = self._told_given_up = False

    def due(self, step: int, every: int) -> bool:
        """Whether it is time for a snapshot, and all ranks are done with the one before."""
        return bool(every) and step - self._begun >= every and self._begun <= self._over

    def begin(self, step: int) -> None:
        """The snapshot of `step` begins."""
        self._begun = step

    def follow_another_plan(self) -> None:
        """The ranks follow another plan: its first snapshot is told of again."""
        self._told_complete = False

    def commit(self, step: int, every: int, complete: int, given_up: int) -> list[Report]:
        """Take what the commit of `step` says of all ranks; returns new reports.

        Args:
            every: steps from one snapshot to the next.
            complete: step of the newest snapshot that all have.
            given_up: step of the newest one that some rank could not complete.
        """
        snapshots, reports = self._snapshots, list[Report]()
        if self._begun > self._over and (late := self._late(step, every)) is not None:
            reports.append(late)
        self._over = max(self._over, complete, given_up)
        if complete or given_up:
            snapshots.all_have(complete, given_up)
        if snapshots.failure is not None and snapshots.given_up == given_up and not self._told_given_up:
            self._told_given_up = True
            back = (
                f"to step {complete}" if complete else "to what is left of an earlier one, or to a checkpoint"
            )
            text = f"{snapshots.failure}; until there is one, a lost rank takes the job back {back}"
            reports.append(WarningReport(rank=self._rank, text=text))
        if complete and complete == self._begun:
            self._told_given_up = False
            if not self._told_complete and (fetched := snapshots.fetched):
                self._told_complete = True
                reports.append(
                    StandbyReport(
                        step=step,
                        rank=self._place,
                        layers=tuple(dict.fromkeys(piece.layer for piece in fetched)),
                        shards=shards_among(fetched),
                        bytes=snapshots.fetched_bytes,
                        seconds=snapshots.fetched_s,
                        snapshot=True,
                    )
                )
        return reports

    def _late(self, step: int, every: int) -> Report | None:
        """A word from the first place, once, when copying takes so long that more is undone than may be."""
        taken = step - self._begun
        if self._place or self._told_late or not every:
            return None
        undone, allowed = undone_steps(every, taken), self._most_undone or undone_steps(every, every)
        if undone <= allowed:
            return None
        self._told_late = True
        text = (
            f"the snapshot of step {self._begun} took until step {step}, {counted(taken, 'step')}: a lost rank may undo"
            f" {counted(undone, 'committed step')}, where {allowed} are allowed; use a greater elastic.copy_every, or"
            " faster links"
        )
        return WarningReport(rank=self._rank, text=text)
