"""Each rank's memory against its limit: as the profile predicts it for the job's plan, and as the rank measured it.

A rank on a GPU measures the peak of its tensors, which is what the prediction and the limit are about. Elsewhere it
measures its process, which holds Python and PyTorch too: that is shown beside the prediction, not compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.history.job_view import JobView
from orchestrator.pictures.memory_use import USES, by_use
from orchestrator.prepare.planning import as_followed
from orchestrator.quantities import percent, size
from orchestrator.report.parts import Tile, tile
from orchestrator.spec.job_spec import Spec
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.simulation.predict import Prediction, predict


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """One pipeline rank at its peak; with several pipelines, measured where it takes most."""

    rank: int
    """Pipeline rank."""
    predicted_bytes: int
    limit_bytes: int
    uses: tuple[tuple[str, str], ...]
    """(use, size) at the predicted peak, largest first."""
    measured_bytes: int | None = None
    """Peak of the tensors on its GPU; None on other devices, and before a step is measured."""
    process_bytes: int | None = None
    """Resident memory of its process; None on a GPU, and before a step is measured."""

    @property
    def peak_bytes(self) -> int:
        """Measured if it was, else predicted."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def words(self) -> str:
        """E.g. `312 MB predicted, of 1.2 GB: 26.0 %`."""
        predicted = f"{size(self.predicted_bytes)} predicted"
        measured = "" if self.measured_bytes is None else f"{size(self.measured_bytes)} measured, "
        return f"{measured}{predicted}, of {size(self.limit_bytes)}: {percent(self.peak_bytes / self.limit_bytes)}"

    @property
    def process(self) -> str:
        """The process in words; empty if it was not measured."""
        return "" if self.process_bytes is None else f"its process holds {size(self.process_bytes)}"


@dataclass(frozen=True)
class MemoryPart:
    """The memory of a job's ranks."""

    how: str
    """Where the figures come from."""
    ranks: tuple[RankPeak, ...]

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The peak of the fullest rank: the one figure of it on a page."""
        fullest = max(self.ranks, key=lambda rank: rank.peak_bytes)
        how = "predicted" if fullest.measured_bytes is None else "measured"
        detail = f"{how}, of the fullest rank: rank {fullest.rank}"
        return (tile("Peak memory", size(fullest.peak_bytes), detail),)


def rank_memory(run: JobView, profile: Profile | None) -> MemoryPart | None:
    """The memory of each rank of a pipeline; None without a profile that fits the plan."""
    plan = run.followed or run.plan
    if profile is None or plan is None:
        return None
    try:
        planned = as_followed(profile, Spec.model_validate(run.spec), run.freeze)
        prediction = predict(planned, plan, schedule_of(plan))
    except (ValueError, IndexError):
        # The plan has more ranks than the profile has devices, or the spec is of another version.
        return None
    ranks = memory_of(prediction, _measured(run, plan))
    how = "the peak that the profile predicts for a step, against the rank's limit"
    if any(rank.measured_bytes is not None for rank in ranks):
        how = f"the peak of the tensors as measured so far, and {how}"
    if any(rank.process_bytes is not None for rank in ranks):
        how += "; only whole processes are measured on this device, with Python and PyTorch in them"
    return MemoryPart(how, ranks)


def memory_of(prediction: Prediction, measured: tuple[int | None, ...] | None = None) -> tuple[RankPeak, ...]:
    """The memory of each rank of a predicted step's pipeline.

    Args:
        measured: per pipeline rank what it measured, in bytes; None: nothing was measured.
    """
    found = []
    for rank, of_rank in enumerate(prediction.memory.ranks):
        uses = sorted(zip(by_use(of_rank.peak), USES, strict=True), key=lambda each: -each[0])
        device = prediction.profile.cluster.devices[rank]
        taken = None if measured is None else measured[rank]
        on_gpu = device.kind == "cuda"
        found.append(
            RankPeak(
                rank=rank,
                predicted_bytes=of_rank.peak_bytes,
                limit_bytes=device.memory_bytes,
                uses=tuple((use.name, size(count)) for count, use in uses if count),
                measured_bytes=taken if on_gpu else None,
                process_bytes=None if on_gpu else taken,
            )
        )
    return tuple(found)


def _measured(run: JobView, plan: Plan) -> tuple[int | None, ...]:
    """Per pipeline rank the most that one of its places measured; None where none did under this partition."""
    reports = run.timelines if max(run.measured, default=0) > run.measured_since else {}
    taken = {place: report.memory_bytes for place, report in reports.items()}
    return tuple(
        max((taken[place] for place in plan.siblings(rank) if place in taken), default=None)
        for rank in range(plan.pipeline_ranks)
    )
