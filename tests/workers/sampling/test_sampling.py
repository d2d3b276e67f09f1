"""What a rank samples of its surroundings: rates between two readings, missing values, and a real host under load."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.features import HOST, SAMPLED, FeatureSample
from workers.sampling.gpu import GpuReader, gpu_reader
from workers.sampling.host import HostReader
from workers.sampling.readings import Reading, between, merged
from workers.sampling.sampler import Sampler


def values(sample: FeatureSample) -> dict[str, float]:
    return dict(sample.values)


def test_totals_become_rates_and_values_stay() -> None:
    before = Reading(time_s=10.0, values={"memory_free": 0.9}, totals={"disk_read": 100.0, "switches": 7.0})
    after = Reading(time_s=12.0, values={"memory_free": 0.5}, totals={"disk_read": 300.0})
    sample = between(before, after)
    assert sample.window_s == 2.0
    assert values(sample) == {"memory_free": 0.5, "disk_read": 100.0}


def test_what_cannot_be_told_is_missing_and_never_zero() -> None:
    before = Reading(time_s=0.0, totals={"disk_read": 100.0}, cores_s=(1.0, 1.0), own_s=0.0)
    reset = Reading(time_s=1.0, values={"memory_free": math.nan}, totals={"disk_read": 3.0}, cores_s=(1.5,))
    assert values(between(before, reset)) == {}


def test_the_cores_give_shares_of_the_machine_and_of_the_process() -> None:
    before = Reading(time_s=0.0, cores_s=(10.0, 20.0), own_s=1.0)
    after = Reading(time_s=2.0, cores_s=(12.0, 21.0), own_s=1.5)
    assert values(between(before, after)) == {
        "cpu_busy": 0.75,
        "cpu_busiest": 1.0,
        "cpu_own": 0.25,
        "cpu_others": 1.25,
    }


def test_readings_of_the_same_moment_give_no_sample() -> None:
    with pytest.raises(ValueError, match="the later one must be later"):
        between(Reading(time_s=1.0), Reading(time_s=1.0))


def test_a_neighbour_shows_on_a_real_host() -> None:
    reader = HostReader()
    before = reader.read()
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(1.0)
        after = reader.read()
    finally:
        neighbour.kill()
        neighbour.wait()
    found = values(between(before, after))
    # Other tests run beside it: the neighbour has a part of a core at least.
    assert found["cpu_others"] > 0.1
    assert 0.1 < found["cpu_busiest"] <= 1.0
    assert found["switches"] > 0
    assert 0 < found["memory_free"] < 1
    assert set(found) <= {feature.name for feature in HOST}


def test_sources_that_a_system_has_not_are_missing(tmp_path: Path) -> None:
    reader = HostReader(proc=tmp_path)
    before = reader.read()
    time.sleep(0.05)
    found = values(between(before, reader.read()))
    assert "cpu_busy" in found
    assert not {"cpu_runnable", "cpu_pressure", "memory_pressure", "io_pressure"} & set(found)


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_a_sampler_samples_until_it_is_closed(no_thread_stays: None) -> None:
    count = 0

    def read() -> Reading:
        nonlocal count
        count += 1
        return Reading(time_s=time.monotonic(), values={"memory_free": 0.5})

    sampler = Sampler([read], every_s=0.01)
    while (newest := sampler.newest) is None or count < 5:
        time.sleep(0.01)
    sampler.close()
    assert values(newest) == {"memory_free": 0.5}
    seen = count
    time.sleep(0.05)
    assert count == seen


def nvml(**changes: Any) -> SimpleNamespace:
    """NVML as it answers on a GPU, with functions replaced."""

    class NVMLError(Exception):
        pass

    given = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_PCIE_UTIL_RX_BYTES": 1,
        "NVML_PCIE_UTIL_TX_BYTES": 0,
        "nvmlClocksThrottleReasonSwPowerCap": 4,
        "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": 128,
        "nvmlClocksThrottleReasonSwThermalSlowdown": 32,
        "nvmlClocksThrottleReasonHwThermalSlowdown": 64,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=50, memory=25),
        "nvmlDeviceGetClockInfo": lambda handle, which: 900,
        "nvmlDeviceGetMaxClockInfo": lambda handle, which: 1800,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 4,
        "nvmlDeviceGetPowerUsage": lambda handle: 350_000,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetTemperature": lambda handle, which: 60,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=40, total=80),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=-1, usedGpuMemory=20)],
        "nvmlDeviceGetPcieThroughput": lambda handle, which: 1000 * (1 + which),
        "nvmlDeviceGetEncoderUtilization": lambda handle: (10, 1000),
        "nvmlDeviceGetDecoderUtilization": lambda handle: (0, 1000),
    }
    return SimpleNamespace(**(given | changes))


def test_a_gpu_tells_its_load_its_clocks_and_its_neighbours() -> None:
    assert dict(GpuReader(nvml(), "GPU-1").read().values) == {
        "gpu_busy": 0.5,
        "gpu_memory_busy": 0.25,
        "gpu_sm_clock": 0.5,
        "gpu_memory_clock": 0.5,
        "gpu_throttled_power": 1.0,
        "gpu_throttled_heat": 0.0,
        "gpu_power": 0.5,
        "gpu_temperature": 60.0,
        "gpu_memory_used": 0.5,
        "gpu_memory_others": 0.25,
        "gpu_processes": 1.0,
        "gpu_pcie_in": 2000 * 1024.0,
        "gpu_pcie_out": 1000 * 1024.0,
        "gpu_encoder": 0.1,
        "gpu_decoder": 0.0,
    }


def test_what_a_gpu_does_not_support_is_missing() -> None:
    module = nvml()

    def unsupported(handle: str) -> None:
        raise module.NVMLError

    module.nvmlDeviceGetUtilizationRates = unsupported
    module.nvmlDeviceGetComputeRunningProcesses = lambda handle: [SimpleNamespace(pid=-1, usedGpuMemory=None)]
    read = dict(GpuReader(module, "GPU-1").read().values)
    assert not {"gpu_busy", "gpu_memory_busy", "gpu_memory_others"} & set(read)
    assert read["gpu_processes"] == 1.0


def test_without_a_driver_there_is_no_reader_of_gpus() -> None:
    assert gpu_reader("GPU-none") is None


def test_all_that_is_sampled_is_a_feature() -> None:
    names = {feature.name for feature in SAMPLED}
    assert {*GpuReader(nvml(), "GPU-1").read().values, *HostReader().read().totals} <= names
    assert merged([HostReader().read(), GpuReader(nvml(), "GPU-1").read()]).values["gpu_busy"] == 0.5
