"""From a device's name in the spec to the device."""

from __future__ import annotations

import torch

from workers.config import WorkerConfig
from workers.devices.cuda import CudaDevice, check_gpu
from workers.devices.device import CpuDevice, Device
from workers.devices.emulated import EmulatedDevice, layer_times


def make_device(config: WorkerConfig, layers: int) -> Device:
    """The device that `config` asks for, for a model of `layers` layers.

    Raises:
        JobError: there is no such GPU, it does not compute in the job's precision, or the modelled times do not fit
            the model.
    """
    if config.device == "cuda":
        device = CudaDevice()
        check_gpu(
            config.job.precision,
            torch.cuda.get_device_name(device.torch_device),
            torch.cuda.get_device_capability(device.torch_device),
        )
        return device
    if config.device == "emulated":
        return EmulatedDevice(layer_times(config.cluster.emulated, layers))
    return CpuDevice()
