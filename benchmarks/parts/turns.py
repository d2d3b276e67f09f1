"""Runs in which successive steps freeze different shares. Settings are compared within one run, step by step,
because the machine's speed drifts between runs by more than the differences that matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.parts.configs import changed
from benchmarks.pipelining import WARM_UP
from planner.freezing import FreezePlan, Ratios
from workers.config import FreezeConfig
from workers.launch.ranks import LaunchedJob

FREEZE = FreezeConfig(method="timelyfreeze", r_max=0.8, warm_up=0, monitoring=2, ramp=2)
"""The shortest phases: plans known beforehand, one per step, say what to freeze."""


def same(job: LaunchedJob, ratio: float) -> Ratios:
    """The same ratio for all layers and microbatches."""
    return ((ratio,) * job.plan.microbatches,) * job.plan.layers[-1][1]


def in_turns(job: LaunchedJob, turns: Sequence[Ratios], rounds: int) -> LaunchedJob:
    """`job` that freezes each of `turns` for one step in turn, `rounds` times, then the first once more."""
    plans = tuple(
        FreezePlan(epoch=1, version=number + 1, ratios=turns[number % len(turns)], start=WARM_UP + 1 + number)
        for number in range(len(turns) * rounds + 1)
    )
    config = changed(job.config, freeze=FREEZE, steps=WARM_UP + len(plans))
    return replace(job, config=config, freeze_plans=plans)
