"""Published figures of accelerators, for plans on devices that nobody has at hand. A leaf: values only.

All figures are NVIDIA's own, without sparsity, per GPU:

- T4, V100: "NVIDIA T4 Tensor Core GPU" (datasheet, 2019), "NVIDIA V100 Tensor Core GPU" (datasheet, 2020);
- A10, A10G, A100: the datasheets of "NVIDIA A10", "NVIDIA A10G" (2021) and "NVIDIA A100 Tensor Core GPU" (2022);
- L4, L40S: the datasheets "NVIDIA L4" and "NVIDIA L40S" (2023), whose rates with sparsity are halved here;
- H100, H200: the datasheets "NVIDIA H100 Tensor Core GPU" and "NVIDIA H200 Tensor Core GPU" (2024), likewise;
- B200, GB200: "NVIDIA Blackwell Architecture Technical Brief" and datasheet (2025), columns HGX B200 and GB200 NVL72,
  likewise;
- RTX 4090, RTX 5090: appendices of "NVIDIA Ada GPU Architecture" (2022) and "NVIDIA RTX Blackwell GPU Architecture"
  (2025), tensor rates with FP32 accumulation, as training accumulates.
"""

from __future__ import annotations

from dataclasses import dataclass

MATRIX_EFFICIENCY = 0.6
"""Share of the published multiply rate that a large matrix product or fused attention is taken to reach. An assumption:
makers publish what the units could do."""
MEMORY_EFFICIENCY = 0.8
"""Share of the published memory bandwidth that any other operation is taken to reach. An assumption too."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device, by its data sheet."""

    name: str
    memory_bytes: int
    float32_flops: float
    """Floating-point operations per second outside matrix units: what training in 32 bits takes."""
    tf32_flops: float | None
    """On matrix units, with inputs rounded to TF32: other bits, so that training never takes it. None: it has none."""
    half_flops: float
    """On matrix units, of float16 and, where the device has it, bfloat16."""
    bfloat16: bool = True
    """Whether its matrix units compute in bfloat16."""
    bytes_per_s: float
    """Memory bandwidth."""
    link_bytes_per_s: float
    """To another one in the same machine, one way: half of what NVLink carries in both directions; PCIe, if it has no
    NVLink."""

    def matrix_flops(self, bits: int) -> float:
        """FLOP/s that a product of matrices of `bits`-bit numbers is taken to reach."""
        peak = self.half_flops if bits == 16 else self.float32_flops
        return MATRIX_EFFICIENCY * peak

    def peak_flops(self, precision: str) -> float:
        """Published FLOP/s of training in `job.precision`."""
        return self.float32_flops if precision == "float32" else self.half_flops

    def memory_rate(self) -> float:
        """Bytes per second that an operation is taken to read and write."""
        return MEMORY_EFFICIENCY * self.bytes_per_s


ACCELERATORS = {
    "t4": Accelerator(
        name="NVIDIA T4",
        memory_bytes=16 * 10**9,
        float32_flops=8.1e12,
        tf32_flops=None,
        half_flops=65e12,
        bfloat16=False,
        bytes_per_s=300e9,
        link_bytes_per_s=16e9,
    ),
    "v100": Accelerator(
        name="NVIDIA V100 SXM2 16 GB",
        memory_bytes=16 * 10**9,
        float32_flops=15.7e12,
        tf32_flops=None,
        half_flops=125e12,
        bfloat16=False,
        bytes_per_s=900e9,
        link_bytes_per_s=150e9,
    ),
    "v100-32g": Accelerator(
        name="NVIDIA V100 SXM2 32 GB",
        memory_bytes=32 * 10**9,
        float32_flops=15.7e12,
        tf32_flops=None,
        half_flops=125e12,
        bfloat16=False,
        bytes_per_s=900e9,
        link_bytes_per_s=150e9,
    ),
    "a10": Accelerator(
        name="NVIDIA A10",
        memory_bytes=24 * 10**9,
        float32_flops=31.2e12,
        tf32_flops=62.5e12,
        half_flops=125e12,
        bytes_per_s=600e9,
        link_bytes_per_s=32e9,
    ),
    "a10g": Accelerator(
        name="NVIDIA A10G",
        memory_bytes=24 * 10**9,
        float32_flops=35e12,
        tf32_flops=35e12,
        half_flops=70e12,
        bytes_per_s=600e9,
        link_bytes_per_s=32e9,
    ),
    "l4": Accelerator(
        name="NVIDIA L4",
        memory_bytes=24 * 10**9,
        float32_flops=30.3e12,
        tf32_flops=60e12,
        half_flops=121e12,
        bytes_per_s=300e9,
        link_bytes_per_s=32e9,
    ),
    "l40s": Accelerator(
        name="NVIDIA L40S",
        memory_bytes=48 * 10**9,
        float32_flops=91.6e12,
        tf32_flops=183e12,
        half_flops=362e12,
        bytes_per_s=864e9,
        link_bytes_per_s=32e9,
    ),
    "a100": Accelerator(
        name="NVIDIA A100 SXM 80 GB",
        memory_bytes=80 * 10**9,
        float32_flops=19.5e12,
        tf32_flops=156e12,
        half_flops=312e12,
        bytes_per_s=2.039e12,
        link_bytes_per_s=300e9,
    ),
    "a100-40g": Accelerator(
        name="NVIDIA A100 SXM 40 GB",
        memory_bytes=40 * 10**9,
        float32_flops=19.5e12,
        tf32_flops=156e12,
        half_flops=312e12,
        bytes_per_s=1.555e12,
        link_bytes_per_s=300e9,
    ),
    "rtx4090": Accelerator(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=24 * 10**9,
        float32_flops=82.6e12,
        tf32_flops=82.6e12,
        half_flops=165.2e12,
        bytes_per_s=1.008e12,
        link_bytes_per_s=32e9,
    ),
    "rtx5090": Accelerator(
        name="NVIDIA GeForce RTX 5090",
        memory_bytes=32 * 10**9,
        float32_flops=104.8e12,
        tf32_flops=104.8e12,
        half_flops=209.5e12,
        bytes_per_s=1.792e12,
        link_bytes_per_s=64e9,
    ),
    "h100": Accelerator(
        name="NVIDIA H100 SXM 80 GB",
        memory_bytes=80 * 10**9,
        float32_flops=67e12,
        tf32_flops=494e12,
        half_flops=989e12,
        bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
    ),
    "h200": Accelerator(
        name="NVIDIA H200 SXM 141 GB",
        memory_bytes=141 * 10**9,
        float32_flops=67e12,
        tf32_flops=494e12,
        half_flops=989e12,
        bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
    ),
    "b200": Accelerator(
        name="NVIDIA B200 SXM 180 GB",
        memory_bytes=180 * 10**9,
        float32_flops=75e12,
        tf32_flops=1100e12,
        half_flops=2250e12,
        bytes_per_s=7.7e12,
        link_bytes_per_s=900e9,
    ),
    "gb200": Accelerator(
        name="NVIDIA GB200 186 GB",
        memory_bytes=186 * 10**9,
        float32_flops=80e12,
        tf32_flops=1250e12,
        half_flops=2500e12,
        bytes_per_s=8e12,
        link_bytes_per_s=900e9,
    ),
}
"""Short name -> data sheet of the maker."""
REPORTED = {
    "NVIDIA T4": "t4",
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla V100-SXM2-32GB": "v100-32g",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40g",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "gb200",
}
"""Name that CUDA gives a device -> its short name. Other forms of a chip (PCIe, NVL) are slower, and not here."""
