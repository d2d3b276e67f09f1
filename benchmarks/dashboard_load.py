"""What clients of the service cost a job that trains, and what killing the service costs it.

    python -m benchmarks.dashboard_load [ROUNDS]

A job of four emulated ranks trains on a local cluster. In turn, within the same run, the service has no clients, then
200 on the event stream and 100 reads per second. At the end the service is killed while they look on. Clients run in a
process of their own at the lowest priority: they stand for other machines.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx
import psutil

from benchmarks.parts.targets import at_most, percentile, under

STREAMS, READS_PER_S = 200, 100
TURN_S = 20.0
SETTLE_S = 4.0
JOB = "load"
PATHS = ("", "/telemetry?last=200", "/plan", "/events?limit=50", "/checkpoints")
"""What is read, in turn, below the job's path."""


def spec(folder: Path) -> str:
    """A job of four emulated ranks that trains for as long as the benchmark needs it."""
    return f"""
[job]
name = "{JOB}"
steps = 1000000
output = "{folder}"
sample_tokens = 0
[model]
family = "gpt"
layers = 6
width = 16
heads = 2
context = 16
[pipeline]
ranks = 4
microbatches = 8
microbatch_size = 1
[cluster]
device = "emulated"
[cluster.emulated]
forward_s = 0.003
input_grad_s = 0.003
weight_grad_s = 0.003
"""


async def load(address: str, token: str, seconds: float) -> None:
    """Be all clients for some time; print the seconds of each read, as JSON."""
    headers = {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=STREAMS + 50)
    reads_s: list[float] = []
    events = 0
    async with httpx.AsyncClient(base_url=address, headers=headers, limits=limits, timeout=30) as client:

        async def listen() -> None:
            nonlocal events
            async with client.stream("GET", f"/api/v1/jobs/{JOB}/stream") as answer:
                async for _ in answer.aiter_raw():
                    events += 1

        async def read(path: str) -> None:
            began_s = time.perf_counter()
            answer = await client.get(f"/api/v1/jobs/{JOB}{path}")
            reads_s.append(time.perf_counter() - began_s)
            answer.raise_for_status()

        listeners = [asyncio.create_task(listen()) for _ in range(STREAMS)]
        await asyncio.sleep(SETTLE_S)
        reads: list[asyncio.Task[None]] = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            reads.append(asyncio.create_task(read(PATHS[len(reads) % len(PATHS)])))
            await asyncio.sleep(random.expovariate(READS_PER_S))
        await asyncio.gather(*reads)
        lost = sum(listener.done() for listener in listeners)
        for listener in listeners:
            listener.cancel()
    print(json.dumps({"reads_s": reads_s, "chunks": events, "lost": lost}), flush=True)


class Service:
    """The service's process."""

    def __init__(self, cluster: str, folder: Path) -> None:
        self.tokens = folder / "tokens.json"
        command = [sys.executable, "-m", "orchestrator", "dashboard", "--address", cluster, "--port", "0"]
        command += ["--token-file", str(self.tokens), "--audit-log", str(folder / "audit.jsonl")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[1].rstrip("/")

    @property
    def token(self) -> str:
        return json.loads(self.tokens.read_text())["read"]

    @property
    def memory_mib(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 2**20


def steps_between(log: Path, since_s: float, until_s: float) -> list[float]:
    """Seconds of the steps committed in this time."""
    found = []
    for line in log.read_text().splitlines():
        if '"event": "StepReport"' in line:
            report = json.loads(line)
            if since_s <= report["committed_s"] <= until_s:
                found.append(report["step_s"])
    return found


def clients(service: Service) -> tuple[list[float], float, float]:
    """(seconds of each read, began, ended) of a turn of all clients."""
    command = [sys.executable, "-m", "benchmarks.dashboard_load", "--clients", service.address, str(TURN_S)]
    environment = {**os.environ, "LOAD_TOKEN": service.token}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=lambda: os.nice(19)
    )
    began_s = time.time() + SETTLE_S
    printed, _ = process.communicate()
    found = json.loads(printed)
    if found["lost"]:
        print(f"  {found['lost']} of {STREAMS} streams ended early")
    return found["reads_s"], began_s, began_s + TURN_S


def main(rounds: int) -> None:
    from orchestrator.client.blocking_client import BlockingJobClient
    from orchestrator.cluster import connection

    with tempfile.TemporaryDirectory(prefix="load") as name, connection.connected("local", cpus=4):
        import ray

        folder, cluster = Path(name), ray.get_runtime_context().gcs_address
        (folder / "load.toml").write_text(spec(folder / "run"))
        command = [sys.executable, "-m", "orchestrator", "train", str(folder / "load.toml"), "--detach"]
        subprocess.run([*command, "--set", f"cluster.address={cluster}"], check=True)
        client = BlockingJobClient(cluster)
        log = folder / "run" / "events.jsonl"
        service = Service(cluster, folder)
        while client.view(JOB).step < 30:
            time.sleep(0.5)
        ratios, p99s, memory = [], [], []
        for round_number in range(rounds):
            began_s = time.time()
            time.sleep(TURN_S)
            idle = steps_between(log, began_s, began_s + TURN_S)
            reads_s, from_s, to_s = clients(service)
            loaded = steps_between(log, from_s, to_s)
            ratios.append(median(loaded) / median(idle))
            p99s.append(percentile(reads_s, 0.99))
            memory.append(service.memory_mib)
            print(
                f"round {round_number + 1}: step {median(idle) * 1e3:.1f} ms without clients ({len(idle)} steps),"
                f" {median(loaded) * 1e3:.1f} ms with ({len(loaded)}): {ratios[-1]:.4f};"
                f" {len(reads_s)} reads, p50 {median(reads_s) * 1e3:.1f} ms, p99 {p99s[-1] * 1e3:.1f} ms;"
                f" memory {memory[-1]:.0f} MiB",
                flush=True,
            )
        print(at_most(f"step time with clients over without: {median(ratios):.4f}", median(ratios), 1.02))
        print(under(f"p99 of a read: {median(p99s) * 1e3:.1f} ms", median(p99s) * 1e3, 100))
        print(
            f"memory of the service: {memory[0]:.0f} MiB after the first round, {memory[-1]:.0f} after the last"
        )
        began_s = time.time()
        time.sleep(TURN_S)
        before = steps_between(log, began_s, began_s + TURN_S)
        service.process.send_signal(signal.SIGKILL)
        service.process.wait()
        killed_s = time.time()
        time.sleep(TURN_S)
        after = steps_between(log, killed_s, killed_s + TURN_S)
        worst = max(after[:20]) / median(before)
        print(
            f"service killed: step time after over before {median(after) / median(before):.4f},"
            f" the longest of the next 20 steps {worst:.2f} of the median"
        )
        client.outcome(client.abort(JOB), timeout_s=60)
        client.reap(JOB, force=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--clients"]:
        asyncio.run(load(sys.argv[2], os.environ["LOAD_TOKEN"], float(sys.argv[3])))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
