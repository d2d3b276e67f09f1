"""Losses that keep what training cannot follow, or only seem to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from small_models import Head, Residual, cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.passes += 1
        return cross_entropy(logits, targets) * (1.0 if self.passes < 30 else 0.5)


def averaging_loss() -> Callable[..., Tensor]:
    mean = 1.0

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        nonlocal mean
        value = cross_entropy(logits, targets)
        mean = 0.9 * mean + 0.1 * value.item()
        return value / mean

    return loss


def noting_loss() -> Callable[..., Tensor]:
    notes: list[float] = []

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(logits, targets)
        notes.append(value.item())
        return value

    return loss


def drawing_loss() -> Callable[..., Tensor]:
    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda gradient: gradient * (1 + 0.1 * torch.rand(())))
        return cross_entropy(logits, targets)

    return loss


class MovingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.center.lerp_(logits.mean(), 0.1)
        return cross_entropy(logits - self.center, targets)


class RememberingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        value = cross_entropy(logits, targets)
        if self.before is not None:
            value = value + 0.1 * (logits - self.before).square().mean()
        self.before = logits.detach()
        return value


class HookedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.scale.register_hook(lambda gradient: 0.5 * gradient)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) * self.scale


class GoingBackLoss(nn.Module):
    """One against a perturbation that it forms by going back."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            moved = torch.zeros_like(logits, requires_grad=True)
            cross_entropy((logits.detach() + moved) * self.scale, targets).backward()
        assert moved.grad is not None
        return cross_entropy((logits + moved.grad) * self.scale, targets)


def asking_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What goes on is no leaf, in a plain loop."""
    if logits.requires_grad and not logits.is_leaf:
        logits.register_hook(lambda gradient: 0.5 * gradient)
    return cross_entropy(logits, targets)


def checkpointing_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(checkpoint(torch.tanh, logits, use_reentrant=True), targets)


def shifting_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits, targets.add_(1).remainder_(5))


class ScaledLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets) * self.scale


class HookingLoss(ScaledLoss):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.scale.register_hook(lambda gradient: 0.5 * gradient)
        return super().forward(logits, targets)


class LookingBackLoss(ScaledLoss):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        before = self.scale.grad
        return super().forward(logits, targets) / (1.0 if before is None else 1.0 + before.abs().item())


class ScriptedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits * self.scale, targets)


class LockedLoss(ScaledLoss):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class CountedBack(torch.autograd.Function):
    walks = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CountedBack.walks += 1
        return gradient / (1 + 0.1 * CountedBack.walks)


def counted_back_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(CountedBack.apply(logits), targets)


class NotingOnABufferLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))
        self.center.uses = 0

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.center.uses += 1
        return cross_entropy(logits - self.center, targets) * (1.0 if self.center.uses <= 14 else 0.5)


class BoundedLoss(ScaledLoss):
    """Writes into its parameter what changes nothing as long as that is small."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(0, 4)
        return super().forward(logits, targets)


class MaskedHead(Head):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.ones(len(x))


def masked_loss(logits: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
    assert (mask == 1).all()
    return cross_entropy(logits, targets)


LOSSES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "counting": CountingLoss,
    "averaging": averaging_loss,
    "noting": noting_loss,
    "drawing": drawing_loss,
    "moving": MovingLoss,
    "remembering": RememberingLoss,
    "asking": lambda: asking_loss,
    "checkpointing": lambda: checkpointing_loss,
    "counted-back": lambda: counted_back_loss,
    "going-back": GoingBackLoss,
    "hooking": HookingLoss,
    "locked": LockedLoss,
    "looking-back": LookingBackLoss,
    "scripted": lambda: torch.jit.script(ScriptedLoss()),
    "bounded": BoundedLoss,
    "masked": lambda: masked_loss,
    "noting-on-a-buffer": NotingOnABufferLoss,
    "shifting": lambda: shifting_loss,
    "hooked": HookedLoss,
}


def with_loss(name: str) -> tuple[list[Callable[[], nn.Module]], Callable[..., Tensor]]:
    return [Residual, Residual, Residual, MaskedHead if name == "masked" else Head], LOSSES[name]()
