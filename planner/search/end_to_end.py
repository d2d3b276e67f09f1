"""DynPipe's Algorithm 1: the stages, their cut and their devices for the least T(S) x W(S).

A stage's devices are neighbours within one machine and share its microbatches evenly: r = r_data x r_tensor of eq. 6
with r_tensor = 1, so there is no all-gather. The engine has one device per stage and whole pipelines as replicas, so
this result is for the report; `planner/search/search.py` chooses cuts with r = 1. The engine does not run asynchronous
pipelines yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.partition.dynpipe import merge
from planner.partition.stage_costs import Matrix, StageCosts, Vector, range_sums
from planner.plan import PlanError
from planner.profile import Link, Profile
from planner.schedule.in_flight import Counts
from planner.search.convergence import ConvergenceError
from planner.wording import counted

SIZES = (1, 2, 4, 8)
"""Default numbers of devices that a stage may have."""


@dataclass(frozen=True, kw_only=True)
class SharedStage:
    """A stage on one or more devices."""

    first: int
    stop: int
    """Its layers are [first, stop)."""
    device: int
    """The first of its devices; the others follow it."""
    devices: int
    """r."""


@dataclass(frozen=True, kw_only=True)
class EndToEnd:
    """The shortest pipeline of a given number of stages over all devices."""

    stages: tuple[SharedStage, ...]
    iteration_s: float
    """W(S), per microbatch."""
    updates: float
    """T(S)."""
    microbatches_per_update: int

    @property
    def wall_clock_s(self) -> float:
        return self.updates * self.microbatches_per_update * self.iteration_s


@dataclass(frozen=True)
class DeviceGroup:
    """Neighbouring devices of one machine."""

    first: int
    size: int

    @property
    def stop(self) -> int:
        return self.first + self.size

    @property
    def devices(self) -> range:
        return range(self.first, self.stop)


def plan(
    profile: Profile,
    updates: Callable[[int], float],
    *,
    microbatches: int,
    synchronous: bool = True,
    sizes: Sequence[int] = SIZES,
    recompute: Collection[int] = (),
) -> tuple[EndToEnd, ...]:
    """The best pipeline for every number of stages that fits and converges, ascending; the least `wall_clock_s` wins.

    Exact under eq. 4-7, in O(S N R^2 L^2) for S stages, N devices, R sizes and L layers; N times that where memory
    limits bind, as how much a stage has in flight depends on the stages after it.

    Args:
        updates: S -> T(S); constant for a synchronous schedule.
        microbatches: of one update, which share one gradient all-reduce.
        synchronous: whether the pipeline drains before an update. If not, microbatches of later updates follow
            immediately, and a stage stashes each version of its weights that a microbatch in flight has used.

    Raises:
        PlanError: no pipeline uses all devices, or none fits the memory.
        ConvergenceError: no number of stages reaches the target error.
    """
    program = Program(profile, microbatches, sizes, recompute, synchronous=synchronous)
    count = len(profile.cluster.devices)
    free = program.solve(None)
    found: list[EndToEnd] = []
    refusal: ConvergenceError | None = None
    spread = False
    for stages in range(1, min(count, program.layers) + 1):
        try:
            needed = updates(stages)
        except ConvergenceError as error:
            refusal = refusal or error
            continue
        best = program.best(free, stages, None)
        spread = spread or best is not None
        if best is not None and not program.fits(best):
            best = program.best(program.solve(stages), stages, stages)
        if best is not None:
            found.append(
                EndToEnd(
                    stages=best,
                    iteration_s=program.iteration_s(best),
                    updates=needed,
                    microbatches_per_update=microbatches,
                )
            )
    if found:
        return tuple(found)
    if refusal is not None:
        raise refusal
    raise PlanError(_refused(count, program.layers, max(sizes), spread=spread))


def _refused(devices: int, layers: int, most: int, *, spread: bool) -> str:
    """Why there is no pipeline, and what would help.

    Args:
        most: devices of a stage at most.
        spread: whether some pipeline uses all devices, and none of these fits the memory.
    """
    if not spread:
        return (
            f"{counted(devices, 'device')} cannot all be used by {counted(layers, 'layer')}, with"
            f" {counted(most, 'device')} per stage at most and each stage within one machine: use fewer devices,"
            " or allow a stage more"
        )
    return (
        f"no pipeline over {counted(devices, 'device')} fits their memory, with {counted(most, 'device')} per"
        " stage at most: recompute, or use more devices or a smaller microbatch"
    )


Reached = dict[DeviceGroup, Matrix]
"""`reached[group][s, l]`: W of the first l layers on s + 1 stages, the last of them on the group's devices, with all
devices before it in use; infinite if impossible."""


class Program:
    """The dynamic program of eq. 5 over (layers, stages, devices of the last stage, devices so far)."""

    def __init__(
        self,
        profile: Profile,
        microbatches: int,
        sizes: Sequence[int],
        recompute: Collection[int],
        *,
        synchronous: bool = True,
    ) -> None:
        self._cluster = profile.cluster
        self._microbatches = microbatches
        self._synchronous = synchronous
        self._costs = StageCosts(profile, (), (), frozenset(recompute))
        self._weight_bytes = range_sums(layer.parameter_bytes for layer in profile.model.layers)
        self._message_bytes = self._costs.forward_bytes + self._costs.backward_bytes
        machines = [device.machine for device in self._cluster.devices]
        self.groups = [
            DeviceGroup(first, size)
            for first in range(len(machines))
            for size in sizes
            if first + size <= len(machines) and len(set(machines[first : first + size])) == 1
        ]

        self._ending_at: dict[int, list[DeviceGroup]] = {}
        for group in self.groups:
            self._ending_at.setdefault(group.stop, []).append(group)
        self._stage_s: dict[DeviceGroup, Matrix] = {}
        self._communication_s: dict[tuple[DeviceGroup, DeviceGroup], Vector] = {}

    @property
    def layers(self) -> int:
        return self._costs.layers

    def stage_s(self, group: DeviceGroup) -> Matrix:
        """Eq. 6 for every layer range: computation in equal parts at the speed of the slowest device, and the ring
        all-reduce of the gradients, 2 (r - 1) messages of an r-th each."""
        slowdown = max(self._cluster.devices[device].slowdown for device in group.devices)
        time_s = self._costs.compute_s * (slowdown / group.size)
        if group.size > 1:
            links = [self._cluster.link(a, b) for a in group.devices for b in group.devices if a != b]
            each_s = Link.slowest(links).transfer_s(self._costs.gradient_bytes / group.size)
            time_s = time_s + 2 * (group.size - 1) * each_s / self._microbatches
        return time_s

    def communication_s(self, before: DeviceGroup, after: DeviceGroup) -> Vector:
        """Eq. 7 for every cut: over the least bandwidth between the devices of the two stages."""
        known = self._communication_s.get((before, after))
        if known is None:
            links = [
                self._cluster.link(*pair)
                for a in before.devices
                for b in after.devices
                for pair in ((a, b), (b, a))
            ]
            known = Link.slowest(links).link_busy_s(self._message_bytes / (before.size * after.size))
            self._communication_s[before, after] = known
        return known

    def allowed(self, group: DeviceGroup, kept: int) -> NDArray[np.bool_]:
        """Whether a layer range fits the group's memory with `kept` microbatches in flight, bool[L + 1, L + 1]."""
        limit = min(self._cluster.devices[device].memory_bytes for device in group.devices)
        shared = self._costs.in_flight_bytes([Counts(activations=kept, rebuilt=1)], arrives=group.first > 0)
        stashed = self.stashes(kept) * self._weight_bytes
        state = self._costs.state_bytes + self._costs.gradient_bytes
        return state + stashed + shared / group.size <= limit

    def kept(self, stage: int, stages: int) -> int:
        """Microbatches in flight on `stage` of `stages` in 1F1B: one for each stage from it on, if there are as
        many."""
        return min(self._microbatches, stages - stage) if self._synchronous else stages - stage

    def stashes(self, kept: int) -> int:
        """Older versions of the weights that `kept` consecutive microbatches in flight can have used."""
        return 0 if self._synchronous else -(-(kept - 1) // self._microbatches)

    def fits(self, stages: tuple[SharedStage, ...]) -> bool:
        return all(
            self.allowed(DeviceGroup(stage.device, stage.devices), self.kept(index, len(stages)))[
                stage.stop, stage.first
            ]
            for index, stage in enumerate(stages)
        )

    def solve(self, stages: int | None) -> Reached:
        """W of every state, without memory limits or with those of a pipeline of `stages` stages."""
        most = min(len(self._cluster.devices), self.layers) if stages is None else stages
        reached: Reached = {}
        for group in self.groups:
            shortest = reached[group] = np.full((most, self.layers + 1), np.inf)
            if group.first == 0:
                shortest[0] = self._last_s(group, 0, stages)[:, 0]
            for other in self._before(group):
                communication_s = self.communication_s(other, group)
                for stage in range(1, min(most, group.first + 1)):
                    merged = reached[other][stage - 1, stage:-1]
                    if np.isinf(merged).all():
                        continue
                    last = self._last_s(group, stage, stages)[stage + 1 :, stage:-1]
                    least = merge(merged, last, communication_s[stage:-1]).min(axis=1)
                    np.minimum(shortest[stage, stage + 1 :], least, out=shortest[stage, stage + 1 :])
        return reached

    def best(self, reached: Reached, stages: int, limited: int | None) -> tuple[SharedStage, ...] | None:
        """The pipeline of `stages` stages with the least W in `reached`, the result of `solve(limited)`; None without
        one."""
        ends = [group for group in self.groups if group.stop == len(self._cluster.devices)]
        group = min(ends, key=lambda group: reached[group][stages - 1, -1])
        if np.isinf(reached[group][stages - 1, -1]):
            return None
        found: list[SharedStage] = []
        stop = self.layers
        for stage in range(stages - 1, 0, -1):
            last = self._last_s(group, stage, limited)[stop]
            through = {
                other: merge(reached[other][stage - 1], last, self.communication_s(other, group))
                for other in self._before(group)
            }
            before = min(through, key=lambda other: through[other].min())
            first = int(through[before].argmin())
            found.append(SharedStage(first=first, stop=stop, device=group.first, devices=group.size))
            group, stop = before, first
        found.append(SharedStage(first=0, stop=stop, device=group.first, devices=group.size))
        return tuple(reversed(found))

    def iteration_s(self, stages: Sequence[SharedStage]) -> float:
        """W of a given pipeline."""
        merged, before = 0.0, None
        for stage in stages:
            group = DeviceGroup(stage.device, stage.devices)
            last = self.stage_s(group)[stage.stop, stage.first]
            communication_s = self.communication_s(before, group)[stage.first] if before else 0.0
            merged = float(merge(merged, last, communication_s)) if before else float(last)
            before = group
        return merged

    def _before(self, group: DeviceGroup) -> list[DeviceGroup]:
        return self._ending_at.get(group.first, [])

    def _last_s(self, group: DeviceGroup, stage: int, stages: int | None) -> Matrix:
        """`stage_s` where a stage is allowed, else infinite."""
        if group not in self._stage_s:
            steps = np.arange(self.layers + 1)
            self._stage_s[group] = np.where(steps < steps[:, None], self.stage_s(group), np.inf)
        if stages is None:
            return self._stage_s[group]
        return np.where(self.allowed(group, self.kept(stage, stages)), self._stage_s[group], np.inf)
