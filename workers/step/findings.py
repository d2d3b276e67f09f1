"""Statistics that a rank takes of a step's gradients once they are final, for the commit record."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.commit.freezing_scores import Energy, Moves, total_of
from workers.freezing.freezer import Freezer
from workers.step.generation import GenerationSetup
from workers.step.minibatch import Minibatch


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Statistics by layer: the fields of `CommitRecord` with these names. Empty where a sibling tells the same."""

    squared_norms: dict[int, float] = field(default_factory=dict)
    parameter_norms: dict[int, dict[str, float]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    moves: dict[int, dict[str, Moves]] = field(default_factory=dict)
    settled: dict[int, int] = field(default_factory=dict)
    energies: dict[int, Energy] = field(default_factory=dict)
    parameter_energies: dict[int, dict[str, Energy]] = field(default_factory=dict)


def look(setup: GenerationSetup, minibatch: Minibatch, freezer: Freezer) -> Findings:
    """Look at the gradients of the step at hand, and check what is stable if that is due."""
    norms = minibatch.norms()
    checked, settled = freezer.check()
    energies = freezer.energies(norms)
    of_layers = dict.fromkeys(setup.layers, 0.0)
    of_parameters: dict[int, dict[str, float]] = {layer: {} for layer in setup.layers}
    for (layer, name), norm in norms.items():
        of_layers[layer] += norm
        of_parameters[layer][name] = norm
    if setup.plan.shards > 1:
        return Findings(
            parameter_norms=of_parameters,
            scores=checked.scores,
            moves=checked.moves,
            settled=settled,
            parameter_energies=energies,
        )
    if setup.pipeline != 0:
        return Findings()
    return Findings(
        squared_norms=of_layers,
        scores=checked.scores,
        moves=checked.moves,
        settled=settled,
        energies={layer: total_of(of_layer.values()) for layer, of_layer in energies.items()},
    )
