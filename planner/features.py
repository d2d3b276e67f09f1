"""The features that tell how a device's surroundings slow a stage down: their names, units and meaning, by version.

DynPipe (section V-A) gives its forest 32 features of device and stage. A value that a machine cannot tell is missing
(NaN), never 0. A leaf: workers fill the values in, the planner reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

VERSION = 2
"""Changes with every change of `FEATURES`: a model that was fitted with others must not be used."""

MISSING = math.nan
"""The value of a feature that this machine cannot tell."""


@dataclass(frozen=True)
class Feature:
    """One number about a device, a host or a stage."""

    name: str
    unit: str
    meaning: str


DEVICE = (
    Feature("gpu_busy", "share", "time in which a kernel ran on the device (NVML utilization.gpu)"),
    Feature("gpu_memory_busy", "share", "time in which device memory was read or written"),
    Feature("gpu_sm_clock", "share", "SM clock over its maximum"),
    Feature("gpu_memory_clock", "share", "memory clock over its maximum"),
    Feature("gpu_throttled_power", "0 or 1", "clocks are held down for power"),
    Feature("gpu_throttled_heat", "0 or 1", "clocks are held down for temperature"),
    Feature("gpu_power", "share", "power over its limit"),
    Feature("gpu_temperature", "degrees C", "temperature of the device"),
    Feature("gpu_memory_used", "share", "device memory in use, by everyone"),
    Feature("gpu_memory_others", "share", "device memory in use by other processes"),
    Feature("gpu_pcie_in", "bytes/s", "PCIe traffic to the device"),
    Feature("gpu_pcie_out", "bytes/s", "PCIe traffic from the device"),
    Feature("gpu_encoder", "share", "load of the video encoder"),
    Feature("gpu_decoder", "share", "load of the video decoder"),
    Feature("gpu_processes", "count", "other processes with memory on the device"),
)
"""Features of the device that the rank computes on; missing without CUDA or NVML."""

HOST = (
    Feature("cpu_busy", "share", "busy time of all cores"),
    Feature("cpu_busiest", "share", "busy time of the busiest core"),
    Feature("cpu_own", "cores", "CPU time of the rank's process per second"),
    Feature("cpu_others", "cores", "CPU time of all other processes per second"),
    Feature("cpu_stolen", "share", "time that the hypervisor gave to others"),
    Feature("cpu_waiting_for_disk", "share", "idle time with I/O outstanding"),
    Feature("cpu_runnable", "tasks per core", "tasks that run or wait for a core"),
    Feature("cpu_clock", "share", "clock over its maximum, mean of the cores"),
    Feature("cpu_pressure", "share", "time in which some task waited for a core (PSI)"),
    Feature(
        "own_waiting",
        "share",
        "of the time in which the busiest thread of the rank's process could run, it waited for a core",
    ),
    Feature("switches", "1/s", "context switches of the host"),
    Feature("own_switches", "1/s", "involuntary context switches of the rank's process"),
    Feature("own_faults", "1/s", "page faults of the rank's process without disk"),
    Feature("major_faults", "1/s", "page faults of the rank's process that read the disk"),
    Feature("memory_free", "share", "memory that is free or can be freed"),
    Feature("memory_pressure", "share", "time in which some task waited for memory (PSI)"),
    Feature("disk_read", "bytes/s", "read from all disks"),
    Feature("disk_written", "bytes/s", "written to all disks"),
    Feature("io_pressure", "share", "time in which some task waited for I/O (PSI)"),
    Feature("network_in", "bytes/s", "received by all interfaces but loopback"),
    Feature("network_out", "bytes/s", "sent by all interfaces but loopback"),
    Feature("loopback", "bytes/s", "sent over loopback"),
    Feature("network_errors", "1/s", "errors and drops of all interfaces"),
)
"""Features of the host, and of the rank's process on it."""

STAGE = (
    Feature("layers", "count", "layers of the rank's stages"),
    Feature(
        "work", "s", "forward and backward of a microbatch on an undisturbed device, all stages of the rank"
    ),
    Feature("forward_share", "share", "of `work` that is forward"),
    Feature("parameters", "count", "parameters of the stages"),
    Feature("messages", "bytes", "sent to the neighbours per microbatch"),
    Feature(
        "measured_ratio",
        "factor",
        "time over `work` of what the rank held when the surroundings were sampled",
    ),
)
"""Features of a rank's planned stages, from profile and plan; and of its last measurement, perhaps of others."""

FEATURES = (*DEVICE, *HOST, *STAGE)
"""All features, in the order of a model's columns."""
SAMPLED = (*DEVICE, *HOST)
"""Features that a rank samples while it trains."""
NAMES = tuple(feature.name for feature in FEATURES)


@dataclass(frozen=True, kw_only=True)
class FeatureSample:
    """The sampled features of one rank over one window of time. A feature that is not in `values` is missing."""

    values: tuple[tuple[str, float], ...]
    """(name, value), in the order of `SAMPLED`; finite."""
    window_s: float
    """Length of the window of these means and rates."""
    version: int = VERSION


def row(values: Mapping[str, float]) -> tuple[float, ...]:
    """The values in the order of `FEATURES`; what is not there is `MISSING`.

    Raises:
        ValueError: a name is none of a feature.
    """
    if unknown := sorted(values.keys() - set(NAMES)):
        raise ValueError(f"no such features: {', '.join(unknown)}")
    return tuple(values.get(name, MISSING) for name in NAMES)
