"""When and how much is frozen: TimelyFreeze's phases and a table of ratios. A leaf: values only, no solver.

Ratios are shares of measured weight-gradient time. A table holds one per (layer, microbatch of a replica), so its
meaning does not depend on the partition.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

from planner.wording import counted

Ratios = tuple[tuple[float, ...], ...]
"""`ratios[layer][microbatch]`, each in [0, 1]."""
Weights = tuple[tuple[tuple[str, int], ...], ...]
"""`weights[layer]`: (matrix, nanoseconds that its gradient of one microbatch was measured to take)."""


AUTO = "auto"
"""In place of a budget: freeze what makes the time to a given accuracy least."""
Budget = float | Literal["auto"]
"""The largest mean freeze ratio of a stage, in [0, 1], or `AUTO`."""


class Phase(StrEnum):
    """The purpose of a step (TimelyFreeze, section 3)."""

    WARM_UP = "warm_up"
    """t <= T_w: nothing is frozen, nothing recorded."""
    UPPER = "upper"
    """T_w < t <= (T_w + T_m) / 2: nothing is frozen; the longest times are recorded."""
    LOWER = "lower"
    """(T_w + T_m) / 2 < t <= T_m: everything is frozen; the shortest times are recorded."""
    RAMP = "ramp"
    """T_m < t <= T_f: ratios grow (eq. 9)."""
    STABLE = "stable"
    """t > T_f."""


APF_EVERY = 4
"""APF looks at every so many scalars of a parameter: its score is a mean over them."""
APF_WHOLE = 1024
"""Scalars up to which it looks at all of a parameter."""


def keeps_statistics(method: str) -> bool:
    """Whether a freezing method keeps numbers about the weights, some four bytes for each."""
    return method.endswith(("apf", "autofreeze"))


def apf_stride(scalars: int) -> int:
    """Stride of the scalars that APF looks at in a parameter with so many, from the first on."""
    return 1 if scalars <= APF_WHOLE else APF_EVERY


def looked_at(statistics: Collection[str], scalars: int) -> int:
    """Number of a parameter's scalars that a method with these statistics per layer looks at (see
    `workers.freezing.stability`)."""
    return -(-scalars // apf_stride(scalars)) if "trend" in statistics else scalars


def statistics_scalars(method: str, scalars: int) -> int:
    """Number of 32-bit values that a freezing method keeps of a parameter with so many scalars: AutoFreeze its values
    at the last check, APF those that it looks at and their two averages."""
    if method.endswith("autofreeze"):
        return scalars
    return 3 * -(-scalars // apf_stride(scalars)) if method.endswith("apf") else 0


REFERENCE_EVERY, REFERENCE_AT = 20, 11
"""With `AUTO`, of every so many steps this one freezes nothing, to be compared with those around it: a machine's pace
changes over a job. Not a round number, as steps with timelines are."""


def has_program(method: str) -> bool:
    """Whether the ratios of a freezing method come from the freeze program."""
    return method == AUTO or method.startswith("timelyfreeze")


_PREFIX_RULES = {
    "pipetransformer": "pipetransformer",
    "prefix": "prefix",
    "autofreeze": "autofreeze",
    "timelyfreeze+pipetransformer": "pipetransformer",
    "timelyfreeze+prefix": "prefix",
}


def prefix_rule(method: str) -> str | None:
    """The method by whose rule a freezing method freezes layers as a whole, from the input up; None: by none. A hybrid
    of the freeze program has its ratios above that prefix."""
    return _PREFIX_RULES.get(method)


def works_above_prefix(method: str) -> bool:
    """Whether a freezing method is a hybrid of the freeze program above a prefix."""
    return has_program(method) and prefix_rule(method) is not None


def budget_text(r_max: Budget) -> str:
    """A budget in words."""
    return r_max if isinstance(r_max, str) else f"{r_max:g}"


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The last step of warm-up, monitoring and progressive freezing: T_w, T_m, T_f. Step 1 is a job's first.

    Raises:
        ValueError: the phases are out of order.
    """

    warm_up: int
    monitoring: int
    ramp: int

    def __post_init__(self) -> None:
        if not 0 <= self.warm_up < self.monitoring <= self.ramp or self.monitoring - self.warm_up < 2:
            raise ValueError(
                f"phases must come in order, 0 <= warm_up < monitoring <= ramp, with two steps of monitoring at"
                f" least; got warm_up = {self.warm_up}, monitoring = {self.monitoring}, ramp = {self.ramp}"
            )

    @property
    def middle(self) -> int:
        """Last step of the upper-bound half. Algorithm 1 says T_m / 2; section 3.1 means the middle of the phase."""
        return (self.warm_up + self.monitoring) // 2

    def of(self, step: int) -> Phase:
        """The phase of `step`."""
        if step <= self.warm_up:
            return Phase.WARM_UP
        if step <= self.middle:
            return Phase.UPPER
        if step <= self.monitoring:
            return Phase.LOWER
        return Phase.RAMP if step <= self.ramp else Phase.STABLE

    def share(self, step: int) -> float:
        """The share of a ratio that applies at `step` > T_m: AFR / r of eq. 9, in (0, 1]."""
        if self.ramp == self.monitoring:
            return 1.0
        return min(1.0, (step - self.monitoring) / (self.ramp - self.monitoring))


def is_reference(step: int, phases: Phases | None, r_max: Budget) -> bool:
    """Whether `step`, which may freeze by its phase, freezes nothing so that its time can be compared."""
    if r_max != AUTO or phases is None or step % REFERENCE_EVERY != REFERENCE_AT:
        return False
    return phases.of(step) in (Phase.RAMP, Phase.STABLE)


@dataclass(frozen=True, kw_only=True)
class FreezeOverrides:
    """The freeze settings that a request gave a running job in place of its spec's."""

    method: str
    """A `freeze.method`."""
    r_max: Budget
    alpha: float | None = None
    """PipeTransformer's; None: as it was."""
    prefix: int | None = None
    """Layers that the method `prefix` freezes; None: as it was."""
    least_update: float | None = None
    """With `AUTO`, the least share of a step's progress that is to be left; None: as it was."""
    phases: Phases | None = None
    """Counted from the step before `since`; None for a method without a freeze program."""
    since: int | None = None
    """Step 1 of the phases; None: the plan's own start."""
    solved: bool = False
    """Whether the plan's ratios are the freeze program's, rather than zeros until it is solved."""
    chosen: bool = False
    """Whether the job chose the method itself, and goes on choosing."""

    @property
    def chooses(self) -> bool:
        """Whether the job chooses its method itself, now and again."""
        return self.chosen or self.method == AUTO

    @property
    def named(self) -> str:
        """The method with its setting, in words."""
        named, settings = self.method, dict[str, str]()
        if has_program(self.method) and self.method != AUTO:
            settings["r_max"] = budget_text(self.r_max)
        if has_program(self.method) and self.least_update is not None and self.r_max == AUTO:
            settings["least_update"] = f"{self.least_update:g}"
        rule = prefix_rule(self.method)
        if rule == "pipetransformer" and self.alpha is not None:
            settings["alpha"] = f"{self.alpha:g}"
        if rule == "prefix" and self.prefix is not None:
            named = f"{named} of {counted(self.prefix, 'layer')}"
        with_settings = " and ".join(f"{key} = {value}" for key, value in settings.items())
        return f"{named} with {with_settings}" if settings else named


@dataclass(frozen=True, kw_only=True)
class FreezePlan:
    """Expected freeze ratios, which the planner proposes and all ranks adopt at one commit."""

    epoch: int
    """Incarnation of the controller that issued the plan; with `version` it orders plans."""
    version: int
    ratios: Ratios
    stages: tuple[tuple[int, int], ...] = ()
    """Layer ranges [first, stop) for which the program solved budgets. A hybrid method distributes each budget over the
    layers of its range, by how stable they are (Algorithm 2). Empty: each layer has its own budget."""
    weights: Weights = ()
    """The times of which ratios are shares: masks and the budgets of hybrids use them. Integers, so that a log restores
    them to the bit. Empty without a measurement: then a matrix's number of scalars stands for its time."""
    control: FreezeOverrides | None = None
    """The settings from the start on, if a request changed them; None: those of the spec."""
    start: int | None = None
    """The first step that follows this plan; None until the commit that adopts it."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of `[freeze]` that this plan, which has started, replaces."""
        control = self.control
        if control is None:
            return {}
        assert self.start is not None, "a plan without a start replaces nothing yet"
        before, phases = (control.since or self.start) - 1, control.phases
        prefix = {} if control.prefix is None else {"prefix": control.prefix, "schedule": ()}
        return {
            **prefix,
            # It thaws when the job chooses again.
            **({"thaw": "never"} if control.chosen else {}),
            **({} if control.alpha is None else {"alpha": control.alpha}),
            **({} if control.least_update is None else {"least_update": control.least_update}),
            "method": control.method,
            "r_max": control.r_max,
            "warm_up": before if phases is None else before + phases.warm_up,
            "monitoring": None if phases is None else before + phases.monitoring,
            "ramp": None if phases is None else before + phases.ramp,
        }

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of all fields but `start`: ranks compare it at every commit before they adopt a plan."""
        return hashlib.sha256(replace(self, start=None).to_json().encode()).hexdigest()

    @property
    def key(self) -> tuple[int, int]:
        """Epoch and version: ranks adopt only plans of a higher key than they follow."""
        return self.epoch, self.version

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)
