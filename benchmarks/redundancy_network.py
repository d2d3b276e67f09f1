"""What each redundancy costs on a slow link, whether the planner knows, and what `redundancy = "auto"` takes there.

    python -m benchmarks.redundancy_network [--mbit N] [--rounds N] [--steps N] [--every K ...] [--undone N ...]

Two CPU ranks of one thread train a GPT of 8 layers, width 256, in two network namespaces over one shaped link. The
planner's profile is measured there, over that link. Then each round trains without copies, with copies that follow each
step, and with a snapshot every K steps. A step is the mean after the first ones; of snapshots over whole turns. At 1
Gbit/s the kernel's shaping itself takes much of the two cores: a send of 0.5 MB holds its caller for 3.9 ms. It needs
root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from benchmarks.parts.linked_rank import join, post
from benchmarks.parts.settled_job import without_plan
from benchmarks.parts.shaped_link import ADDRESSES, INTERFACE, ShapedLink
from benchmarks.parts.targets import at_most
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import first_plan, unmeasured_plan
from orchestrator.prepare.settling import Settled, with_plan
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.codec import from_json, to_json
from planner.plan import Plan
from planner.profile import Profile
from planner.schedule.registry import build
from workers.config import DataConfig, ElasticConfig, ModelConfig, OptimizerConfig, WorkerConfig
from workers.launch.ranks import LaunchedJob, assignment
from workers.profiling.measured import Measured, combine
from workers.protocol.reports import Report, StandbyReport, StepReport
from workers.rank import Rank

SECRET = b"benchmark"
WARM_UP = 3
"""Steps at the beginning of a run that no figure counts."""
CLOSE = 0.10
"""Of the measured step over that of the same round without copies, by which a prediction may be off: the machine's own
speed changes between the profile and the rounds."""
MEASURED = TypeAdapter(Measured)


def job(folder: Path, steps: int, elastic: Mapping[str, Any]) -> tuple[Spec, ModelOutline]:
    """The job with these keys of `[elastic]`, and the outline of its model."""
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(4000)))
    spec = Spec(
        job=JobConfig(name="copies", output=str(folder / "run"), steps=steps, sample_tokens=0),
        model=ModelConfig(family="gpt", layers=8, width=256, heads=4, context=128),
        data=DataConfig(source="text", path=str(text)),
        optimizer=OptimizerConfig(clip_norm=None),
        pipeline=PipelineConfig(
            ranks=2, microbatches=8, microbatch_size=4, partition=(5, 5), schedule="1f1b"
        ),
        cluster=ClusterConfig(device="cpu", address="local"),
        elastic=ElasticConfig.model_validate(dict(elastic)),
    )
    return without_plan(spec)


def side(place: int, work: Path) -> None:
    """Run one rank: it measures, or trains to the end, and says so on standard output."""
    told = json.loads(work.read_text())
    config, plan = WorkerConfig.model_validate(told["config"]), from_json(Plan, told["plan"])
    job = LaunchedJob(config, plan, build(plan.schedule, plan.pipeline_ranks, plan.microbatches, plan.chunks))

    def take(report: Report) -> None:
        if isinstance(report, StepReport):
            post(step=report.step, committed_s=report.committed_s)
        if isinstance(report, StandbyReport):
            post(current=report.step)

    rank = Rank(config, place, take, secret=SECRET, host=ADDRESSES[place])
    rank.setup()
    if not told["measure"]:
        rank.follow(assignment(job, place))
    join(rank, place)
    if told["measure"]:
        post(measured=MEASURED.dump_json(rank.profile()).decode())
    else:
        rank.train()
    post(done=place)
    input()  # the other rank's last collective may still be running
    rank.close()


def on_link(
    link: ShapedLink, folder: Path, resolved: Settled, *, measure: bool
) -> list[list[dict[str, Any]]]:
    """What both ranks say, by place."""
    work = folder / "work.json"
    config = resolved.config.model_dump(mode="json")
    work.write_text(
        json.dumps({"config": config, "plan": to_json(resolved.plan).decode(), "measure": measure})
    )
    sides = [
        link.start(
            place,
            [
                sys.executable,
                "-m",
                "benchmarks.redundancy_network",
                "--side",
                str(place),
                "--work",
                str(work),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"},
        )
        for place in range(2)
    ]
    said: list[list[dict[str, Any]]] = [[], []]

    def hear(place: int, key: str) -> dict[str, Any]:
        stdout = sides[place].stdout
        assert stdout is not None
        for line in stdout:
            said[place].append(json.loads(line))
            if key in said[place][-1]:
                return said[place][-1]
        raise RuntimeError(f"rank {place} ended before it said {key!r}; see its error above")

    def tell(message: Mapping[str, Any]) -> None:
        for process in sides:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    tell(hear(0, "store"))
    for place in range(2):
        hear(place, "done")
    tell({})
    for process in sides:
        process.wait()
    return said


def profile_over(link: ShapedLink, folder: Path, steps: int) -> Profile:
    """The job's profile, as measured over the link."""
    spec, found = job(folder, steps, {})
    made = with_plan(spec, found, unmeasured_plan(spec, found), epoch=1)
    said = on_link(link, folder, made, measure=True)
    measured = [next(each["measured"] for each in of_one if "measured" in each) for of_one in said]
    profile = combine([MEASURED.validate_json(each) for each in measured], made.config)
    return replace(profile, key="measured", source="over the link")


def steps_of(said: Sequence[dict[str, Any]], every: int) -> tuple[float, int | None]:
    """(the mean step after the first ones, over whole turns of `every` steps; the step at which copies were there)."""
    committed_s = {each["step"]: each["committed_s"] for each in said if "step" in each}
    current = next((each["current"] for each in said if "current" in each), None)
    last = max(committed_s)
    first = last - (last - WARM_UP) // every * every
    return (committed_s[last] - committed_s[first]) / (last - first), current


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=1000.0, help="rate of the link, each way")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=19)
    parser.add_argument("--every", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--undone", type=int, nargs="*", default=[0, 15])
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        side(options.side, options.work)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        print("left out: making network namespaces needs root, and the programs ip and tc")
        return
    modes: dict[str, dict[str, Any]] = {
        "none": {"redundancy": "checkpoint"},
        "each step": {"redundancy": "peer"},
    }
    modes |= {f"every {k} steps": {"redundancy": "peer", "copy_every": k} for k in options.every}
    print(f"two CPU ranks of one thread, {options.mbit:g} Mbit/s, {options.steps} steps")
    with tempfile.TemporaryDirectory() as name, ShapedLink(options.mbit) as link:
        folder = Path(name)
        profile = profile_over(link, folder, options.steps)
        there = profile.cluster.links[0][1]
        assert there is not None
        print(f"the profile's link: {there.bytes_per_s * 8e-6:.0f} Mbit/s, {there.latency_s * 1e3:.2f} ms")
        made: dict[str, Settled] = {}
        predicted_s: dict[str, float] = {}
        for mode, elastic in modes.items():
            spec, found = job(folder, options.steps, elastic)
            choice = first_plan(spec, profile)
            made[mode] = with_plan(spec, found, choice.plan, epoch=1)
            predicted_s[mode] = choice.prediction.step_s
        taken_s: dict[str, list[float]] = {mode: [] for mode in modes}
        names = list(modes)
        for turn in range(options.rounds):
            for mode in names[turn % len(names) :] + names[: turn % len(names)]:
                said = on_link(link, folder, made[mode], measure=False)
                step_s, current = steps_of(said[0], made[mode].plan.snapshot_every or 1)
                taken_s[mode].append(step_s)
                copies = "" if current is None else f", copies there at step {current}"
                print(f"round {turn + 1}, {mode}: {step_s * 1e3:.0f} ms{copies}", flush=True)
        report(predicted_s, taken_s)
        for undone in options.undone:
            spec, _ = job(folder, options.steps, {"redundancy": "auto", "undone_steps": undone})
            print(f"auto, {undone} undone steps: {first_plan(spec, profile).plan.reason.rpartition('; ')[2]}")


def report(predicted_s: Mapping[str, float], taken_s: Mapping[str, Sequence[float]]) -> None:
    """Print each mode's figures, as medians over rounds."""
    none = taken_s["none"]
    print(f"{'copies':16}{'step':>10}{'over none':>12}{'least, most':>18}{'predicted':>12}{'over none':>12}")
    for mode, of_rounds in taken_s.items():
        ratios = [step_s / base_s for step_s, base_s in zip(of_rounds, none, strict=True)]
        print(
            f"{mode:16}{median(of_rounds) * 1e3:>7.0f} ms{median(ratios):>12.3f}"
            f"{f'{min(ratios):.3f} to {max(ratios):.3f}':>18}{predicted_s[mode] * 1e3:>9.0f} ms"
            f"{predicted_s[mode] / predicted_s['none']:>12.3f}"
        )
    for mode, of_rounds in taken_s.items():
        alone = 100 * (predicted_s[mode] / median(of_rounds) - 1)
        beside = [step_s / base_s for step_s, base_s in zip(of_rounds, none, strict=True)]
        off = 100 * (predicted_s[mode] / predicted_s["none"] / median(beside) - 1)
        text = f"{mode}: predicted over measured {alone:+.1f} %, of what it is over none {off:+.1f} %"
        print(at_most(text, abs(off), 100 * CLOSE))


if __name__ == "__main__":
    main()
