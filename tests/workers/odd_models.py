"""Layers that do what users of PyTorch do to modules: hooks, patches, checkpoints, draws, penalties.

`RIGHT` train as in a plain loop; `REFUSED` are refused by name, with words that the message has.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from small_models import WIDTH, Head, Residual, cross_entropy
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from workers.models.definition import LayerBuilder, ModelDefinition

RIGHT: dict[str, Callable[[], Any]] = {}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {}


def right(kind: type[nn.Module]) -> type[nn.Module]:
    RIGHT[kind.__name__] = kind
    return kind


def refused(words: str) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(kind: type[nn.Module]) -> type[nn.Module]:
        REFUSED[kind.__name__] = kind, words
        return kind

    return register


class Odd(nn.Module):
    """A residual layer around one matrix, of which something is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


# Hooks, patches and weights that are made of others.


@right
class WeightHook(Odd):
    def __init__(self) -> None:
        super().__init__()
        keep = (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 2).float()
        self.linear.weight.register_hook(lambda gradient: gradient * keep)


@right
class WeightHookFromItsFirstPass(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.linear.weight.register_hook(lambda gradient: 0.5 * gradient)
            self.hooked = True
        return super().forward(x)


@right
class BiasHook(Odd):
    def __init__(self) -> None:
        super().__init__()
        assert self.linear.bias is not None
        self.linear.bias.register_hook(lambda gradient: 2.0 * gradient)


@right
class ActivationHook(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return x + torch.tanh(y)


@right
class ForwardHook(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, inputs, output: 0.5 * output)


@right
class ForwardPreHook(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_pre_hook(lambda module, inputs: (2.0 * inputs[0],))


@right
class BackwardHook(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_full_backward_hook(lambda module, into, out: (0.5 * into[0],))
        self.linear.register_full_backward_pre_hook(lambda module, out: (3.0 * out[0],))


@right
class PatchedForward(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)
        stock = self.linear.forward
        self.linear.forward = lambda x: stock(x) + x @ self.down.t() @ self.up.t()  # type: ignore[method-assign]


@right
class SpectralNorm(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@right
class ParametrizedSpectralNorm(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


@right
class WeightNorm(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@right
class Parametrized(Odd):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.linear, "weight", _Symmetric())


@right
class OtherWeights(Odd):
    """Calls its module with masked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", (torch.arange(WIDTH) % 3 > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        weights = {"weight": self.linear.weight * self.mask, "bias": self.linear.bias}
        return x + torch.func.functional_call(self.linear, weights, (x,))


@right
class UsedDirectlyToo(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) @ self.linear.weight / WIDTH


@right
class HeldTwice(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(torch.tanh(self.linear(x)), self.weight)


@right
class Thrice(Odd):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.linear(x))
        return x


@right
class FrozenByTurns(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.requires_grad_(bool(x.detach().sum() > 0))
        try:
            return super().forward(x)
        finally:
            self.linear.weight.requires_grad_(True)


# Graphs in graphs.


@right
class GradientPenalty(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(torch.tanh(self.linear(z))).sum()
            (slope,) = torch.autograd.grad(energy, z, create_graph=True)
        return x - 0.5 * slope


@right
class InnerStep(Odd):
    """A step of gradient descent on a copy of its weights, in each forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = self.linear(x).square().mean()
            (slope,) = torch.autograd.grad(inner, self.linear.weight, create_graph=True)
            return x + functional.linear(x, self.linear.weight - 0.1 * slope)


@right
class GradientOfFunction(Odd):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda z: torch.tanh(self.linear(z)).sum())(x)
        return x + slope


@right
class Mapped(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(lambda row: torch.tanh(self.linear(row)))(x)


@right
class Checkpoint(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(
            lambda z: torch.tanh(self.linear(torch.tanh(self.linear(z)))), x, use_reentrant=False
        )


@right
class ReentrantCheckpoint(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.outside = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda z: torch.tanh(self.linear(z)), x + x @ self.outside, use_reentrant=True)
        return x + self.linear(inner)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.1 * grad


@right
class GradientReversal(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(_Reversed.apply(x) @ self.matrix)


class _Once(torch.autograd.Function):
    """Forgets what it saved in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.kept = [x, weight]
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        weight, x = ctx.kept.pop(), ctx.kept.pop()
        return grad @ weight.t(), x.t() @ grad


@right
class WalkedOnce(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(_Once.apply(x, self.matrix))


@right
class Teacher(Odd):
    """Copies itself in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        teacher = copy.deepcopy(self.linear)
        with torch.no_grad():
            teacher.weight.mul_(0.5)
            target = teacher(x)
        return x + torch.tanh(self.linear(x)) * target


# What happens to tensors.


@right
class InPlaceActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH // 3, WIDTH)
        self.activation = nn.ReLU(inplace=True)
        self.down = nn.Linear(WIDTH, WIDTH // 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 3, WIDTH // 3)
        return x + self.down(self.activation(self.up(rows))).view(x.shape)


@right
class InPlaceActivationBesideABareMatrix(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu_(self.linear(x @ self.matrix))


@right
class InPlaceAfterRows(InPlaceActivation):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH // 3, WIDTH // 3))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.view(-1, 3, WIDTH // 3) @ self.matrix).transpose(0, 1)
        return x + self.down(self.activation(self.up(rows))).transpose(0, 1).reshape(x.shape)


@right
class StopsGradients(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


@right
class Quantized(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + y + (y.round() - y).detach()


@right
class UnevenlyUsed(nn.Module):
    """Uses one of two matrices, depending on the microbatch, and never a third."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.one(x) if float(x.detach().sum()) > 0 else torch.tanh(self.other(x)))


@right
class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(WIDTH // 3, WIDTH // 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cells(x.view(-1, 3, WIDTH // 3))[0].reshape(x.shape)


@right
class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reflecting = nn.Conv1d(1, 2, 3, padding=1, padding_mode="reflect")
        self.norm = nn.utils.weight_norm(nn.Conv1d(2, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.relu_(self.reflecting(x.unsqueeze(1)))).squeeze(1)


@right
class Spectrum(nn.Module):
    """Filters its input among the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.filter), n=WIDTH)


# State and draws.


@right
class Centered(Odd):
    """Depends on a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x - self.mean)


@right
class Counting(Odd):
    """Warms up by a count that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return x + torch.tanh(self.linear(x)) * torch.tanh(self.passes / 10)


@right
class LayerDrop(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else super().forward(x)


@right
class NumpyNoise(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.from_numpy(np.random.randn(*x.shape).astype(np.float32)))


@right
class DrawnWeights(Odd):
    """Draws its initial weights from numpy and random."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            drawn = np.random.randn(WIDTH, WIDTH).astype(np.float32)
            self.linear.weight.copy_(torch.from_numpy(drawn) * random.random() / WIDTH)


@refused("attribute generator in each forward pass.*register_buffer")
class OwnGenerator(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand(x.shape, generator=self.generator))


@refused("computes something else each time.*register_buffer")
class FreshGenerator(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + float(np.random.default_rng().random()))


@refused("attribute count in each forward pass.*register_buffer")
class OwnCount(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + torch.tanh(self.linear(x)) / self.count


@refused("computes something else each time|does not train as in a plain loop")
class Remembers(Odd):
    """Adds what the microbatch before came to."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        before, self.before = self.before, y.detach()
        return y if before is None else y + before


@refused("does not train as in a plain loop")
class HandsToItsBackwardPass(Odd):
    """Keeps an activation of the newest pass for a hook."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.newest = y.detach()
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * torch.tanh(self.newest))
        return y


@refused("changes its parameter linear.weight in its forward pass")
class Clamps(Odd):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@refused("changes its parameter slow.weight in its forward pass")
class Averages(Odd):
    """Follows its own weights slowly, as a momentum encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.slow.weight.lerp_(self.linear.weight, 0.1)
        return super().forward(x) + self.slow(x)


@refused("changes its parameter slow.weight in its forward pass")
class AveragesWhatIsStillEqual(Odd):
    """As a momentum encoder does that begins as a copy, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.linear).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.slow.weight.data.mul_(0.5).add_(self.linear.weight.data, alpha=0.5)
        return super().forward(x) + self.slow(x)


@refused("changes its input in place")
class WritesIntoTheDataOfItsInput(Odd):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return super().forward(x)


@refused("changes its input in place")
class WritesIntoItsInputByNumPy(Odd):
    def forward(self, x: Tensor) -> Tensor:
        x.detach().numpy()[...] *= np.float32(0.5)
        return super().forward(x)


@refused("is memory that its next forward pass overwrites")
class ReturnsItsScratch(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.scratch = torch.zeros(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.scratch.shape != x.shape:
            self.scratch = torch.empty_like(x, requires_grad=False)
        with torch.no_grad():
            torch.mul(x, 2.0, out=self.scratch)
        return super().forward(x), self.scratch


@right
class AdapterOfFixedWeights(Odd):
    """A low-rank adapter, with dropout before it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) + 2 * self.up(self.down(self.dropout(x))))


@refused("draws in its backward pass.*preserve_rng_state=True")
class DrawsInBackward(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(
            lambda z: functional.dropout(torch.tanh(self.linear(z)), 0.3),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
        )


@refused("changes its attribute flipped")
class Alternates(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.flipped = False

    def forward(self, x: Tensor) -> Tensor:
        self.flipped = not self.flipped
        return super().forward(x) * (0.5 if self.flipped else 1.0)


@refused("computes something else each time")
class AlternatesOutOfSight(Odd):
    passes: ClassVar[int] = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).passes += 1
        return super().forward(x) / (1 + self.passes % 2)


@refused(r"gives its buffer scale another shape or type .*, torch.float32 \[\] instead of torch.int64 \[\]")
class AveragesInWholeNumbers(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1))

    def forward(self, x: Tensor) -> Tensor:
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().max()
        return super().forward(x / self.scale)


@refused("gives its buffer rows another shape or type")
class GrowsItsBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.rows = torch.cat([self.rows, x.detach().mean(0, keepdim=True)])[-16:]
        return super().forward(x) - self.rows.mean(0)


@refused("makes its buffer mean in its forward pass")
class MakesItsBufferLate(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0)
        return super().forward(x) - self.mean


@refused("switches requires_grad of its parameter linear.weight on")
class SwitchesGradientsOn(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.linear.requires_grad_(True)
        return super().forward(x) * self.scale


@refused("switches requires_grad of its parameter linear.weight off")
class FreezesItselfLater(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.linear.requires_grad_(bool(self.passes < 7))
        return self.up(super().forward(x))


class Marked(Tensor):
    """A tensor that other code knows by its type."""


@refused("returns a Marked: return a torch.Tensor")
class ReturnsASubclass(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).as_subclass(Marked)


@refused("returned a tuple with NoneType at 1")
class ReturnsNone(Odd):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@right
class ScriptedChild(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.jit.script(nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x))


@right
class Orthogonal(Odd):
    """Has a buffer that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


@right
class InputHook(Odd):
    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: -0.5 * gradient)
        return super().forward(x)


@right
class CastTwice(nn.Module):
    """Uses its input twice under its own autocast, which keeps casts of leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.one(x) * self.other(x)
        return x + y.float()


@right
class SharesStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.other.running_mean = self.one.running_mean
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.linear(self.one(x)))


@right
class MakesItsWeight(Odd):
    """Puts a tensor in the place of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        del self.linear.weight
        self.factor = nn.Parameter(torch.randn(WIDTH, 2) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight = self.factor @ self.factor.t()  # type: ignore[assignment]
        return super().forward(x)


@refused("changes a buffer in its backward pass")
class NormInCheckpoint(Odd):
    """Updates running statistics again as it is recomputed, in the order of the backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda z: self.norm(self.linear(z)), x, use_reentrant=False)


@refused("does not train as in a plain loop")
class KeptWithGradients(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            self.newest = y.detach()
            y.register_hook(lambda gradient: gradient * torch.tanh(self.newest))
        return y


@refused("updates its buffer seen, which is not persistent")
class HiddenBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


@refused("returns a sparse or nested tensor")
class ReturnsSparse(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to_sparse()


@refused("changes its parameter linear.weight in its forward pass")
class SwapsData(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.sign()
        return super().forward(x)


@refused("changes its parameter table.weight in its forward pass")
class Renormalizes(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table((x[:, 0] > 0).long())


ELSEWHERE = nn.Linear(WIDTH, WIDTH)


@refused("uses a parameter .* that is not one of its own.*ties")
class UsesAnothersWeight(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + ELSEWHERE(x)


@refused("uses a parameter .* that is not one of its own.*ParameterList")
class ListedParameters(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [nn.Parameter(torch.ones(WIDTH)) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[0] + self.scales[1]


@refused(r"a gradient in its forward pass, as backward\(\) does")
class GoesBackAtOnce(Odd):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.linear(x.detach()).square().mean().backward()
        return super().forward(x)


@refused("changes its input in place")
class ChangesItsInput(Odd):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2.0)
        return super().forward(x)


def model(odd: str) -> ModelDefinition:
    """Four layers, the second of which is odd."""
    kinds = [Residual, RIGHT[odd] if odd in RIGHT else REFUSED[odd][0], Residual, Head]
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), cross_entropy)


# Pairs of layers.


class ToComplex(Odd):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.linear(x))


class FromComplex(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return torch.fft.irfft(z.conj(), n=WIDTH)


class TwoOutputs(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.side(x)


class IgnoresTheSecond(Odd):
    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return super().forward(x)


class Masked(Odd):
    """Hands on a mask, positions, a scalar and its input itself beside its output."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        return y, x > 0, torch.arange(WIDTH, dtype=torch.int32).expand(x.shape), y.square().mean(), x


class TakesMasked(Odd):
    def forward(self, y: Tensor, mask: Tensor, at: Tensor, scalar: Tensor, x: Tensor) -> Tensor:
        return super().forward(y * mask + 0.01 * at) + scalar + x


class SameTwice(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        return y, y, y.double()


class Sums(Odd):
    def forward(self, one: Tensor, other: Tensor, wide: Tensor) -> Tensor:
        return super().forward(one + 2 * other) + wide.float()


class UncertainLoss(nn.Module):
    """Learns its own uncertainty, a matrix, and keeps a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.ones(()))
        self.mix = nn.Linear(5, 5)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * logits.detach().mean(0)
        loss = functional.cross_entropy(self.mix(logits - self.mean), targets)
        return loss * torch.exp(-self.log_variance) + self.log_variance


PAIRS: dict[str, list[Callable[[], nn.Module]]] = {
    "complex": [ToComplex, FromComplex],
    "mask": [Masked, TakesMasked],
    "same": [SameTwice, Sums],
    "identity": [nn.Identity, nn.Flatten],
    "unused": [TwoOutputs, IgnoresTheSecond],
    "detached": [Residual, RIGHT["StopsGradients"]],
}


def pair(name: str) -> ModelDefinition:
    kinds = [Residual, *PAIRS[name], Head]
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), cross_entropy)


def hidden_loss() -> tuple[list[Callable[[], nn.Module]], Callable[..., Tensor]]:
    loss = UncertainLoss()
    return [Residual, Residual, Residual, Head], lambda logits, targets: loss(logits, targets)


def trained_loss() -> tuple[list[Callable[[], nn.Module]], nn.Module]:
    return [Residual, Residual, Residual, Head], UncertainLoss()
