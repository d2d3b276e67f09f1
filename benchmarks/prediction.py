"""Predicted over measured step time, for every schedule family with and without freezing, and peak memory.

    python -m benchmarks.prediction [--parts real,emulated,memory] [--families ...] [--rounds N] [--cycles N]
                                    [--layer-ms MS]

`real`: two ranks. The machine's speed drifts within a run by more than the simulator's tolerance. So a step
is predicted from the measured costs of the steps just before and after it, with message costs from the
profile. With freezing the run goes through cycles of four steps: nothing frozen, r_max 0.5, everything
frozen, r_max 0.8. So each frozen step stands between the two bounds of its actions (TimelyFreeze eq. 4).
Monte Carlo draws over the profile give the factor by which random variation lengthens a step of expected
times.

`emulated`: eight ranks whose modelled times do not drift, predicted only from the profile. A layer's pass
takes `--layer-ms`. This must be many times the layer's small real computation plus a message, because eight
ranks share the host's cores.
`memory`: the peak of the fullest rank, as predicted from the profile and as counted from storages.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.parts.turns import in_turns, same
from benchmarks.parts.two_rank_job import WARM_UP, make_job, profile_of
from planner.freeze.program import layer_ratios, solve
from planner.freezing import Ratios
from planner.ir import FREEZABLE, Action, ActionKind
from planner.profile import Profile
from planner.schedule.registry import build, families
from planner.simulation.costs import action_costs, bounds
from planner.simulation.monte_carlo import expected_step_s
from planner.simulation.predict import predict
from planner.simulation.simulate import Costs, simulate
from workers.config import EmulatedConfig, ModelConfig
from workers.launch.ranks import LaunchedJob, run_processes
from workers.protocol.reports import TimelineReport

FAMILIES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
R_MAX = (0.5, 0.8)
CYCLE = 4
SAMPLES = 400
Timelines = list[TimelineReport]
"""The timelines of one step, one per rank."""


@dataclass(frozen=True)
class Setting:
    """How much a step freezes, and how much random variation adds to its time."""

    name: str
    r_max: float
    ratios: Ratios
    planned: Mapping[tuple[int, int], float]
    """The ratio of each (stage, microbatch)."""
    by_chance: float
    """The expected step time over the time of a step whose actions all take their expected times."""


def settings_of(job: LaunchedJob, profile: Profile) -> list[Setting]:
    """How much of `job` each of `R_MAX` freezes."""
    settings = []
    for r_max in R_MAX:
        solution = solve(job.schedule, *bounds(profile, job.plan, job.schedule), r_max)
        ratios = layer_ratios(solution.ratios, job.plan)
        expected_s = expected_step_s(profile, job.plan, job.schedule, ratios, SAMPLES, seed=1)
        settings.append(
            Setting(
                name=f"r_max {r_max:g}",
                r_max=r_max,
                ratios=ratios,
                planned={(stage, microbatch): ratio for stage, microbatch, ratio in solution.ratios},
                by_chance=expected_s / predict(profile, job.plan, job.schedule, ratios).step_s,
            )
        )
    return settings


def in_cycles(job: LaunchedJob, settings: Sequence[Setting], cycles: int) -> LaunchedJob:
    """`job` that freezes in turn nothing, the first setting, everything, the second setting, after step 2."""
    return in_turns(job, [same(job, 0.0), settings[0].ratios, same(job, 1.0), settings[1].ratios], cycles)


def measure(job: LaunchedJob) -> list[Timelines]:
    """The timelines of the steps after the warm-up."""
    by_step: dict[int, Timelines] = defaultdict(list)
    for report in run_processes(job).reports:
        if isinstance(report, TimelineReport) and report.step > WARM_UP:
            by_step[report.step].append(report)
    return [by_step[step] for step in sorted(by_step)]


def step_s(step: Timelines) -> float:
    return max(report.step_s for report in step)


def outside_s(step: Timelines) -> float:
    """What a step takes before its first action and after its last: first batch, exchange, commit, update."""
    first_s = min(report.spans[0].start_s for report in step)
    return step_s(step) - (max(report.spans[-1].end_s for report in step) - first_s)


def kind_s(steps: Sequence[Timelines]) -> dict[tuple[ActionKind, int], float]:
    """Mean seconds of each kind of action on each stage. It takes means because a step is a sum of actions,
    whose times are skewed."""
    seen: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for report in itertools.chain.from_iterable(steps):
        for span in report.spans:
            action = Action.parse(span.action)
            seen[action.kind, action.stage].append(span.end_s - span.start_s)
    return {key: mean(times) for key, times in seen.items()}


def simulated_s(
    job: LaunchedJob,
    profile: Profile,
    longest: Sequence[Timelines],
    shortest: Sequence[Timelines] = (),
    planned: Mapping[tuple[int, int], float] | None = None,
) -> float:
    """The simulated window with the costs of `longest`, less what `planned` freezes, down to `shortest`."""
    upper, lower = kind_s(longest), kind_s(shortest)
    actions: dict[Action, float] = {}
    for action in itertools.chain.from_iterable(job.schedule.programs):
        key = (action.kind, action.stage)
        seconds = upper[key]
        if planned is not None and action.kind in FREEZABLE:
            ratio = planned[action.stage, action.index]
            seconds -= ratio * max(0.0, seconds - lower.get(key, 0.0))
        actions[action] = seconds
    messages = action_costs(profile, job.plan, job.schedule).messages
    return simulate(job.schedule, Costs({}, actions=actions, messages=messages)).makespan_s


def unfrozen_ratios(job: LaunchedJob, profile: Profile) -> tuple[list[float], list[float]]:
    """Predicted over measured time of each step, and the measured times, of a run without freezing."""
    steps = measure(job)
    ratios = [
        (simulated_s(job, profile, [before, after]) + mean(map(outside_s, (before, after)))) / step_s(step)
        for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
    ]
    return ratios, [step_s(step) for step in steps]


def frozen_ratios(
    job: LaunchedJob, profile: Profile, settings: Sequence[Setting], cycles: int
) -> dict[str, tuple[list[float], list[float]]]:
    """What `unfrozen_ratios` returns, per setting, of a run in cycles."""
    steps = measure(in_cycles(job, settings, cycles))
    found: dict[str, tuple[list[float], list[float]]] = {each.name: ([], []) for each in settings}
    for number in range(1, len(steps) - 1, 2):
        before, step, after = steps[number - 1 : number + 2]
        setting = settings[number % CYCLE // 2]
        # Everything is frozen in the middle of a cycle: after the first setting, before the second.
        longest, shortest = (before, after) if number % CYCLE == 1 else (after, before)
        window_s = simulated_s(job, profile, [longest], [shortest], setting.planned) * setting.by_chance
        ratios, measured = found[setting.name]
        ratios.append((window_s + mean(map(outside_s, (before, after)))) / step_s(step))
        measured.append(step_s(step))
    return found


def real(names: Sequence[str], rounds: int, cycles: int, folder: Path) -> None:
    """Print predicted over measured step time on two real ranks."""
    profile = profile_of(make_job(names[0], 1, folder))
    for name in names:
        job = make_job(name, CYCLE * cycles + WARM_UP, folder, timeline_every=1)
        settings = settings_of(job, profile)
        ratios: dict[str, list[float]] = defaultdict(list)
        measured: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            found = {"none": unfrozen_ratios(job, profile), **frozen_ratios(job, profile, settings, cycles)}
            for setting, (of_steps, times) in found.items():
                ratios[setting].append(median(of_steps))
                measured[setting] += times
        for setting, of_rounds in ratios.items():
            print(
                f"{name:12} {setting:9} measured {median(measured[setting]):.3f} s/step, predicted over measured"
                f" {median(of_rounds):.3f} ({min(of_rounds):.3f} to {max(of_rounds):.3f})",
                flush=True,
            )


def emulated(names: Sequence[str], cycles: int, layer_s: float, folder: Path) -> None:
    """Print predicted over measured step time on eight emulated ranks, from the profile alone."""
    profile: Profile | None = None
    for name in names:
        job = emulated_job(name, CYCLE * cycles + WARM_UP, layer_s, folder)
        profile = profile or profile_of(job)
        settings = settings_of(job, profile)
        steps = measure(in_cycles(job, settings, cycles))
        expected = {
            "none": (0, predict(profile, job.plan, job.schedule).step_s),
            **{
                each.name: (
                    1 + 2 * index,
                    expected_step_s(profile, job.plan, job.schedule, each.ratios, SAMPLES, seed=1),
                )
                for index, each in enumerate(settings)
            },
        }
        for setting, (turn, predicted_s) in expected.items():
            times = [step_s(step) for step in steps[turn::CYCLE]]
            print(
                f"{name:12} {setting:9} emulated: measured {median(times):.3f} s/step, predicted over measured"
                f" {predicted_s / median(times):.3f}",
                flush=True,
            )


def emulated_job(name: str, steps: int, layer_s: float, folder: Path) -> LaunchedJob:
    """16 layers on eight ranks: a small model whose modelled times are many times its real ones."""
    ranks, family = 8, families()[name]
    job = make_job(
        name,
        steps,
        folder,
        timeline_every=1,
        device="emulated",
        emulated=EmulatedConfig(forward_s=layer_s, input_grad_s=layer_s, weight_grad_s=layer_s),
        model=ModelConfig(family="gpt", layers=14, width=16, heads=2, context=8),
        microbatch_size=1,
    )
    stages = family.stages(ranks, family.default_chunks)
    cuts = [16 * stage // stages for stage in range(stages + 1)]
    plan = replace(
        job.plan,
        layers=tuple(itertools.pairwise(cuts)),
        stage_ranks=family.placement(ranks, family.default_chunks),
    )
    return replace(job, plan=plan, schedule=build(name, ranks, job.plan.microbatches, family.default_chunks))


def memory(names: Sequence[str], folder: Path) -> None:
    """Print predicted over counted peak memory of the fullest rank, on two real ranks."""
    profile = profile_of(make_job(names[0], 1, folder))
    for name in names:
        job = make_job(name, WARM_UP + 2, folder, timeline_every=1)
        counted = run_processes(replace(job, count_memory=True)).memory
        predicted = predict(profile, job.plan, job.schedule).memory.peak_bytes
        peaks = [
            max(each.peak_bytes for each in counted if each.rank == rank) for rank in range(len(predicted))
        ]
        ratios = [ours / theirs for ours, theirs in zip(predicted, peaks, strict=True)]
        print(
            f"{name:12} peak memory: counted {max(peaks) / 1e6:.1f} MB, predicted over counted"
            f" {max(predicted) / max(peaks):.3f}; per rank {', '.join(f'{ratio:.3f}' for ratio in ratios)}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="real,emulated,memory")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=6, help="of four steps each")
    parser.add_argument(
        "--layer-ms", type=float, default=60.0, help="modelled time of a layer's pass (emulated)"
    )
    options = parser.parse_args()
    parts, names = options.parts.split(","), options.families.split(",")
    print(
        f"torch {torch.__version__}; one thread per rank; {options.rounds} rounds of {options.cycles} cycles"
    )
    with tempfile.TemporaryDirectory() as folder:
        if "real" in parts:
            real(names, options.rounds, options.cycles, Path(folder))
        if "emulated" in parts:
            emulated(names, options.cycles, options.layer_ms / 1e3, Path(folder))
        if "memory" in parts:
            memory(names, Path(folder))


if __name__ == "__main__":
    main()
