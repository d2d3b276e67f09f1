"""A profile for devices that are not there, from the model's shapes and from what makers publish. Starts nothing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from orchestrator.prepare.planning import ranks_to_profile
from orchestrator.prepare.profiling import worker_config
from orchestrator.prepare.settling import SettledSpec
from orchestrator.quantities import percent
from orchestrator.spec.checks import AUTO
from planner.accelerators import ACCELERATORS, MATRIX_EFFICIENCY, MEMORY_EFFICIENCY, Accelerator
from planner.profile import DeviceProfile, Link, Profile
from planner.wording import counted
from workers.protocol import JobError

LATENCY_S = 30e-6
"""Of a message between two machines of one data centre. An assumption."""


@dataclass(frozen=True, kw_only=True)
class PaperCluster:
    """Equal machines with one accelerator each, and the network between any two."""

    accelerator: Accelerator
    count: int
    gigabits_per_s: float

    def __str__(self) -> str:
        return f"{self.count} x {self.accelerator.name}, {self.gigabits_per_s:g} Gbit/s between any two"

    @staticmethod
    def parse(devices: str, gigabits_per_s: float) -> PaperCluster:
        """The cluster of `devices`, such as `8xh100`.

        Raises:
            JobError: the text is of another form, or names no known accelerator.
        """
        found = re.fullmatch(r"(\d+)x(.+)", devices.strip().lower())
        known = ", ".join(sorted(ACCELERATORS))
        if found is None or not int(found[1]):
            raise JobError(f"--on {devices}: write how many of what, such as 8xh100; known are {known}")
        if found[2] not in ACCELERATORS:
            raise JobError(
                f"--on {devices}: no data sheet of {found[2]!r} is known, only of {known}; or measure on such a device"
                " with freshet profile, and plan with --profile"
            )
        if not 0 < gigabits_per_s < math.inf:
            raise JobError(f"--network {gigabits_per_s:g}: a network carries more than 0 Gbit/s")
        return PaperCluster(
            accelerator=ACCELERATORS[found[2]], count=int(found[1]), gigabits_per_s=gigabits_per_s
        )


def paper_profile(settled: SettledSpec, cluster: PaperCluster) -> Profile:
    """The profile of a settled spec on `cluster`. Imports torch.

    Raises:
        JobError: the spec asks for other devices or more of them, or a layer needs values of its tensors.
    """
    from workers.data.registry import open_dataset
    from workers.models.registry import build_definition
    from workers.profiling.on_paper import profile_on_paper

    spec = settled.spec
    if spec.cluster.device != "cuda":
        raise JobError(
            f"--on plans for GPUs, and the job asks for cluster.device = {spec.cluster.device!r}: add --set"
            " cluster.device=cuda"
        )
    if spec.job.precision == "bfloat16-autocast":
        raise JobError(
            'job.precision = "bfloat16-autocast", and autocast needs a device: plan with job.precision = "bfloat16" or'
            ' "float32"'
        )
    ranks = ranks_to_profile(spec, len(settled.outline.layers), cluster.count)
    if ranks > cluster.count:
        lower = "pipeline.replicas" if spec.pipeline.ranks == AUTO else "pipeline.ranks"
        raise JobError(
            f"the job needs {ranks} ranks at least, and --on has {counted(cluster.count, 'device')}: plan on {ranks},"
            f" or lower {lower}"
        )
    data = open_dataset(spec.data, spec.model, spec.job.folder)
    device, used = cluster.accelerator, replace(cluster, count=ranks)
    machines = [
        DeviceProfile(
            kind="cuda", name=device.name, memory_bytes=device.memory_bytes, machine=f"machine {number}"
        )
        for number in range(ranks)
    ]
    link = Link(latency_s=LATENCY_S, bytes_per_s=cluster.gigabits_per_s * 1e9 / 8)
    definition = build_definition(spec.model, data.vocabulary)
    try:
        profile = profile_on_paper(worker_config(spec), definition, data, device, machines, link)
    except JobError as error:
        raise JobError(
            f"{error}. --on passes tensors without values: where a layer reads them, measure with freshet profile and"
            " plan with --profile"
        ) from error
    return replace(
        profile,
        source=(
            f"on paper, from shapes and data sheets, for {used}; matrix products at"
            f" {percent(MATRIX_EFFICIENCY)} of the published rate, all else at {percent(MEMORY_EFFICIENCY)} of the"
            " published bandwidth, messages at the whole rate of the network from memory to memory"
        ),
    )
