"""More of `odd_models.py`: layers with states outside of buffers, with tensors that share memory or are not dense."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from odd_models import PAIRS, Odd, refused, right
from small_models import WIDTH, Head, Residual, cross_entropy
from torch import Tensor, nn
from torch.nn import functional

from workers.models.definition import LayerBuilder, ModelDefinition

# What is noted of a pass is no state; what is counted, averaged or updated is one, wherever it is.


@right
class NotesWhatItMade(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, object] = {}
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.newest, self.mean = y.detach(), y.mean().item()
        self.notes["shape"] = tuple(y.shape)
        self.log.append(self.mean)
        return y


@right
class HoldsNoNumbers(Odd):
    """NaN and infinities, in whatever holds numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("nan")
        self.register_buffer("prior", torch.full((WIDTH,), float("nan")), persistent=False)
        self.register_buffer("bounds", torch.tensor([-torch.inf, torch.inf]), persistent=False)
        self.limits = nn.Parameter(torch.tensor([-torch.inf, torch.inf]), requires_grad=False)
        self.table = nn.Embedding(3, WIDTH)
        with torch.no_grad():
            self.table.weight[0] = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        row = self.table((x.sum(1) > 0).long() + 1)
        return super().forward(
            (x + torch.nan_to_num(self.prior)).clamp(*self.bounds).clamp(*self.limits) + row
        )


@refused(r"changes its attribute seen\['passes'\] in each forward pass")
class CountsInADict(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"passes": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["passes"] += 1
        return super().forward(x) * (1.0 if self.seen["passes"] < 30 else 0.5)


@refused("changes its attribute passes in each forward pass")
class CountsFromItsFirstPass(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.passes = getattr(self, "passes", 0) + 1
        return super().forward(x) * (1.0 if self.passes < 30 else 0.5)


@refused("updates its attribute passes in its forward pass")
class CountsInATensor(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.passes = torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return super().forward(x) * (1.0 if self.passes < 30 else 0.5)


class Progress:
    passes = 0


@refused("changes its attribute progress.passes in each forward pass")
class CountsInAnObject(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def forward(self, x: Tensor) -> Tensor:
        self.progress.passes += 1
        return super().forward(x) * (1.0 if self.progress.passes < 30 else 0.5)


@refused(r"updates its attribute teacher\[0\].weight in its forward pass")
class TeacherInAList(Odd):
    """The slow copy equals its layer at first: what the update gives is what was there."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.linear).requires_grad_(False)]

    def forward(self, x: Tensor) -> Tensor:
        (teacher,) = self.teacher
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), self.linear.parameters(), strict=True):
                slow.lerp_(fast, 0.2)
        return super().forward(x) + 0.1 * teacher(x)


@refused("changes its parameter linear.weight in its forward pass")
class ClampsWhatNothingExceedsAtFirst(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data.clamp_(-0.5, 0.5)
        return super().forward(x)


@refused("changes its weight as it goes to evaluation mode or back")
class MergesInEvaluation(nn.Module):
    """LoRA as its authors' library has it; nothing changes as long as `up` is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = False
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 5)
        self.up = nn.Parameter(torch.zeros(WIDTH, 2))

    def train(self, mode: bool = True) -> MergesInEvaluation:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).detach()
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        y = functional.linear(x, self.weight)
        return x + torch.tanh(y if self.merged else y + x @ self.down.t() @ self.up.t())


# Memory.


@right
class ExpandedBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0, 1, WIDTH).expand(3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.mean(0)


@right
class PartsOfOneVector(Odd):
    def __init__(self) -> None:
        super().__init__()
        vector = nn.utils.parameters_to_vector(self.parameters()).detach().clone()
        nn.utils.vector_to_parameters(vector, self.parameters())


@refused("has a buffer stats and a buffer mean that share memory")
class TwoViewsOfOneBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stats", torch.zeros(2, WIDTH))
        self.register_buffer("mean", self.stats[0])

    def forward(self, x: Tensor) -> Tensor:
        self.stats.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


@right
class EveryOtherElement(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0, 1, 2 * WIDTH)[::2])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@refused("holds in its attribute turned the memory of its parameter linear.weight")
class HoldsItsWeightTwice(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.turned = self.linear.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.1 * x @ self.turned


@refused("holds in its attribute mean the memory of its buffer stats")
class HoldsAViewOfItsBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("stats", torch.zeros(2, WIDTH))
        self.mean = self.stats[0]

    def forward(self, x: Tensor) -> Tensor:
        self.stats.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x - self.mean)


@refused("has a sparse buffer adjacency, which its state cannot hold")
class SparseBuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(WIDTH).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.adjacency, x.t()).t().contiguous())


# One tensor as several outputs: gradients are added in the order of one graph.


class HandsOnTwice(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        return y, y, y


class UsesEachSeveralTimes(Odd):
    def forward(self, x: Tensor, skipped: Tensor, again: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(again) + torch.tanh(skipped) + x.sin() + again.cos()


class HandsOnDetached(Odd):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = super().forward(x)
        return y.detach(), y


class AsksForTheGradient(Odd):
    def forward(self, fixed: Tensor, x: Tensor) -> Tensor:
        return super().forward(x) + (2.0 if fixed.requires_grad else 0.5) * fixed


class DetachesAtFirst(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.passes += 1
        y = super().forward(x)
        extra = y.square().mean() if self.passes > 6 else torch.zeros(())
        return y, extra


class TakesAnExtra(Odd):
    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        return super().forward(x) * (1 + extra)


PAIRS["at first"] = [DetachesAtFirst, TakesAnExtra]


PAIRS["asks"] = [HandsOnDetached, AsksForTheGradient]
PAIRS["skips"] = [HandsOnTwice, UsesEachSeveralTimes]


# Found by a review.


class Lookup(Mapping[str, float]):
    """A configuration of which some values are missing."""

    def __getitem__(self, key: str) -> float:
        raise ValueError(f"{key} is missing")

    def __iter__(self) -> Iterator[str]:
        return iter(("scale",))

    def __len__(self) -> int:
        return 1


@right
class HoldsWhatIsHardToLookAt(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.lookup = Lookup()
        self.turned = torch.randn(WIDTH, WIDTH, dtype=torch.complex64).mH
        self.ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.register_buffer("waves", torch.randn(WIDTH, dtype=torch.complex64).conj(), persistent=False)
        self.filled = torch.zeros(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.filled[torch.tensor([0, 2])] = torch.linspace(0, 1, WIDTH)
        return super().forward(x) + self.waves.real + self.filled[2]


@refused("changes its attribute largest in each forward pass")
class KeepsTheLargest(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, x.detach().abs().max().item())
        return super().forward(x) / (1 + self.largest)


@refused(r"changes its attribute schedule\[\d\] in each forward pass")
class UsesUpAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.schedule = [0.1 * number for number in range(9)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.schedule.pop() if self.schedule else 1.0)


class Counts(nn.Module):
    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * (1.0 if self.passes < 30 else 0.5)


@refused(r"changes its attribute parts\[0\].passes in each forward pass")
class CountsInAModuleInAList(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [Counts()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.parts[0](x))


class Slotted:
    __slots__ = ("passes",)

    def __init__(self) -> None:
        self.passes = np.int64(0)


@refused("changes its attribute progress.passes in each forward pass")
class CountsInASlot(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.progress = Slotted()

    def forward(self, x: Tensor) -> Tensor:
        self.progress.passes += 1
        return super().forward(x) * (1.0 if self.progress.passes < 30 else 0.5)


@refused(r"updates its attribute teacher\[0\].weight in its forward pass")
class TeacherByItsData(TeacherInAList):
    def forward(self, x: Tensor) -> Tensor:
        (teacher,) = self.teacher
        teacher.weight.data = torch.lerp(teacher.weight.data, self.linear.weight.data, 0.2)
        return Odd.forward(self, x) + 0.1 * teacher(x)


class HandsOnTwiceAtFirst(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.passes += 1
        y = super().forward(x)
        return y, y, y if self.passes <= 6 else 2 * y


def hands_on_twice_at_first() -> ModelDefinition:
    kinds = [Residual, HandsOnTwiceAtFirst, UsesEachSeveralTimes, Head]
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), cross_entropy)


# What is done once.


@right
class NotesOnABuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale * self.scale.factor


@right
class HoldsThreads(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.pool = ThreadPoolExecutor(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.pool.submit(lambda: 0.5).result()


@refused("attribute uses of scale in each forward pass")
class CountsOnABuffer(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.scale.uses = 0

    def forward(self, x: Tensor) -> Tensor:
        self.scale.uses += 1
        return x + torch.tanh(self.linear(x)) / self.scale.uses


@refused("does in its first pass what it does in no later one, as its attribute begun tells")
class InitialisesOnce(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.begun = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun:
            self.mean.copy_(x.detach().mean(0))
            self.begun = True
        return x + torch.tanh(self.linear(x - self.mean))


@refused("does in its first pass what it does in no later one, as its attribute seen tells")
class AveragesOncePerStep(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, WIDTH))
        self.seen = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.seen != self.linear.weight._version:
            self.seen = self.linear.weight._version
            self.mean.lerp_(self.linear.weight.detach(), 0.5)
        return super().forward(x) + functional.linear(x, self.mean)


@refused("does in its first pass what it does in no later one, as its attribute forward tells")
class ComputesOtherwiseAfterwards(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.forward = self.later
        return super().forward(x)

    def later(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


@refused("does in its first pass what it does in no later one, as its class tells")
class BecomesAnother(Odd):
    def forward(self, x: Tensor) -> Tensor:
        self.__class__ = Odd
        return x + torch.relu(self.linear(x))


@refused("sets an attribute 'hint' on a tensor that it returns")
class NotesOnItsOutput(Odd):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.hint = 2.0
        return y


class HoldsASketch(Odd):
    def __init__(self) -> None:
        super().__init__()
        self.sketch = nn.Linear(WIDTH, WIDTH, device="meta")


def with_a_sketch() -> ModelDefinition:
    kinds = [Residual, HoldsASketch, Residual, Head]
    return ModelDefinition(tuple(LayerBuilder(f"l{i}", kind) for i, kind in enumerate(kinds)), cross_entropy)
