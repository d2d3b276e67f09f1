"""A rank's machine: its processor, its memory, its GPUs, and what decides the last digits of its results."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

import psutil
import torch


def cpu_name() -> str:
    """The processor's model, as its maker calls it where the system tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon and name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def arithmetic(kind: str) -> str:
    """Hardware and library that decide the last digits of this process's results on a device of that kind."""
    if kind == "cuda":
        return f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}"
    return f"{cpu_name()}, {torch.backends.cpu.get_cpu_capability()}, PyTorch {torch.__version__}"


def host_memory_bytes() -> int:
    """The machine's memory, or what its control group leaves of it."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # there is no limit, or none that can be read
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def visible_gpus() -> list[tuple[str, int]]:
    """Name and memory in bytes of every GPU that this process sees."""
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [(properties.name, properties.total_memory) for properties in every]
