"""A plain autograd loop in one process, without stages, deferral or engine: the engine's reference."""

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from jobs import DEVICE
from torch import nn
from torch.nn import functional

from planner.course import Course
from workers.build import build_module
from workers.config import WorkerConfig
from workers.data.dataset import stream_of, takes_draws
from workers.data.registry import open_dataset
from workers.data.sampling import train_places
from workers.layers.deferred import modules as deferred
from workers.layers.deferred.defer import product
from workers.models.loss import share_of_targets
from workers.models.registry import build_definition
from workers.models.trained_loss import loss_beside
from workers.protocol.loss_scale import LossScale
from workers.reproducibility import determinism, rng
from workers.reproducibility.canonical import canonical
from workers.state.layer_state import LayerState, digest, state_digest
from workers.state.optim import make_optimizer
from workers.state.precision import boundary_dtype, cast_fixed_, cast_floats, cast_parameters


class Boundary(torch.autograd.Function):
    """The layout rule at a layer's boundary as a differentiable function."""

    @staticmethod
    def forward(ctx, x):
        return canonical(x).clone()

    @staticmethod
    def backward(ctx, grad):
        return canonical(grad)


class WideEmbedding(torch.autograd.Function):
    """An embedding of 16 bits whose gradient is summed over rows in 32."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.tokens, ctx.rows = tokens, weight.shape[0]
        return nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.float()
        return torch.ops.aten.embedding_dense_backward(grad, ctx.tokens, ctx.rows, -1, False), None


def embed_widely(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Embedding) and child.weight.dtype in (torch.bfloat16, torch.float16):
            assert child.padding_idx is None
            child.forward = partial(WideEmbedding.apply, child.weight)


class WideWeight(torch.autograd.Function):
    """The gradient of a matrix of 16 bits, formed in 32 from that of `output`; `output` is `inputs` times it."""

    @staticmethod
    def forward(ctx, weight, inputs, output):
        ctx.inputs = inputs
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        inputs, rows = (t.reshape(-1, t.shape[-1]) for t in (ctx.inputs, grad))
        formed = torch.zeros(rows.shape[1], inputs.shape[1], device=grad.device)
        deferred.add_product_(formed, rows.t(), inputs)
        return formed, None, grad


def multiply_widely(module: nn.Module, dtype: torch.dtype) -> None:
    narrow = functional.linear

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x.to(dtype)
        with mock.patch.object(functional, "linear", narrow):
            output = product(x, weight.detach().to(dtype), bias)
        return WideWeight.apply(weight, x.detach(), output)

    def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, layer.weight, layer.bias)

    def attention(stock: Callable[..., object], *arguments: object, **named: object) -> object:
        # Its products are no modules: torch's function makes them.
        with mock.patch.object(functional, "linear", multiply):
            return stock(*arguments, **named)

    for child in module.modules():
        if type(child) is nn.Linear:
            child.forward = partial(linear, child)
        elif type(child) is nn.MultiheadAttention:
            child.forward = partial(attention, child.forward)


COMPUTES = {"bfloat16": torch.bfloat16, "bfloat16-autocast": torch.bfloat16, "float16": torch.float16}

Frozen = Callable[[int, int, str, nn.Module], Collection[str]]
"""Step (1 is the first), microbatch, layer's name, layer -> the parameters whose gradient is left out."""


def nothing(step: int, microbatch: int, name: str, module: nn.Module) -> Collection[str]:
    return ()


def train_plainly(
    config: WorkerConfig,
    output: Path,
    *,
    boundaries: bool = False,
    frozen: Frozen = nothing,
    wide: bool = DEVICE.type == "cuda",
    order: Sequence[int] = (),
    course: Course | None = None,
) -> tuple[str, list[float]]:
    """Returns state_sha256 after `config.job.steps` steps of ordinary training, and the loss of each step.

    Each microbatch has one graph from input to loss. Autograd forms its gradient, and gradients are added in
    ascending order. The loop knows no ties. With `boundaries` it imposes the canonical layout between layers,
    which matters only to models whose layers return another one, such as a transposed view. Gradients of
    `frozen` parameters are formed too, and discarded. With `wide` the gradients of matrices are formed in 32 bits,
    which CPUs do not do. The microbatches are those of one replica, or of all replicas in `order`, or of a `course`.
    """
    if course is None:
        course = (
            config.course() if order else Course.of(1, config.microbatches, config.pipeline.microbatch_size)
        )
    determinism.fix(threads=config.job.threads, cuda=DEVICE.type == "cuda")
    data = open_dataset(config.data, config.model, str(output))
    definition = build_definition(config.model, data.vocabulary)
    optimizer = make_optimizer(config.optimizer, config.job.steps)
    modules = [build_module(definition, i, config.job.seed).to(DEVICE) for i in range(len(definition.layers))]
    casts = [cast_parameters(module, config.job.precision) for module in modules]
    for module, its in zip(modules, casts, strict=True):
        cast_fixed_(module, its)
    states = [
        LayerState.of(i, definition.names[i], module, optimizer, its)
        for i, (module, its) in enumerate(zip(modules, casts, strict=True))
    ]
    for module in modules:
        embed_widely(module)
        if wide and config.job.precision in COMPUTES:
            multiply_widely(module, COMPUTES[config.job.precision])
    dtype = boundary_dtype(config.job.precision)
    scale = LossScale() if config.job.precision == "float16" else None
    losses = []
    for step in range(course.last_step(config.job.steps)):
        leg = course.at(step + 1)
        numbers = order or range(leg.replicas * leg.microbatches)
        told: dict[int, float] = {}
        shares: dict[int, float] = {}
        buffers = [{name: b.clone() for name, b in state.buffers.items()} for state in states]
        for microbatch in numbers:
            places = train_places(
                config.job.seed,
                course.positions(step + 1, microbatch),
                stream_of(data.dataset, config.data.buckets, course),
                config.data.shuffle,
            )
            indices = [sample for _, sample in places]
            if takes_draws(data.dataset):
                keys = [rng.key(config.job.seed, "sample", *place) for place in places]
                batch = data.dataset.train(indices, keys)
            else:
                batch = data.dataset.train(indices)
            tensors = cast_floats(tuple(t.to(DEVICE) for t in batch.inputs), dtype)
            autocast = torch.autocast(
                DEVICE.type, torch.bfloat16, enabled=config.job.precision == "bfloat16-autocast"
            )
            for module, name in zip(modules, definition.names, strict=True):
                with rng.keyed(rng.key(config.job.seed, "forward", step, microbatch, name), DEVICE), autocast:
                    outputs = module(*tensors)
                tensors = cast_floats(outputs if isinstance(outputs, tuple) else (outputs,), dtype)
                if boundaries:
                    tensors = tuple(Boundary.apply(t) for t in tensors)
            with autocast:
                wide = (t.float() if t.dtype == dtype else t for t in tensors)
                targets = tuple(t.to(DEVICE) for t in batch.targets)
                function = loss_beside(modules[-1]) or definition.loss
                loss = function(*wide, *targets)
            share = share_of_targets(function, targets)
            share = torch.ones((), device=DEVICE) if share is None else share
            shares[microbatch] = float(share)
            before = {}
            for module, name in zip(modules, definition.names, strict=True):
                for key in frozen(step + 1, microbatch, name, module):
                    parameter = module.get_parameter(key)
                    before[parameter], parameter.grad = parameter.grad, None
            loss.backward(share.to(loss.dtype) if scale is None else share * scale.value)
            for parameter, gradient in before.items():
                parameter.grad = gradient
            told[microbatch] = float(loss.detach())
        for parameter in (p for module in modules for p in module.parameters() if p.grad is not None):
            if scale is not None:
                parameter.grad /= scale.value
        squares = 0.0
        for module in modules:
            of_layer = 0.0
            for _, p in sorted(module.named_parameters()):
                if p.grad is not None:
                    of_layer += float(torch.linalg.vector_norm(p.grad, dtype=torch.float64)) ** 2
            squares += of_layer
        divisor = sum(shares[microbatch] for microbatch in sorted(shares))
        norm = math.sqrt(squares) / divisor
        clip_norm = config.optimizer.clip_norm
        clip = clip_norm / norm if clip_norm is not None and norm > clip_norm else 1.0
        losses.append(sum(shares[g] * told[g] for g in sorted(told)) / divisor)
        skipped = not math.isfinite(norm)
        scale = None if scale is None else scale.after(skipped=skipped)
        for module, state in zip(modules, states, strict=True):
            if skipped:
                module.zero_grad()
                for name, before in buffers[state.layer].items():
                    state.buffers[name].copy_(before)
                continue
            gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            lr = optimizer.lr(course.along(step)) * leg.lr_factor
            optimizer.update_(state, gradients, clip / divisor, lr)
            module.zero_grad()
    for module, state in zip(modules, states, strict=True):
        for name, buffer in module.named_buffers():  # a forward pass may have put others in their place
            if name in state.buffers:
                state.buffers[name].copy_(buffer)
    return state_digest([digest(s) for s in states]), losses
