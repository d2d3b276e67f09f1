"""Memory that one stage keeps of a microbatch, and the most that each of its actions needs while it runs.

Adds up what `layer_memory.py` says of each layer. Knows no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.freezing import Ratios
from planner.ir import ActionKind
from planner.plan import Plan
from planner.profile import LayerProfile, Profile
from planner.simulation.gradient_memory import GradientMemory, gradient_memory
from planner.simulation.layer_memory import layer_memory


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of one stage and one microbatch; tuples are per microbatch."""

    kept: int
    """From the start of its forward on."""
    forward_working: int
    """The most that the forward needs in addition to `kept`."""
    rebuilt: int
    """Memory that the recompute adds to `kept`; 0 if no layer recomputes."""
    recompute_working: int
    input_grad_working: int
    """The most that its input gradient needs in addition to `kept` and `rebuilt`."""
    backward_working: int
    """The same for its backward."""
    weight_grad_working: int
    held: tuple[int, ...]
    """From the end of its input gradient to the end of its weight gradient."""
    gradients: int
    """The sums of its weight gradients, and what is under way of them."""
    keeps_output: bool
    """Whether its forward's output is part of `kept`."""

    def working(self, kind: ActionKind) -> int:
        """The most that an action of `kind` needs while it runs."""
        match kind:
            case ActionKind.FORWARD:
                return self.forward_working
            case ActionKind.RECOMPUTE:
                return self.recompute_working
            case ActionKind.BACKWARD:
                return self.backward_working
            case ActionKind.INPUT_GRAD:
                return self.input_grad_working
            case ActionKind.WEIGHT_GRAD:
                return self.weight_grad_working
            case ActionKind.UPDATE:
                return 0


def stage_memory(
    profile: Profile,
    plan: Plan,
    ratios: Ratios | None,
    microbatches: int,
    frozen_stages: int,
    splits: bool,
    places: Sequence[int],
) -> list[StageMemory]:
    """Per stage of `plan`, what it keeps.

    Args:
        ratios: `ratios[layer][microbatch]`, the frozen share of each weight gradient; None freezes nothing.
        frozen_stages: how many stages only go forward.
        splits: whether weight gradients wait for an action of their own.
        places: by pipeline rank, whose it is.
    """
    layers = profile.model.layers
    recompute = frozenset(plan.recompute)
    of_layer = layer_memory(layers, recompute)
    stages: list[StageMemory] = []
    for stage, (first, stop) in enumerate(plan.layers):
        part, numbers = layers[first:stop], range(first, stop)
        arrives = stage > 0 and plan.stage_ranks[stage - 1] != plan.stage_ranks[stage]
        kept = [
            of_layer[layer].kept + (of_layer[layer].arriving if arrives and layer == first else 0)
            for layer in numbers
        ]
        again = [of_layer[layer].rebuilt for layer in numbers]
        rows = None if ratios is None else ratios[first:stop]
        gradients = gradient_memory(profile, plan, stage, places[plan.stage_ranks[stage]])
        taken = [a + b for a, b in zip(kept, again, strict=True)]
        input_grad_working = _backward_working(layers, first, taken, splits)
        stages.append(
            StageMemory(
                kept=sum(kept),
                forward_working=_working(kept, [_forward_working(layer) for layer in part]),
                rebuilt=sum(again),
                recompute_working=_working(
                    again, [_forward_working(layers[n]) if n in recompute else 0 for n in numbers]
                ),
                input_grad_working=input_grad_working,
                backward_working=_backward_working(layers, first, taken, splits, gradients.forming)
                if gradients.forming
                else input_grad_working,
                weight_grad_working=max(gradients.forming, default=0),
                held=_held(part, rows, microbatches),
                gradients=gradients.under_way + _summed(gradients, rows),
                keeps_output=stage >= frozen_stages
                and stop - 1 not in recompute
                and not layers[stop - 1].released,
            )
        )
    return stages


def _forward_working(layer: LayerProfile) -> int:
    return layer.working_bytes if layer.forward_working_bytes is None else layer.forward_working_bytes


def _working(added: Sequence[int], working: Sequence[int]) -> int:
    """The most memory, beyond the final sum of `added`, while the layers run one after the other."""
    total = sum(added)
    return max(so_far + work - total for so_far, work in zip(accumulate(added), working, strict=True))


def _backward_working(
    layers: Sequence[LayerProfile],
    first: int,
    kept: Sequence[int],
    splits: bool,
    forming: Sequence[int] = (),
) -> int:
    """The most memory, beyond the initial sum of `kept`, during the backward of the layers from `first` on.

    The layers free what they keep, the last one first. If the schedule `splits`, each then holds the inputs of its
    weight gradients.

    Args:
        forming: what each needs beside that while its weight gradients are formed.
    """
    last = first + len(kept) - 1
    received = arriving = 0 if last == len(layers) - 1 else layers[last].boundary_grad_bytes
    live = at_first = peak = sum(kept)
    for layer in range(last, first - 1, -1):
        # The engine keeps the received message until the whole action has ended.
        message = received if layer < last else 0
        before = live + message + arriving
        arriving = layers[layer - 1].boundary_grad_bytes if layer else 0
        live += (layers[layer].weight_grad_hold_bytes if splits else 0) - kept[layer - first]
        after = live + message + arriving
        formed = forming[layer - first] if forming else 0
        at_once = None if splits else layers[layer].backward_working_bytes
        working = layers[layer].working_bytes if at_once is None else at_once
        if layer == len(layers) - 1:
            # What it needs most, it needs while the loss goes back; then the outputs' gradient is left of the loss.
            lossless = before - layers[layer].loss_bytes + layers[layer].loss_input_bytes
            peak = max(peak, max(before, after) + working, max(lossless, after) + formed)
        else:
            peak = max(peak, max(before, after) + working + formed)
    return peak - at_first


def _held(layers: Sequence[LayerProfile], ratios: Ratios | None, microbatches: int) -> tuple[int, ...]:
    if ratios is None:
        return (sum(layer.weight_grad_hold_bytes for layer in layers),) * microbatches
    return tuple(
        round(
            sum(
                layer.weight_grad_hold_bytes * (1.0 - row[index])
                for layer, row in zip(layers, ratios, strict=True)
            )
        )
        for index in range(microbatches)
    )


def _summed(gradients: GradientMemory, ratios: Ratios | None) -> int:
    """The sums of the layers that form any."""
    return sum(
        summed
        for number, summed in enumerate(gradients.summed)
        if ratios is None or any(ratio < 1.0 for ratio in ratios[number])
    )
