"""Reads an NVIDIA GPU through NVML. Without the driver or the `nvidia-ml-py` package there is no reader."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from typing import Any

from workers.sampling.readings import Reading

PCIE_EVERY_S = 1.0
"""Between two looks at PCIe traffic: NVML counts it for 20 ms while the caller waits."""


class GpuReader:
    """Reads one GPU.

    Args:
        nvml: the `pynvml` module.
        uuid: of the GPU, such as `GPU-4a...`.

    Raises:
        nvml.NVMLError: there is no driver, or no such GPU.
    """

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._pcie: dict[str, float] = {}
        self._pcie_at_s = -PCIE_EVERY_S
        self._sources: tuple[Callable[[], dict[str, float]], ...] = (
            self._load,
            lambda: {"gpu_sm_clock": self._clock(nvml.NVML_CLOCK_SM)},
            lambda: {"gpu_memory_clock": self._clock(nvml.NVML_CLOCK_MEM)},
            self._throttled,
            self._power,
            self._temperature,
            self._memory,
            self._traffic,
            lambda: {"gpu_encoder": nvml.nvmlDeviceGetEncoderUtilization(self._handle)[0] / 100},
            lambda: {"gpu_decoder": nvml.nvmlDeviceGetDecoderUtilization(self._handle)[0] / 100},
        )

    def read(self) -> Reading:
        """Look once. What this GPU cannot tell is missing."""
        now_s, values = time.monotonic(), dict[str, float]()
        for source in self._sources:
            try:
                values |= source()
            except self._nvml.NVMLError:
                continue
        return Reading(time_s=now_s, values=values)

    def _load(self) -> dict[str, float]:
        load = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"gpu_busy": load.gpu / 100, "gpu_memory_busy": load.memory / 100}

    def _clock(self, which: int) -> float:
        now = self._nvml.nvmlDeviceGetClockInfo(self._handle, which)
        return now / self._nvml.nvmlDeviceGetMaxClockInfo(self._handle, which)

    def _throttled(self) -> dict[str, float]:
        nvml = self._nvml
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        power = nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        heat = nvml.nvmlClocksThrottleReasonSwThermalSlowdown | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        return {
            "gpu_throttled_power": float(bool(reasons & power)),
            "gpu_throttled_heat": float(bool(reasons & heat)),
        }

    def _power(self) -> dict[str, float]:
        used = self._nvml.nvmlDeviceGetPowerUsage(self._handle)
        return {"gpu_power": used / self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)}

    def _temperature(self) -> dict[str, float]:
        nvml = self._nvml
        return {
            "gpu_temperature": float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))
        }

    def _memory(self) -> dict[str, float]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        others = [
            process
            for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
            if process.pid != os.getpid()
        ]
        found = {"gpu_memory_used": memory.used / memory.total, "gpu_processes": float(len(others))}
        held = [process.usedGpuMemory for process in others]
        if None not in held:
            found["gpu_memory_others"] = sum(held) / memory.total
        return found

    def _traffic(self) -> dict[str, float]:
        now_s = time.monotonic()
        if now_s - self._pcie_at_s >= PCIE_EVERY_S:
            self._pcie_at_s, self._pcie = now_s, {}
            for name, which in (
                ("gpu_pcie_in", self._nvml.NVML_PCIE_UTIL_RX_BYTES),
                ("gpu_pcie_out", self._nvml.NVML_PCIE_UTIL_TX_BYTES),
            ):
                self._pcie[name] = self._nvml.nvmlDeviceGetPcieThroughput(self._handle, which) * 1024.0
        return self._pcie


def gpu_reader(uuid: str) -> GpuReader | None:
    """The reader of the GPU `uuid`; None where NVML or its package is missing."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        return GpuReader(nvml, uuid)
    except nvml.NVMLError:
        return None
