"""One rank's freezing in one generation: which masks its layers get, and what of it goes through a commit.

Everything that it decides follows from the seed, the log of freeze plans and the layers' state, never from the
partition. While the method is `none` it leaves everything as it is. A freeze plan may carry other settings than the
job's spec: they change between two steps, on all ranks between the same two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from planner.freezing import (
    AUTO,
    REFERENCE_AT,
    REFERENCE_EVERY,
    FreezePlan,
    Phase,
    Weights,
    is_reference,
    prefix_rule,
)
from workers.commit.commit import CommitDecision, Prepared
from workers.commit.freezing_scores import Energy
from workers.config import FreezeConfig
from workers.freezing.checks import CheckFindings, Checks
from workers.freezing.energy import estimate
from workers.freezing.mask import NOTHING, Chance, LayerParameters, Mask, draw
from workers.freezing.plans import FreezePlans, FreezeSettings
from workers.freezing.prefix.rule import CommitSeen
from workers.freezing.prefix.rules import rule_of
from workers.freezing.ratios import ALWAYS, NEVER, Budgets, phases_of
from workers.freezing.stability import make_metric
from workers.freezing.stable_layers import StableLayers, flags_of
from workers.freezing.tally import Tally
from workers.protocol.frozen_prefix import FrozenPrefix
from workers.protocol.reports import FreezeReport, FreezeStarted, FrozenCounts
from workers.state.layer_state import LayerState
from workers.transport.channel import Channel


def begin_statistics(config: FreezeConfig, state: LayerState) -> None:
    """Give a layer the freezing statistics that the method keeps, as they are before its first step."""
    state.freezing = {}
    if config.method == "none":
        return
    parameters = LayerParameters.of(state)
    metric = make_metric(config)
    state.freezing = {"energy": torch.zeros(len(parameters.names), dtype=torch.float64)}
    if metric is not None:
        state.freezing |= metric.begin(state, parameters)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Sizes of the job, and this rank's part in it."""

    seed: int
    rank: int
    microbatches: int
    """Per replica."""
    replicas: int
    layers: int
    """Number of layers of the whole model."""
    passes: int | None = None
    """Microbatches that the rank's pipeline executes in a step; None: those of one replica."""
    stages: Mapping[int, tuple[int, ...]]
    """The rank's stages -> their layers."""


class Freezer:
    """The freezing of a rank's layers. Per step: `begin`, masks, then `check`, `energies` and `bring` for the commit
    record, then `commit`.

    Masks are of whole layers. Statistics are of the parameters whose states the rank keeps, and so are its findings:
    where siblings share out states, the commit puts theirs together.

    Args:
        states: of the layers that the rank holds, or of its shards of them, live.
        parameters: of the whole layers.
        plans: whose start is known; those taken up are added.
        step: the last step committed.

    Raises:
        JobError: the phases were not resolved.
    """

    def __init__(
        self,
        config: FreezeConfig,
        extent: Extent,
        states: Mapping[int, LayerState],
        parameters: Mapping[int, LayerParameters],
        plans: FreezePlans,
        step: int,
    ) -> None:
        self._settings = FreezeSettings(config, plans)
        self._extent = extent
        self._states = states
        self._own = {layer: LayerParameters.of(state) for layer, state in states.items()}
        """The parameters of the states."""
        self._plans = plans
        self._unmeasured = dict(parameters)
        self._parameters = dict(self._unmeasured)
        """Parameters by layer, weighed by the plan in force. Live."""
        self._weights: Weights = ()
        self._tally = Tally(
            extent.rank,
            extent.microbatches,
            extent.stages,
            self._parameters,
            passes=extent.microbatches if extent.passes is None else extent.passes,
        )
        self._channel: Channel | None = None
        self._step = step
        self._chances: dict[int, tuple[Chance, ...]] = {}
        self.prefix = 0
        """Layers, from the input up, that the step which has begun freezes as a whole."""
        self._thawed = False
        self.stable_prefix = 0
        """Layers, from the input up, that AutoFreeze found stable at the newest commit."""
        self._energies: dict[int, list[float]] = {}
        self._brought: FreezePlan | None = None
        self._install(self._settings.at(step + 1))

    def _install(self, config: FreezeConfig) -> None:
        """Follow the section `config` from the next step on."""
        self._config = config
        self._on = config.method != "none"
        self._checks = Checks(config, self._states, self._own)
        self._phases = phases_of(config)
        unfrozen = self._phases.middle if self._phases is not None else config.warm_up
        self._unfrozen_until = (unfrozen or 0) if "warm_up" in config.used else 0
        self._hybrid = self._phases is not None and make_metric(config) is not None
        self._stable = StableLayers(self._extent.layers)
        self._budgets = Budgets(
            self._phases,
            self._plans,
            hybrid=self._hybrid,
            by_layer=config.r_max == AUTO,
            shares=self._stable.shares,
        )
        self._weights = ()
        self._parameters.update(self._unmeasured)
        self._energies = {}

    def meet(self, channel: Channel) -> None:
        """Learn what is stable on the other ranks; all ranks call it, before their first step."""
        self._channel = channel
        if self._checks.on:
            mine = {
                layer: (held, flags_of(held, self._checks.stable(layer)))
                for layer, held in self._unmeasured.items()
            }
            self._stable.meet(channel, mine)

    def begin(self, step: int, prefix: FrozenPrefix | None = None) -> None:
        """Begin `step` (1 is the job's first), which freezes the layers of `prefix` as a whole; None: none."""
        self._step, self.prefix = step, 0 if prefix is None else prefix.layers
        self._thawed = prefix is not None and prefix.thawed
        if (config := self._settings.at(step)) != self._config:
            self._install(config)
            if self._channel is not None:  # all ranks are here: they follow the same plans
                self.meet(self._channel)
        if self._on:
            plan = self._plans.at(step)
            self._weigh(() if plan is None else plan.weights)
            microbatches = self._extent.microbatches
            self._chances = {layer: self._chances_of(step, layer, microbatches) for layer in self._states}

    def _chances_of(self, step: int, layer: int, microbatches: int) -> tuple[Chance, ...]:
        if layer < self.prefix:
            return (ALWAYS,) * microbatches
        if self._is_reference(step) or (self._phases is None and (self._thawed or self._only_prefix)):
            return (NEVER,) * microbatches
        return self._budgets.chances(step, layer, microbatches)

    def _weigh(self, weights: Weights) -> None:
        """Weigh all parameters as the plan in force does."""
        if weights == self._weights:
            return
        self._weights = weights
        for layer, held in self._unmeasured.items():
            self._parameters[layer] = held.weighed(weights[layer]) if weights else held
        if self._hybrid:
            self._stable.follow(weights)

    def mask(self, layer: int, microbatch: int) -> Mask:
        """Draw the mask of `layer` in the step's (global) `microbatch`."""
        if not self._on:
            return NOTHING
        mask = draw(
            self._parameters[layer],
            self._stable.names[layer],
            self._chances[layer][microbatch % self._extent.microbatches],
            seed=self._extent.seed,
            step=self._step,
            microbatch=microbatch,
        )
        self._tally.note(layer, microbatch, mask)
        return mask

    def check(self) -> tuple[CheckFindings, dict[int, int]]:
        """For the commit record: what a stability check finds, if one is due, and in the form of `flags_of` which
        parameters it calls stable, by layer."""
        found = self._checks.look(self._step)
        return found, {
            layer: flags_of(self._unmeasured[layer], names) for layer, names in found.stable.items()
        }

    def energies(self, squared_norms: Mapping[tuple[int, str], float]) -> dict[int, dict[str, Energy]]:
        """For the commit record: per layer and parameter, the energy of the summed gradient as if nothing were frozen,
        and the part of it let through.

        Args:
            squared_norms: of the summed gradients, by (layer, parameter); without those that were not formed, and
                those that count elsewhere.
        """
        found: dict[int, dict[str, Energy]] = {}
        for layer, held in self._own.items() if self._on else ():
            formed = {
                name: norm for name in held.names if (norm := squared_norms.get((layer, name))) is not None
            }
            energies = estimate(
                held,
                self._stable.names[layer],
                self._chances[layer] * self._extent.replicas,
                formed,
                self._states[layer].freezing["energy"].tolist(),
            )
            self._energies[layer] = [energy for energy, _ in energies]
            found[layer] = dict(zip(held.names, energies, strict=True))
        return found

    @property
    def on(self) -> bool:
        """Whether the job freezes at all, in the step that has begun."""
        return self._on

    @property
    def newest_energies(self) -> Mapping[int, Sequence[float]]:
        """The energies that `energies` found, per layer and parameter."""
        return self._energies

    def bring(self, prepared: FreezePlan | None) -> Prepared | None:
        """For the commit record: the plan that is ready, once all plans with a known start have begun."""
        self._brought = prepared if self._plans.all_begun(self._step) else None
        plan = self._brought
        return None if plan is None else (*plan.key, plan.digest)

    @property
    def newest(self) -> tuple[int, int] | None:
        """Epoch and version of the newest plan that is followed, or will be."""
        return self._plans.newest

    def commit(self, decision: CommitDecision) -> list[FreezeReport | FreezeStarted]:
        """Take over what the step found and what the ranks agreed on; what is to be reported."""
        self.stable_prefix = prefix = self._checks.accept(decision.scores)
        self._stable.accept(decision.stable, prefix)
        if not decision.skipped:
            for layer, energies in self._energies.items():
                self._states[layer].freezing["energy"].copy_(torch.tensor(energies, dtype=torch.float64))
        reports: list[FreezeReport | FreezeStarted] = []
        if self._counting:
            frozen = self._tally.commit(self._step)
            freezes = self._on and (self._step > self._unfrozen_until or self.prefix > 0)
            if freezes or self._plans.controlled(self._step):
                reports.append(frozen)
        if decision.adopt is not None:
            assert self._brought is not None
            started = self._plans.adopt(self._brought, decision.step + 1)
            if self._extent.rank == 0:
                reports.append(FreezeStarted(plan=started))
        if self.changes_method:
            # Now: this step's state already has what the next step's method keeps, wherever it is sent or saved.
            for state in self._states.values():
                begin_statistics(self._settings.at(decision.step + 1), state)
        return reports

    @property
    def changes_method(self) -> bool:
        """Whether the step after the one that has begun follows another method, as far as is known: all layers begin
        other statistics then."""
        return self._settings.at(self._step + 1).method != self._config.method

    def counts(self) -> FrozenCounts | None:
        """Passes in which each parameter was frozen, over the steps committed; None where nothing ever is."""
        return self._tally.counts(self._step) if self._counting else None

    @property
    def _counting(self) -> bool:
        """Whether the job freezes, or has frozen: a log needs the counts of every step from the first one on."""
        return self._settings.spec.method != "none" or self._plans.controlled(self._step)

    def prefix_after(self, prefix: FrozenPrefix, seen: CommitSeen) -> FrozenPrefix:
        """The prefix of the step after `seen`, which followed `prefix`; call `commit` before."""
        following = self._settings.at(seen.step + 1)
        rule = rule_of(following, self._extent.layers)
        if rule is None:
            return FrozenPrefix()
        if prefix_rule(following.method) != prefix_rule(self._settings.at(seen.step).method):
            first = rule.first()
            return replace(first, since=seen.step + 1) if first.since else first
        return rule.after(prefix, replace(seen, stable=self.stable_prefix))

    @property
    def masks(self) -> bool:
        """Whether gradients above the prefix may be left out, too, by a freeze program."""
        return self._phases is not None

    @property
    def _only_prefix(self) -> bool:
        """Whether all that is frozen, apart from what a freeze program says, is frozen as a whole."""
        return self._config.by_prefix and not self._checks.on

    @property
    def frozen_mode(self) -> Literal["train", "eval"]:
        """Mode of the layers below the prefix."""
        return self._config.frozen_mode

    def may_freeze(self, step: int) -> bool:
        """Whether something, on any rank, may be frozen in `step`."""
        if self.prefix:
            return True
        return self._on and step > self._unfrozen_until and not self._is_reference(step)

    def _is_reference(self, step: int) -> bool:
        return is_reference(step, self._phases, self._config.r_max)

    def tells_energies(self, step: int) -> bool:
        """Whether the gradients of `step` say what freezing a layer would cost: above the prefix all are formed."""
        if self._phases is None and self._only_prefix:
            return True
        return self._phases is not None and (self._phases.of(step) is Phase.UPPER or self._is_reference(step))

    def timed(self, step: int) -> bool:
        """Whether `step` is monitored, or tells what a choice of the method, or a program above a prefix, goes by."""
        if self._phases is not None and self._phases.warm_up < step <= self._phases.monitoring:
            return True
        plan, method = self._plans.at(step), self._settings.at(step).method
        control = None if plan is None else plan.control
        # A prefix may thaw: what its layers are worth then, these steps tell.
        asks = (
            method == AUTO or (control is not None and control.chosen) or (self.masks and self._only_prefix)
        )
        return asks and step % REFERENCE_EVERY == REFERENCE_AT and self.tells_energies(step)
