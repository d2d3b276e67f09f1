"""How many healthy ranks a job loses on a machine with too much other work, and when a hung one is found there.

    python -m benchmarks.busy_machine [--load N] [--seconds S] [--hang-timeout-s H] [--core C]

Four ranks and two spares train as real processes beside N busy loops, with a short `elastic.hang_timeout_s`. First
nothing happens to them: a rank that the job loses is a healthy one. Then one rank is stopped, and the job goes on
without it. With `--core` all of it shares one core.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from benchmarks.parts.process_jobs import ElasticJob, Ran
from benchmarks.parts.settled_job import settled
from orchestrator.events import types as events
from orchestrator.lifecycle.stimuli import SaveOrStop
from orchestrator.prepare.model_outline import absolute
from orchestrator.prepare.settling import Settled
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import CheckpointConfig, DataConfig, ElasticConfig, ModelConfig
from workers.protocol.orders import Request
from workers.protocol.reports import StepReport

RANKS, SPARES = 4, 2
LIMIT_S = 900.0


def spin() -> None:
    while True:
        pass


@contextmanager
def load(loops: int) -> Iterator[None]:
    """Busy loops beside what happens inside."""
    spawn = multiprocessing.get_context("fork")
    started = [spawn.Process(target=spin, daemon=True) for _ in range(loops)]
    for process in started:
        process.start()
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.join()


def job(folder: Path, name: str, hang_timeout_s: float) -> Settled:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} sheep jump over {number + 1} fences\n" for number in range(300)))
    spec = absolute(
        Spec(
            job=JobConfig(name=name, output=str(folder / name), steps=100_000, sample_tokens=0),
            model=ModelConfig(family="gpt", layers=4, width=16, heads=2, context=16),
            data=DataConfig(source="text", path=str(text)),
            pipeline=PipelineConfig(ranks=RANKS, microbatches=2, microbatch_size=1),
            checkpoint=CheckpointConfig(every_steps=2),
            elastic=ElasticConfig(spares=SPARES, grow=False, hang_timeout_s=hang_timeout_s, attempts=100),
            cluster=ClusterConfig(device="cpu"),
        )
    )
    return settled(spec)


class Watched:
    """Stops the job after a time; before that, may stop one of its ranks and wait until the job goes on without it."""

    def __init__(self, seconds: float, *, hang: bool) -> None:
        self._seconds = seconds
        self._hang = hang
        self._begun = False
        self.stopped_s: float | None = None
        """When a rank was stopped."""
        self.found_s: float | None = None
        """How long it took until it was given up."""

    def take(self, running: ElasticJob, event: events.Event) -> None:
        match event:
            case StepReport(step=step) if not self._begun:
                self._begun = True
                asyncio.get_running_loop().call_later(self._seconds, running.post, SaveOrStop(Request.STOP))
            case StepReport(step=step) if self._hang and self.stopped_s is None and step >= 4:
                self.stopped_s = time.monotonic()
                running.signal(1, signal.SIGSTOP)
            case events.RankFailed(rank=1) if self.stopped_s is not None and self.found_s is None:
                self.found_s = time.monotonic() - self.stopped_s
            case _:
                pass


def show(name: str, ran: Ran, watched: Watched) -> None:
    lost = ran.of(events.RankFailed)
    waited = [told.text for told in ran.of(events.Warned) if "has not hung" in told.text]
    stalls = [stalled.seconds for stalled in ran.of(events.Stalled)]
    found = (
        f", the stopped rank given up after {watched.found_s:.1f} s" if watched.found_s is not None else ""
    )
    healthy = len(lost) - (watched.found_s is not None)
    steps = max((report.step for report in ran.of(StepReport)), default=0)
    print(
        f"{name}: {healthy} healthy ranks lost in {steps} steps{found}; {len(waited)} times waited for one beyond its"
        f" limit, {len(stalls)} standstills, the longest {max(stalls, default=0.0):.1f} s;"
        f" {type(ran.state).__name__}",
        flush=True,
    )
    for failed in lost:
        print(f"  rank {failed.rank}: {failed.error.splitlines()[0][:160]}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", type=int, default=20, help="busy loops beside the job")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which the job trains, twice")
    parser.add_argument("--hang-timeout-s", type=float, default=2.0)
    parser.add_argument("--core", type=int, help="the only core that all of it uses")
    given = parser.parse_args(arguments)
    if given.core is not None:
        os.sched_setaffinity(0, {given.core})
    print(
        f"{RANKS} ranks, {SPARES} spares, elastic.hang_timeout_s = {given.hang_timeout_s:g}, {given.load} busy loops;"
        f" {platform.machine()}, {len(os.sched_getaffinity(0))} cores, load before {os.getloadavg()[0]:.1f};"
        f" {date.today()}"
    )
    with tempfile.TemporaryDirectory() as folder, load(given.load):
        for name, hang in (("undisturbed", False), ("one rank stopped", True)):
            watched = Watched(given.seconds, hang=hang)
            running = ElasticJob(
                job(Path(folder), name.replace(" ", "-"), given.hang_timeout_s),
                watched.take,
                room=RANKS + SPARES,
            )
            show(name, running.run(LIMIT_S), watched)


if __name__ == "__main__":
    main()
