"""How much the transfer of a layer's state slows training on a slow link: DynPipe's table III as step times.

    python -m benchmarks.migration_network [--mbit N] [--state-mb N] [--rounds N] [--no-bands]

Two ranks train in two network namespaces over one shaped link. Meanwhile the second rank fetches a state from
the first with each of the four flows in turn (pipelined or not, prioritized or not). A figure is the median
step within a transfer over the median of the steps just before it. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.parts.linked_rank import join, post
from benchmarks.parts.shaped_link import ADDRESSES, INTERFACE, ShapedLink
from benchmarks.parts.two_rank_job import WARM_UP, make_job
from workers.config import EmulatedConfig, ModelConfig
from workers.launch.ranks import LaunchedJob, assignment
from workers.protocol.orders import Request
from workers.protocol.reports import Report, StepReport
from workers.rank import Rank
from workers.state.layer_state import LayerState
from workers.state_stream.flow import Flow
from workers.state_stream.stream import StateServer, fetch

SECRET = b"benchmark"
EMULATED = EmulatedConfig(forward_s=0.02, input_grad_s=0.02, weight_grad_s=0.02)
NORMAL_STEPS = 5
"""Steps between two transfers."""
STEPS = 100_000
"""More steps than the benchmark runs."""


@dataclass(frozen=True)
class Step:
    step: int
    begun_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s


@dataclass(frozen=True)
class Transfer:
    cell: str
    begun_s: float
    ended_s: float


def cells(chunk_bytes: int | None) -> dict[str, Flow]:
    """The flow for each of the table's four cells, by the cell's name."""
    return {
        "pipelined, prioritized": Flow(chunk_bytes=chunk_bytes),
        "pipelined": Flow(chunk_bytes=chunk_bytes, prioritized=False),
        "prioritized": Flow(chunk_bytes=chunk_bytes, pipelined=False),
        "neither": Flow(chunk_bytes=chunk_bytes, pipelined=False, prioritized=False),
    }


def job(output: Path, device: str, redundancy: str) -> LaunchedJob:
    """GPT of 2 layers, width 128, context 256, 8 microbatches of 4. A microbatch sends 512 KiB from rank to
    rank, which takes 42 ms on a link of 100 Mbit/s."""
    model = ModelConfig(family="gpt", layers=2, width=128, heads=4, context=256)
    made = make_job("1f1b", STEPS, output, model=model, device=device, emulated=EMULATED)
    if redundancy == "none":
        return made
    owners = [
        made.plan.stage_ranks[made.plan.stage_of_layer(layer)] for layer in range(made.plan.layers[-1][1])
    ]
    return replace(made, plan=replace(made.plan, standbys=tuple((1 - owner,) for owner in owners)))


def side(place: int, what: LaunchedJob, state_mb: float, flows: dict[str, Flow]) -> None:
    """Run one rank: it trains, and serves or fetches on command from standard input, until it reads stop."""

    def take(report: Report) -> None:
        if isinstance(report, StepReport):
            ended_s = report.committed_s or time.time()
            post(step=report.step, begun_s=ended_s - report.step_s, ended_s=ended_s)

    rank = Rank(what.config, place, take)
    rank.setup()
    rank.follow(assignment(what, place))
    channel = join(rank, place)
    servers = {
        cell: StateServer(SECRET, ADDRESSES[place], busy=channel.sending, flow=flow)
        for cell, flow in flows.items()
        if place == 0
    }
    values = torch.randn(int(state_mb * 1e6 / 3 / 4))
    slots = {"w": {"exp_avg": values.clone(), "exp_avg_sq": values.clone()}}
    for server in servers.values():
        server.offer(1, [LayerState(0, "moving", {"w": values}, {}, slots, {"w": 1})])
    post(ports={cell: server.port for cell, server in servers.items()})

    def obey() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "stop" in message:
                rank.request(Request.STOP)
            else:
                begun_s = time.time()
                flow = flows[message["cell"]]
                fetch(ADDRESSES[0], message["port"], SECRET, 0, 1, wait_s=5.0, flow=flow)
                post(cell=message["cell"], begun_s=begun_s, ended_s=time.time())

    threading.Thread(target=obey, daemon=True).start()
    rank.train()
    for server in servers.values():
        server.close()
    rank.close()


class Sides:
    """Both ranks, started on the link, and their messages."""

    def __init__(self, link: ShapedLink, arguments: Sequence[str]) -> None:
        self.steps: list[Step] = []
        self.transfers: list[Transfer] = []
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._processes = [
            link.start(
                place,
                [sys.executable, "-m", "benchmarks.migration_network", "--side", str(place), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"},
            )
            for place in range(2)
        ]
        for process in self._processes:
            threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._said.put(json.loads(line))
        self._said.put({"ended": True})

    def hear(self, key: str) -> dict[str, Any]:
        """Read messages until one with `key` comes."""
        while True:
            message = self._said.get(timeout=300)
            if "step" in message:
                self.steps.append(Step(**message))
            elif "cell" in message:
                self.transfers.append(Transfer(**message))
            if key in message:
                return message
            if "ended" in message:
                raise RuntimeError("a rank ended before it was told to; see its error above")

    def post(self, place: int, **message: Any) -> None:
        pipe = self._processes[place].stdin
        assert pipe is not None
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.hear("step")

    def finish(self) -> None:
        self.post(0, stop=True)
        for process in self._processes:
            self.hear("ended")
            process.wait()


def measure(sides: Sides, rounds: int) -> None:
    store = sides.hear("store")
    for place in range(2):
        sides.post(place, **store)
    ports: dict[str, int] = {}
    while not ports:
        ports = sides.hear("ports")["ports"]
    sides.train(WARM_UP + 3)
    names = list(ports)
    for turn in range(rounds):
        for cell in names[turn % len(names) :] + names[: turn % len(names)]:
            sides.train(NORMAL_STEPS)
            sides.post(1, cell=cell, port=ports[cell])
            sides.hear("cell")
            # The step in which the transfer ended, and one to catch up.
            sides.train(2)
    sides.finish()


def within(steps: list[Step], begun_s: float, ended_s: float) -> list[Step]:
    return [step for step in steps if begun_s <= step.begun_s and step.ended_s <= ended_s]


def report(sides: Sides, state_mb: float) -> None:
    print(f"{'':24}{'step in transfer / normal':>34}{'worst':>8}{'transfer':>12}{'steps':>8}")
    for cell in dict.fromkeys(t.cell for t in sides.transfers):
        ratios, worst, seconds, spans = [], [], [], []
        for transfer in (t for t in sides.transfers if t.cell == cell):
            before = [s for s in sides.steps if s.ended_s <= transfer.begun_s][-NORMAL_STEPS:]
            normal_s = median(s.seconds for s in before)
            during = within(sides.steps, transfer.begun_s, transfer.ended_s)
            if not during:
                raise SystemExit(f"{cell}: no step within a transfer: move a bigger state with --state-mb")
            ratios.append(median(s.seconds for s in during) / normal_s)
            worst.append(max(s.seconds for s in during) / normal_s)
            seconds.append(transfer.ended_s - transfer.begun_s)
            spans.append(seconds[-1] / normal_s)
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(
            f"{cell:24}{median(ratios):>8.3f} ({each})".ljust(58)
            + f"{max(worst):>8.3f}{median(seconds):>10.1f} s{median(spans):>8.1f}"
        )
    normal = [s.seconds for s in sides.steps if not any(_touch(s, t) for t in sides.transfers)][WARM_UP + 3 :]
    print(f"normal step {median(normal):.3f} s; state of {state_mb:g} MB")


def _touch(step: Step, transfer: Transfer) -> bool:
    return step.begun_s < transfer.ended_s and transfer.begun_s < step.ended_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the link, each way")
    parser.add_argument("--state-mb", type=float, default=40.0, help="megabytes of the state that moves")
    parser.add_argument("--device", choices=["cpu", "emulated"], default="cpu")
    parser.add_argument("--redundancy", choices=["none", "peer"], default="none")
    parser.add_argument("--chunk-kb", type=int, help="KiB of a chunk; unset: by the link's speed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-bands", action="store_true", help="the link's queue knows no priorities")
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        flows = cells(options.chunk_kb and options.chunk_kb * 1024)
        side(options.side, job(options.output, options.device, options.redundancy), options.state_mb, flows)
        return
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        print("left out: making network namespaces needs root, and the programs ip and tc")
        return
    print(
        f"two ranks ({options.device}, one thread), redundancy {options.redundancy}, {options.mbit:g} Mbit/s,"
        f" queue {'in one line' if options.no_bands else 'by priority'}"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        ShapedLink(options.mbit, bands=not options.no_bands) as link,
    ):
        arguments = ["--output", folder, *sys.argv[1:]]
        sides = Sides(link, arguments)
        measure(sides, options.rounds)
        report(sides, options.state_mb)


if __name__ == "__main__":
    main()
