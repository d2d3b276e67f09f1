"""What makers publish of their accelerators, for plans on devices that nobody has at hand. A leaf: values only."""

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
    """Floating-point operations per second without sparsity, outside matrix units: TF32 has other bits."""
    bfloat16_flops: float
    """On matrix units, without sparsity."""
    bytes_per_s: float
    """Of its memory."""

    def matrix_flops(self, bits: int) -> float:
        """What a product of matrices of numbers of `bits` bits is taken to reach, per second."""
        peak = self.bfloat16_flops if bits == 16 else self.float32_flops
        return MATRIX_EFFICIENCY * peak

    def memory_rate(self) -> float:
        """Bytes per second that an operation is taken to read and write."""
        return MEMORY_EFFICIENCY * self.bytes_per_s


ACCELERATORS = {
    "a10": Accelerator(
        name="NVIDIA A10",
        memory_bytes=24 * 10**9,
        float32_flops=31.2e12,
        bfloat16_flops=125e12,
        bytes_per_s=600e9,
    ),
    "l4": Accelerator(
        name="NVIDIA L4",
        memory_bytes=24 * 10**9,
        float32_flops=30.3e12,
        bfloat16_flops=121e12,
        bytes_per_s=300e9,
    ),
    "a100": Accelerator(
        name="NVIDIA A100 SXM 80 GB",
        memory_bytes=80 * 10**9,
        float32_flops=19.5e12,
        bfloat16_flops=312e12,
        bytes_per_s=2.039e12,
    ),
    "h100": Accelerator(
        name="NVIDIA H100 SXM 80 GB",
        memory_bytes=80 * 10**9,
        float32_flops=67e12,
        bfloat16_flops=989e12,
        bytes_per_s=3.35e12,
    ),
    "h200": Accelerator(
        name="NVIDIA H200 SXM 141 GB",
        memory_bytes=141 * 10**9,
        float32_flops=67e12,
        bfloat16_flops=989e12,
        bytes_per_s=4.8e12,
    ),
}
"""Short name -> data sheet of the maker, as published by the end of 2024."""
