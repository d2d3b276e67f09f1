"""The gradient of what nothing used, on its way from layer to layer.

Autograd tells "not used" from "used, with a gradient of zero": a parameter without a gradient is not updated at all,
while a zero gradient lets weight decay and moments go on. Messages have fixed shapes, so an absent gradient travels as
a tensor of one number that no computation yields.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Quiet NaNs whose other bits no processor sets.
_MARKS = {
    torch.float64: (torch.int64, 0x7FF8_0F5E_5E75_A55E),
    torch.float32: (torch.int32, 0x7FC5_E7A5),
    torch.bfloat16: (torch.int16, 0x7FD5),
    torch.float16: (torch.int16, 0x7ED5),
}
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


def absent_like(tensor: Tensor) -> Tensor:
    """The absent gradient of a canonical `tensor`, laid out as it is. On devices whose memory the host
    cannot read at once: zeros."""
    integers, mark = _mark(tensor)
    if integers is None:
        return torch.zeros_like(tensor, requires_grad=False)
    size = tensor.numel() * tensor.element_size() // integers.itemsize
    return (
        torch.full((size,), mark, dtype=integers).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    )


def is_absent(gradient: Tensor) -> bool:
    """Whether `gradient`, which is canonical, is an absent one."""
    integers, mark = _mark(gradient)
    if integers is None or not gradient.numel():
        return False
    return gradient.as_strided((1,), (1,)).view(integers)[0].item() == mark


def _mark(tensor: Tensor) -> tuple[torch.dtype | None, int]:
    if tensor.device.type != "cpu":
        return None, 0
    return _MARKS.get(_PARTS.get(tensor.dtype, tensor.dtype), (None, 0))
