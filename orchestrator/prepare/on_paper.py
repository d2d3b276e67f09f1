"""A profile for devices that are not there, from the model's shapes and from what makers publish. Starts nothing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from orchestrator.prepare.planning import ranks_to_profile
from orchestrator.prepare.profiling import measuring_config
from orchestrator.quantities import percent
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO
from planner.accelerators import ACCELERATORS, MATRIX_EFFICIENCY, MEMORY_EFFICIENCY, Accelerator
from planner.profile import DeviceProfile, Link, Profile
from planner.wording import counted
from workers.protocol.errors import JobError

LATENCY_S = 30e-6
"""Latency of a message between two machines of one data centre. An assumption."""
LINK_LATENCY_S = 10e-6
"""Latency of a message between two GPUs of one machine. An assumption too."""
LINK = "link"
"""In place of a network: all devices are in one machine, connected as their maker connects them."""


@dataclass(frozen=True, kw_only=True)
class PaperCluster:
    """Equal accelerators, one per machine or all in one, and what connects any two."""

    accelerator: Accelerator
    count: int
    gigabits_per_s: float
    one_machine: bool = False

    def __str__(self) -> str:
        where = " in one machine" if self.one_machine else ""
        return (
            f"{self.count} x {self.accelerator.name}{where}, {self.gigabits_per_s:g} Gbit/s between any two"
        )

    @property
    def link(self) -> Link:
        """Between any two."""
        latency_s = LINK_LATENCY_S if self.one_machine else LATENCY_S
        return Link(latency_s=latency_s, bytes_per_s=self.gigabits_per_s * 1e9 / 8)

    @staticmethod
    def parse(devices: str, network: str) -> PaperCluster:
        """The cluster of `devices`, such as `8xh100`.

        Args:
            network: Gbit/s between any two machines, or `LINK`.

        Raises:
            JobError: a text is of another form, or names no known accelerator.
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
        accelerator, count = ACCELERATORS[found[2]], int(found[1])
        if network == LINK:
            rate = accelerator.link_bytes_per_s * 8 / 1e9
            return PaperCluster(accelerator=accelerator, count=count, gigabits_per_s=rate, one_machine=True)
        try:
            rate = float(network)
        except ValueError:
            raise JobError(f"--network {network}: write Gbit/s, such as 400, or {LINK}") from None
        if not 0 < rate < math.inf:
            raise JobError(f"--network {network}: a network carries more than 0 Gbit/s")
        return PaperCluster(accelerator=accelerator, count=count, gigabits_per_s=rate)


def _check_device(spec: Spec, device: Accelerator) -> None:
    """Check that the spec asks for such a device, in a precision that can be planned for on it.

    Raises:
        JobError: it does not.
    """
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
    if spec.job.precision == "bfloat16" and not device.bfloat16:
        raise JobError(
            f'job.precision = "bfloat16", and the {device.name} does not compute in bfloat16: plan with job.precision ='
            ' "float16" or "float32", or on another device'
        )


def paper_profile(spec: Spec, layers: int, cluster: PaperCluster) -> Profile:
    """The profile of a spec, settled by its model of so many layers, on `cluster`. Imports torch.

    Raises:
        JobError: the spec asks for other devices or more of them, or a layer needs values of its tensors.
    """
    from workers.data.registry import open_dataset
    from workers.models.registry import build_definition
    from workers.profiling.on_paper import profile_on_paper

    device = cluster.accelerator
    _check_device(spec, device)
    ranks = ranks_to_profile(spec, layers, cluster.count)
    if ranks > cluster.count:
        count = "replicas" if spec.pipeline.pipelines is None else "pipelines"
        lower = f"pipeline.{count}" if spec.pipeline.ranks == AUTO else "pipeline.ranks"
        raise JobError(
            f"the job needs {ranks} ranks at least, and --on has {counted(cluster.count, 'device')}: plan on {ranks},"
            f" or lower {lower}"
        )
    data = open_dataset(spec.data, spec.model, spec.job.folder)
    used = replace(cluster, count=ranks)
    machines = [
        DeviceProfile(
            kind="cuda",
            name=device.name,
            memory_bytes=device.memory_bytes,
            machine=f"machine {0 if cluster.one_machine else number}",
        )
        for number in range(ranks)
    ]
    definition = build_definition(spec.model, data.vocabulary)
    try:
        profile = profile_on_paper(measuring_config(spec), definition, data, device, machines, cluster.link)
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
