"""What telemetry costs a step: samples of the surroundings, times of the stages, and the lane to the planner.

    python -m benchmarks.telemetry [--turns N] [--steps N] [--width W] [--no-control]

Three jobs of two real CPU ranks take turns of a few steps; while one trains, the others are stopped (SIGSTOP). One has
`[adapt] policy = "measured"`: its ranks sample and send what they observe to a planner in this process, which learns
from it and moves nothing. The other two have `"off"`. Each turn of one kind is compared with the turn of the first
`"off"` beside it, and the printed ratio is the median over turns. That of the two jobs with `"off"`, which do the
same, shows what the machine's noise makes of such a ratio: a cost below it is not seen in step times. The planner is a
third process on two busy cores, which a job with a core to spare would not feel.

The processor time of the threads is exact all the same: that of the sampler and of the lane as the kernel counts it,
and that of adding up a step's actions on the training thread.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from math import ceil, floor, sqrt
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.parts.process_jobs import made_profile
from benchmarks.parts.targets import at_most
from benchmarks.parts.two_rank_job import RANKS, WARM_UP, make_job
from planner.adapt.live import LivePlanner, LiveStart
from planner.observed import StepTimes
from workers.config import AdaptConfig, ModelConfig
from workers.control.telemetry_lane import TelemetryLane
from workers.launch.processes import LaunchedProcesses
from workers.launch.ranks import LaunchedJob, assignment
from workers.protocol.orders import Generation
from workers.protocol.reports import ActionSpan, StepReport, TimelineReport
from workers.rank import Rank
from workers.step.step_reports import half_times, stage_times

MOST = 1.005
"""Time of a step with telemetry over the time without."""
NEVER_S = 3600.0
REPEATS = 200
"""Times that one step's actions are added up."""


@dataclass(frozen=True)
class Spent:
    """Processor seconds of one rank over all its steps, and of its telemetry."""

    rank_s: float
    """To train, of all threads."""
    sampler_s: float
    lane_s: float
    adding_s: float
    """To add up the actions of one step, on the thread that trains."""


class Lane:
    """A rank's lane through its pipe, and the processor time of the lane's threads."""

    def __init__(self, pipe: Connection, turn: threading.Lock) -> None:
        self._pipe = pipe
        self._turn = turn
        self._spent_s: dict[int, float] = {}
        self.lane = TelemetryLane(self._send, self._done)

    @property
    def spent_s(self) -> float:
        return sum(self._spent_s.values())

    def _send(self, batch: Sequence[StepTimes]) -> None:
        with self._turn:
            self._pipe.send(("observed", batch))
        self._count()

    def _done(self, handle: Any) -> bool:
        self._count()
        return True

    def _count(self) -> None:
        # The lane ends a thread when nothing waits, and a later one may get its number: the native ones differ.
        self._spent_s[threading.get_native_id()] = time.thread_time()


def serve(job: LaunchedJob, number: int, pipe: Connection) -> None:
    """One rank in its process: trains, and tells its reports and what its telemetry took."""
    turn = threading.Lock()
    spans: list[ActionSpan] = []

    def send(report: Any) -> None:
        if isinstance(report, TimelineReport):
            spans[:] = report.spans
        if isinstance(report, StepReport):
            with turn:
                pipe.send(("step", report))

    through = Lane(pipe, turn)
    rank = Rank(job.config, number, send, observe=through.lane.offer)
    pipe.send(("pid", os.getpid()))
    rank.setup()
    rank.follow(assignment(job, number))
    if number == 0:
        pipe.send(("port", rank.host_store()))
    rank.join(
        Generation(
            number=1,
            epoch=1,
            members=tuple(range(RANKS)),
            store_host="127.0.0.1",
            store_port=pipe.recv(),
            timeout_s=NEVER_S,
        )
    )
    begun_s = time.process_time()
    rank.train()
    rank_s = time.process_time() - begun_s
    with turn:
        pipe.send(("spent", Spent(rank_s, sampler_s(), through.spent_s, adding_s(spans))))
    pipe.recv()
    rank.close()


def sampler_s() -> float:
    """Processor seconds of this process's sampler; 0 without one."""
    found = [thread.native_id for thread in threading.enumerate() if thread.name == "sampler"]
    return sum(int(Path(f"/proc/self/task/{each}/schedstat").read_text().split()[0]) for each in found) / 1e9


def adding_s(spans: Sequence[ActionSpan]) -> float:
    """Processor seconds of what the training thread adds up after a step with these actions; the median."""
    taken = []
    for _ in range(REPEATS):
        begun_s = time.thread_time()
        stage_times(spans)
        half_times(spans)
        taken.append(time.thread_time() - begun_s)
    return median(taken)


class Paused:
    """A job that trains in its turns only.

    Args:
        planner: takes what its ranks observe.
    """

    def __init__(self, job: LaunchedJob, planner: LivePlanner) -> None:
        self._job = job
        self._planner = planner
        self.processes = LaunchedProcesses(RANKS, serve, job)
        self._heard = self.processes.receive()
        self._pids: list[int] = []
        self._committed_s: list[float] = []
        self.spent: list[Spent] = []
        self.observed = 0

    def begin(self) -> None:
        """Train the first steps, which do not count."""
        self._until(WARM_UP)
        self._signal(signal.SIGSTOP)

    def turn(self, steps: int) -> list[float]:
        """Train `steps` steps more, and return the seconds of each but the first, in which it was stopped."""
        self._signal(signal.SIGCONT)
        first = len(self._committed_s)
        self._until(first + steps)
        self._signal(signal.SIGSTOP)
        return [later - earlier for earlier, later in pairwise(self._committed_s[first : first + steps])]

    def end(self) -> None:
        """Train to the end."""
        self._signal(signal.SIGCONT)
        while len(self.spent) < RANKS:
            self._take()

    def go_on(self) -> None:
        """Let its processes run, so that they can end."""
        self._signal(signal.SIGCONT)

    def _until(self, steps: int) -> None:
        while len(self._committed_s) < steps:
            self._take()

    def _take(self) -> None:
        rank, message = next(self._heard)
        match message:
            case ("pid", pid):
                self._pids.append(pid)
            case ("port", port):
                self.processes.tell(port)
            case ("step", report):
                self._committed_s.append(report.committed_s)
            case ("observed", batch):
                self.observed += len(batch)
                self._planner.observe(batch, (self._job.plan,), range(RANKS))
            case ("spent", spent):
                self.spent.append(spent)
            case _:
                raise RuntimeError(f"rank {rank} ended: {message}")

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)


def made(policy: str, steps: int, width: int, folder: Path) -> LaunchedJob:
    """The job of `benchmarks.pipelining` with one core per rank."""
    return make_job(
        "1f1b",
        steps,
        folder,
        timeline_every=0,
        pin_cores=True,
        model=ModelConfig(family="gpt", layers=8, width=width, heads=4, context=128),
        adapt=AdaptConfig.model_validate({"policy": policy}),
    )


def told(name: str, ratios: Sequence[float]) -> str:
    """The median of `ratios`, the interval that holds the true median in 19 of 20 cases whatever the noise (order
    statistics), and the range."""
    ordered, far = sorted(ratios), 0.98 * sqrt(len(ratios))
    low = ordered[max(0, floor(len(ratios) / 2 - far))]
    high = ordered[min(len(ratios) - 1, ceil(len(ratios) / 2 + far) - 1)]
    return (
        f"{name}: {median(ratios):.4f} (95 %: {low:.4f} to {high:.4f}; {len(ratios)} turns of {ordered[0]:.3f} to"
        f" {ordered[-1]:.3f})"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=40, help="of each job")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, the first of which does not count")
    parser.add_argument("--width", type=int, default=128, help="of the model")
    parser.add_argument("--no-control", action="store_true", help='without the second job of "off"')
    given = parser.parse_args(arguments)
    print(
        f"two ranks, GPT of 8 layers of width {given.width}; {platform.machine()}, {os.cpu_count()} cores, load"
        f" {os.getloadavg()[0]:.1f}; torch {torch.__version__}; {date.today()}"
    )
    total = WARM_UP + given.turns * given.steps + 1
    kinds = {"off": "off", "telemetry": "measured"} | ({} if given.no_control else {"off again": "off"})
    step_s: dict[str, list[list[float]]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        jobs: dict[str, Paused] = {}
        for name, policy in kinds.items():
            job = made(policy, total, given.width, Path(folder) / name)
            layers = job.plan.layers[-1][1]
            profile = made_profile([f"layer {i}" for i in range(layers)], [1] * layers, RANKS)
            jobs[name] = Paused(job, LivePlanner(LiveStart(profile=profile)))
            stack.enter_context(jobs[name].processes)
            stack.callback(jobs[name].go_on)
            jobs[name].begin()
        for number in range(given.turns):
            first = number % len(jobs)
            names = [*jobs][first:] + [*jobs][:first]
            for name in names if number % 2 else reversed(names):
                step_s[name].append(jobs[name].turn(given.steps))
        for each in jobs.values():
            each.end()
    off = [median(turn) for turn in step_s["off"]]
    usual_s = median(off)
    print(f"step {usual_s * 1e3:.1f} ms (turns of {min(off) * 1e3:.1f} to {max(off) * 1e3:.1f} ms)")
    for name in [*jobs][1:]:
        ratios = [median(turn) / beside for turn, beside in zip(step_s[name], off, strict=True)]
        text = told(f"{name} over off", ratios)
        print(at_most(text, median(ratios), MOST) if name == "telemetry" else text)
        busy = mean(spent.rank_s for spent in jobs[name].spent) / mean(s.rank_s for s in jobs["off"].spent)
        print(f"    processor time of the ranks, {name} over off: {busy:.4f}")
    observing = jobs["telemetry"]
    for spent in observing.spent:
        per_step = [spent.sampler_s / total, spent.lane_s / total, spent.adding_s]
        sampler, lane, adding = (f"{each * 1e3:.2f} ms" for each in per_step)
        text = (
            f"a rank's processor time per step: sampler {sampler}, lane {lane}, adding up {adding}: together"
            f" {sum(per_step) / usual_s:.2%} of a step"
        )
        print(at_most(text, sum(per_step) / usual_s, MOST - 1))
    print(f"the planner has taken {observing.observed} of {RANKS * total} observations")


if __name__ == "__main__":
    main()
