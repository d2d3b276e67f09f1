"""From a device's name in the spec to the device."""

from __future__ import annotations

from workers.config import WorkerConfig
from workers.devices.cuda import CudaDevice
from workers.devices.device import CpuDevice, Device
from workers.devices.emulated import EmulatedDevice, layer_times


def make_device(config: WorkerConfig, layers: int) -> Device:
    """The device that `config` asks for, for a model of `layers` layers.

    Raises:
        JobError: there is no such GPU, or the modelled times do not fit the model.
    """
    if config.device == "cuda":
        return CudaDevice()
    if config.device == "emulated":
        return EmulatedDevice(layer_times(config.emulated, layers))
    return CpuDevice()
