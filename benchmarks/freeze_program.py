"""The freeze program: its anchors, and the time of first and second solves beside `scipy.optimize.linprog`.

    python -m benchmarks.freeze_program [--rounds N]

Times are medians over the rounds, in which the kinds of solve alternate. The first time is wall time. The one
in brackets is the processor time of this process, which a busy machine disturbs less. "Each stage its own"
draws F, I and W of a stage from 0.7 to 1.3, the same for all its microbatches, as profiles and monitoring
report them. "Each action its own" varies each action by another 5 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter, process_time

import numpy as np

from benchmarks.parts.reference_freeze_program import reference_solve
from planner.freeze.program import FreezeProgram, FreezeSolution, solve
from planner.ir import Action, ActionKind, Schedule
from planner.schedule.graph import build_graph
from planner.schedule.registry import build
from planner.simulation.simulate import Costs

R_MAX = 0.8
CASES = (("interleaved", 8, 64), ("1f1b", 32, 128), ("interleaved", 32, 128))
EVEN, STAGES, ACTIONS = "all alike", "each stage its own", "each action its own"

Pair = tuple[Costs, Costs]
"""Costs with nothing frozen, and with everything frozen."""
Parts = dict[Action, tuple[float, float]]
"""The time of each action that freezing leaves, and the time that it saves."""


def drawn(schedule: Schedule, how: str, seed: int) -> Parts:
    generator = np.random.default_rng(seed)
    spread = 0.0 if how == EVEN else 0.3
    of_stage = generator.uniform(1 - spread, 1 + spread, (schedule.stages, 3))
    parts: Parts = {}
    for action in build_graph(schedule).actions:
        forward, input_grad, weight_grad = of_stage[action.stage]
        if how == ACTIONS:
            forward, input_grad, weight_grad = of_stage[action.stage] * generator.uniform(0.95, 1.05, 3)
        parts[action] = {
            ActionKind.FORWARD: (forward, 0.0),
            ActionKind.BACKWARD: (input_grad, weight_grad),
            ActionKind.INPUT_GRAD: (input_grad, 0.0),
            ActionKind.WEIGHT_GRAD: (0.0, weight_grad),
        }[action.kind]
    return parts


def drifted(schedule: Schedule, parts: Parts, seed: int) -> Parts:
    """The same parts with F, I and W of every stage changed by up to 1 %."""
    factors = np.random.default_rng(seed).uniform(0.99, 1.01, (schedule.stages, 3))
    return {
        action: (
            fixed * factors[action.stage][0 if action.kind is ActionKind.FORWARD else 1],
            weight * factors[action.stage][2],
        )
        for action, (fixed, weight) in parts.items()
    }


def slowed(schedule: Schedule, parts: Parts, factor: float) -> Parts:
    """The same parts with the middle rank slower by `factor`."""
    slow = schedule.ranks // 2
    return {
        action: (fixed * factor, weight * factor)
        if schedule.rank_of_stage[action.stage] == slow
        else (fixed, weight)
        for action, (fixed, weight) in parts.items()
    }


def costs(parts: Parts, how: str) -> Pair:
    """Costs per kind and stage, as profiles and monitoring report them, or per action if each has its own."""
    longest = {action: fixed + weight for action, (fixed, weight) in parts.items()}
    shortest = {action: fixed for action, (fixed, _) in parts.items()}
    if how == ACTIONS:
        return Costs({}, actions=longest), Costs({}, actions=shortest)
    return Costs(_of_stages(longest)), Costs(_of_stages(shortest))


def _of_stages(seconds: dict[Action, float]) -> dict[ActionKind, tuple[float, ...]]:
    of_kind: dict[ActionKind, dict[int, float]] = {}
    for action, each in seconds.items():
        of_kind.setdefault(action.kind, {})[action.stage] = each
    return {kind: tuple(stages[stage] for stage in sorted(stages)) for kind, stages in of_kind.items()}


class Watch:
    """Collects wall and processor times."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.cpu_s: list[float] = []

    def time(self, work: Callable[[], FreezeSolution]) -> FreezeSolution:
        wall_s, cpu_s = perf_counter(), process_time()
        result = work()
        self.cpu_s.append(process_time() - cpu_s)
        self.wall_s.append(perf_counter() - wall_s)
        return result

    def __str__(self) -> str:
        return f"{median(self.wall_s) * 1e3:.0f} ms ({median(self.cpu_s) * 1e3:.0f})"

    def over(self, other: Watch) -> str:
        """Processor time as a multiple of the other's: the median over rounds."""
        return f"{median(a / b for a, b in zip(self.cpu_s, other.cpu_s, strict=True)):.2f}"


def anchors() -> None:
    upper = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=1)
    lower = Costs.uniform(forward_s=1, input_grad_s=1, weight_grad_s=0)
    print("P=4, M=8, F=I=W=1, r_max 0.8 (makespan 33 -> 23.6; mean ratio gpipe 0.80, 1f1b 0.675):")
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"):
        found = solve(build(name, 4, 8), upper, lower, R_MAX)
        mean = sum(ratio for _, _, ratio in found.ratios) / len(found.ratios)
        print(
            f"  {name:12} {found.unfrozen_s:g} -> {found.solved_s:.6f} (all frozen {found.all_frozen_s:g}),"
            f" mean ratio {mean:.6f}"
        )


def speed(name: str, ranks: int, microbatches: int, how: str, rounds: int) -> None:
    schedule = build(name, ranks, microbatches)
    first, drift, slow_2, slow_10 = Watch(), Watch(), Watch(), Watch()
    for seed in range(rounds):
        parts = drawn(schedule, how, seed)
        given = costs(parts, how)
        first.time(lambda given=given: FreezeProgram(schedule).solve(*given, R_MAX))
        for watch, changed in (
            (drift, drifted(schedule, parts, seed)),
            (slow_2, slowed(schedule, parts, 1.02)),
            (slow_10, slowed(schedule, parts, 1.1)),
        ):
            program = FreezeProgram(schedule)
            program.solve(*given, R_MAX)
            after = costs(changed, how)
            watch.time(lambda program=program, after=after: program.solve(*after, R_MAX))
    print(
        f"  {how}: first {first}; again after a drift of 1 % {drift}, {drift.over(first)} of the first;"
        f" after one rank got 2 % slower {slow_2}, {slow_2.over(first)};"
        f" 10 % slower {slow_10}, {slow_10.over(first)}",
        flush=True,
    )


def beside(name: str, ranks: int, microbatches: int, how: str, *, dense: bool) -> None:
    schedule = build(name, ranks, microbatches)
    given = costs(drawn(schedule, how, 0), how)
    begun_s = process_time()
    ours = solve(schedule, *given, R_MAX)
    ours_s = process_time() - begun_s
    begun_s = process_time()
    makespan_s, freezing = reference_solve(schedule, *given, R_MAX, dense=dense)
    theirs_s = process_time() - begun_s
    total = sum(ratio for _, _, ratio in ours.ratios)
    print(
        f"  {name} P={ranks} M={microbatches} {how}, {'dense' if dense else 'sparse'} linprog:"
        f" makespan {makespan_s:.9g} and {ours.solved_s:.9g} ({abs(ours.solved_s / makespan_s - 1):.1e} apart),"
        f" sum of ratios {freezing:.9g} and {total:.9g} ({abs(total / freezing - 1):.1e} apart);"
        f" processor time {theirs_s:.2f} s and {ours_s:.3f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    anchors()
    for name, ranks, microbatches in CASES:
        print(f"{name}, P={ranks}, M={microbatches}:")
        for how in (EVEN, STAGES, ACTIONS):
            speed(name, ranks, microbatches, how, options.rounds)
    print("Beside scipy.optimize.linprog, the same program:")
    for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"):
        beside(name, 4, 16, ACTIONS, dense=True)
    for how in (EVEN, STAGES, ACTIONS):
        beside("interleaved", 8, 64, how, dense=True)
    beside("1f1b", 32, 128, STAGES, dense=False)


if __name__ == "__main__":
    main()
