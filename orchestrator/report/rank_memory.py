"""Each rank's memory against its limit, as the profile predicts it for the job's plan. Memory is not measured while a
job trains."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.history.job_view import JobView
from orchestrator.pictures.memory_strip import peak_of
from orchestrator.pictures.memory_use import USES, used
from orchestrator.prepare.planning import as_planned
from orchestrator.quantities import percent, size
from orchestrator.spec.job_spec import Spec
from planner.profile import Profile
from planner.schedule.expand import schedule_of
from planner.simulation.predict import Prediction, predict


@dataclass(frozen=True)
class RankMemory:
    """One pipeline rank at its peak."""

    rank: int
    """Pipeline rank."""
    peak_bytes: int
    limit_bytes: int
    uses: tuple[tuple[str, str], ...]
    """(use, size) at the peak, largest first."""

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def words(self) -> str:
        """E.g. `312 MB of 1.2 GB, 26.0 %`."""
        share = percent(self.peak_bytes / self.limit_bytes)
        return f"{size(self.peak_bytes)} of {size(self.limit_bytes)}, {share}"


def rank_memory(run: JobView, profile: Profile | None) -> tuple[RankMemory, ...]:
    """The memory of each rank of a pipeline; empty without a profile that fits the plan."""
    plan = run.followed or run.plan
    if profile is None or plan is None:
        return ()
    try:
        planned = as_planned(profile, Spec.model_validate(run.spec))
        return memory_of(predict(planned, plan, schedule_of(plan)))
    except (ValueError, IndexError):
        # The plan has more ranks than the profile has devices, or the spec is of another version.
        return ()


def memory_of(prediction: Prediction) -> tuple[RankMemory, ...]:
    """The memory of each rank of a predicted step's pipeline."""
    found = []
    for rank, over_time in enumerate(prediction.memory_over_time()):
        levels = used(over_time)
        peak = peak_of(levels)
        _, sizes = max(levels, key=lambda level: sum(level[1]))
        uses = sorted(zip(sizes, USES, strict=True), key=lambda each: -each[0])
        found.append(
            RankMemory(
                rank=rank,
                peak_bytes=peak,
                limit_bytes=prediction.profile.cluster.devices[rank].memory_bytes,
                uses=tuple((use.name, size(count)) for count, use in uses if count),
            )
        )
    return tuple(found)
