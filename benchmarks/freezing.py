"""Real training on two ranks with and without freezing: throughput, validation loss.

    python -m benchmarks.freezing [--quick] [--parts throughput,loss] [--method ...]

`throughput`: in one run, steps with r_max 0.8 alternate with steps that freeze nothing. A ratio compares a
frozen step with its two neighbours; a round's figure is the median ratio.
`loss`: the validation loss after 300 steps with and without freezing, both from scratch and from a trained
model, as in the paper.
`benchmarks.freezing_tables` compares methods and their settings; `benchmarks.monitoring` measures what monitoring
costs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

import torch

from benchmarks.parts.planner_in_process import PlannerInProcess
from benchmarks.parts.turns import in_turns, same
from benchmarks.parts.two_rank_job import WARM_UP, make_job
from planner.freeze.decision import FreezeDecision
from planner.freeze.time_to_accuracy import average_effective_update, kappa, time_to_accuracy_ratio
from planner.freezing import Ratios
from planner.plan import Plan
from workers.config import DataConfig, FreezeConfig, ModelConfig, OptimizerConfig
from workers.launch.ranks import LaunchedJob, run_processes
from workers.protocol.orders import CheckpointRef
from workers.protocol.reports import (
    CheckpointReport,
    FreezeReport,
    FreezeStarted,
    StepReport,
    ValidationReport,
)

Timely = Literal["timelyfreeze", "timelyfreeze+apf", "timelyfreeze+autofreeze"]

SCHEDULE = "1f1b"
JOB = "1f1b, GPT of 4 blocks of width 192, Python's manual, two CPU ranks, one thread each, 8 microbatches of 4 x 64"
NONE = FreezeConfig()
ASKED_RATIO = 1.25
ASKED_LOSS = 0.02
TUNING_LR = 2e-4
"""Peak learning rate when training continues from a trained model: a tenth of that from scratch."""

HYBRIDS: tuple[Timely, ...] = ("timelyfreeze+apf", "timelyfreeze+autofreeze")


@dataclass(frozen=True)
class Trained:
    """One run."""

    freeze: FreezeConfig
    steps: list[StepReport]
    validation_loss: float
    freezes: list[FreezeReport]
    decision: FreezeDecision | None
    solve_s: float
    start: int | None
    """The first step under the solved ratios."""
    checkpoint: CheckpointRef
    """The checkpoint of the last step."""
    plan: Plan

    @property
    def unfrozen(self) -> list[StepReport]:
        """Steps before anything froze, except the first two; only the monitored ones if the run monitored."""
        phases = self.freeze.phases
        if phases is not None:
            return [step for step in self.steps[2:] if phases.warm_up < step.step <= phases.middle]
        last = self.steps[-1].step if self.freeze.method == "none" else self.freeze.warm_up or 0
        return [step for step in self.steps[2:] if step.step <= last]

    @property
    def frozen(self) -> list[StepReport]:
        """Steps with full freezing; for methods without a solution, the second half of the run."""
        phases = self.freeze.phases
        if phases is not None:
            return [step for step in self.steps if step.step > phases.ramp]
        return self.steps[len(self.steps) // 2 :]

    @property
    def kappa(self) -> float:
        return kappa(_step_s(self.frozen), _step_s(self.unfrozen))

    @property
    def p_eff(self) -> float:
        return average_effective_update(
            [step.effective_update for step in self.frozen], [step.gradient_energy for step in self.frozen]
        )

    @property
    def freeze_ratio(self) -> float:
        """Frozen share of weight-gradient time: the mean over the actions of the steps with full freezing."""
        first = self.frozen[0].step
        shares = [
            action.actual for report in self.freezes if report.step >= first for action in report.actions
        ]
        return mean(shares) if shares else 0.0

    @property
    def shares(self) -> Ratios:
        """Per layer and microbatch, the mean share that its stage froze in the steps with full freezing."""
        first, plan = self.frozen[0].step, self.plan
        frozen: dict[tuple[int, int], list[float]] = defaultdict(list)
        for report in self.freezes:
            for action in report.actions if report.step >= first else ():
                frozen[action.stage, action.microbatch].append(action.actual)
        return tuple(
            tuple(mean(frozen[stage, microbatch]) for microbatch in range(plan.microbatches))
            for stage, (begin, end) in enumerate(plan.layers)
            for _ in range(begin, end)
        )


def _step_s(steps: Sequence[StepReport]) -> float:
    return median(step.step_s for step in steps)


def timely(steps: int, r_max: float = 0.8, after: int = 0, method: Timely = "timelyfreeze") -> FreezeConfig:
    """TimelyFreeze, or a hybrid, over `steps` steps that follow `after` earlier ones."""
    warm_up = after + max(3, steps // 10)
    monitoring = warm_up + (10 if steps >= 60 else 4)
    return FreezeConfig(
        method=method,
        r_max=r_max,
        check_every=5,
        apf_threshold=0.5,
        warm_up=warm_up,
        monitoring=monitoring,
        ramp=monitoring + max(1, steps // 10),
    )


def train(
    steps: int, folder: Path, freeze: FreezeConfig, *, lr: float = 2e-3, start: CheckpointRef | None = None
) -> Trained:
    """Train for `steps` more steps and keep what the benchmark compares."""
    last = steps + (start.step if start is not None else 0)
    optimizer = OptimizerConfig(lr=lr, warmup_steps=min(20, steps // 10))
    work = replace(_job(last, folder, optimizer=optimizer, freeze=freeze), start=start)
    planner = PlannerInProcess(work) if freeze.timely else None
    reports = run_processes(work, planner).reports
    losses = [report.loss for report in reports if isinstance(report, ValidationReport)]
    starts = [report.plan.start for report in reports if isinstance(report, FreezeStarted)]
    saved = [report for report in reports if isinstance(report, CheckpointReport)]
    return Trained(
        freeze=freeze,
        steps=[report for report in reports if isinstance(report, StepReport)],
        validation_loss=losses[-1],
        freezes=[report for report in reports if isinstance(report, FreezeReport)],
        decision=planner.decision if planner is not None else None,
        solve_s=planner.solve_s if planner is not None else 0.0,
        start=starts[-1] if starts else None,
        checkpoint=CheckpointRef(path=saved[-1].path, step=saved[-1].step),
        plan=work.plan,
    )


def _job(steps: int, folder: Path, **settings: Any) -> LaunchedJob:
    """The benchmark's job."""
    return make_job(
        SCHEDULE,
        steps,
        Path(tempfile.mkdtemp(dir=folder)),
        model=ModelConfig(family="gpt", layers=4, width=192, heads=4, context=64),
        data=DataConfig(validation_fraction=0.05, validation_batches=16, cache=str(folder / "data")),
        **settings,
    )


@dataclass(frozen=True)
class Beside:
    """Steps of one run in which frozen and unfrozen steps alternate."""

    none_s: Sequence[float]
    """Times of the steps that froze nothing; there is one more of them than of frozen ones."""
    frozen_s: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """For each frozen step, the mean time of its two neighbours over its own."""
        return [
            (before + after) / 2 / frozen
            for before, frozen, after in zip(self.none_s, self.frozen_s, self.none_s[1:], strict=False)
        ]


def take_turns(ratios: Ratios, pairs: int, folder: Path) -> Beside:
    """Run `pairs` steps that freeze `ratios`, each between two that freeze nothing."""
    work = _job(3, folder)
    reports = run_processes(in_turns(work, [same(work, 0.0), ratios], pairs)).reports
    times = [report.step_s for report in reports if isinstance(report, StepReport) and report.step > WARM_UP]
    return Beside(times[::2], times[1::2])


def compare_throughput(rounds: int, pairs: int, folder: Path) -> None:
    """Print how much faster steps with r_max 0.8 are than steps of the same run that freeze nothing."""
    solved = train(20, folder, timely(20))
    assert solved.decision is not None
    assert solved.start is not None
    assert solved.freeze.phases is not None
    late = solved.start - solved.freeze.phases.monitoring - 1
    print(
        f"solved in {solved.solve_s * 1e3:.0f} ms, in effect {late} steps after monitoring; mean ratio"
        f" {mean(solved.decision.solution.mean_per_stage):.3f}, predicted kappa {solved.decision.kappa:.3f}"
    )
    medians: list[float] = []
    for number in range(rounds):
        beside = take_turns(solved.decision.ratios, pairs, folder)
        ratios = beside.ratios
        medians.append(median(ratios))
        print(
            f"round {number + 1}: none {median(beside.none_s) * 1e3:.1f} ms a step, r_max 0.8"
            f" {median(beside.frozen_s) * 1e3:.1f} ms; a frozen step beside its neighbours: {medians[-1]:.3f}"
            f" ({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} steps)",
            flush=True,
        )
    print(
        f"throughput with r_max 0.8 over none: {median(medians):.3f} ({min(medians):.3f} to {max(medians):.3f});"
        f" asked: at least {ASKED_RATIO}",
        flush=True,
    )


def compare_loss(steps: int, folder: Path, method: Timely) -> None:
    """Print how freezing changes the validation loss, from scratch and then from the model trained so."""
    none = train(steps, folder, NONE)
    _print_losses(f"{steps} steps from scratch", none, train(steps, folder, timely(steps, method=method)))
    base = none.checkpoint
    more = train(steps, folder, NONE, lr=TUNING_LR, start=base)
    frozen = train(steps, folder, timely(steps, after=base.step, method=method), lr=TUNING_LR, start=base)
    _print_losses(
        f"{steps} steps more, from that model (validation loss {none.validation_loss:.4f})", more, frozen
    )


def _print_losses(what: str, none: Trained, frozen: Trained) -> None:
    apart = frozen.validation_loss / none.validation_loss - 1
    ratio = time_to_accuracy_ratio(frozen.kappa, frozen.p_eff)
    whole_s = [sum(step.step_s for step in run.steps) for run in (none, frozen)]
    print(
        f"{what}: validation loss none {none.validation_loss:.4f}, r_max 0.8 {frozen.validation_loss:.4f},"
        f" {apart:+.2%} (asked: within {ASKED_LOSS:.0%}); {whole_s[0]:.1f} s and {whole_s[1]:.1f} s; kappa"
        f" {frozen.kappa:.3f}, p_eff {frozen.p_eff:.3f}, predicted time to accuracy {ratio:.3f}; frozen share of"
        f" weight-gradient time {frozen.freeze_ratio:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the steps: shows that it works, not how well"
    )
    parser.add_argument("--parts", default="throughput,loss")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--method", default="timelyfreeze", choices=("timelyfreeze", *HYBRIDS), help="of the part `loss`"
    )
    options = parser.parse_args()
    parts = options.parts.split(",")
    unknown = [part for part in parts if part not in ("throughput", "loss")]
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; there are throughput and loss")
    pairs = 3 if options.quick else 20
    print(f"torch {torch.__version__}; {JOB}")
    with tempfile.TemporaryDirectory() as folder:
        if "throughput" in parts:
            compare_throughput(1 if options.quick else options.rounds, pairs, Path(folder))
        if "loss" in parts:
            compare_loss(30 if options.quick else 300, Path(folder), options.method)


if __name__ == "__main__":
    main()
