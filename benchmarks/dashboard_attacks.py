"""What attacks, and folders with many or long runs, cost those who read from the service.

    python -m benchmarks.dashboard_attacks [SECONDS]

A service shows 300 runs of 1,000 steps, with the views that their controllers left, and another one a run of 300,000
steps without a view: each is listed when nothing is known of it, again, and once the log has grown. Someone reads
beside the first list. Then senders without a token attack the first service for some seconds each, from this machine
and with the lowest priority, while a client with a token reads from the same address: on a connection that it keeps,
and on a new one for each read. All traffic is on the loopback interface.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import httpx
import psutil

from benchmarks.parts.long_job import NAME, PLAN, RANKS, step_report
from benchmarks.parts.targets import percentile, under
from orchestrator.events import types as events
from orchestrator.events.types import Record
from orchestrator.history.job_view import fold
from orchestrator.history.snapshot import position, write_snapshot
from workers.protocol.orders import Generation

RUNS, STEPS, LONG_STEPS = 300, 1_000, 300_000
SECONDS = 15.0
READ = "/api/v1/runs/run000"
BETWEEN_S = 0.02
"""From one read to the next."""
HELD = 1_200
"""Connections whose headers never end."""
LINE_S = 1.0
"""Such a connection sends one more header this often; one that was closed is opened again after as long."""
SENDERS, SENT_PER_S = 4, 50.0
"""Senders of bad requests, and how many of them each sends."""
BAD = {
    "10,000 headers": b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    + b"".join(b"X-%d: 1\r\n" % number for number in range(10_000))
    + b"\r\n",
    "an address of 100 kB": b"GET /?" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "both lengths": b"POST /logout HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no HTTP": b"nonsense\r\n\r\n",
}
SLOW = "headers that never end"
ATTACKS = (SLOW, *BAD)


def log_of(steps: int) -> Iterator[Record]:
    """The events of a job of four ranks."""
    generation = Generation(
        number=1, epoch=1, members=tuple(range(RANKS)), store_host="h", store_port=1, timeout_s=1.0
    )
    spec = {"job": {"name": NAME, "steps": steps}}
    yield Record(time_s=0.0, event=events.Submitted(job=NAME, epoch=1, spec=spec, resume=False))
    yield Record(time_s=0.0, event=events.Issued(plan=PLAN))
    yield Record(time_s=0.0, event=events.Formed(generation=generation, start=None, step=0))
    for step in range(1, steps + 1):
        yield Record(time_s=0.1 * step, event=step_report(step))


def write_many(folder: Path) -> None:
    """`RUNS` runs, each with its view."""
    records = list(log_of(STEPS))
    text = "".join(record.to_json() + "\n" for record in records)
    view = fold(records).to_json()
    for number in range(RUNS):
        run = folder / f"run{number:03d}"
        run.mkdir(parents=True)
        (run / "events.jsonl").write_text(text)
        write_snapshot(run / "view.json", view, position(run / "events.jsonl", len(text)))


def write_long(folder: Path) -> None:
    """A run of `LONG_STEPS` steps, without a view."""
    (folder / "run000").mkdir(parents=True)
    with (folder / "run000" / "events.jsonl").open("w") as file:
        for record in log_of(LONG_STEPS):
            file.write(record.to_json() + "\n")


class Service:
    """The service's process, of the runs in `folder`."""

    def __init__(self, folder: Path) -> None:
        tokens, self._log = folder.with_suffix(".tokens"), folder.with_suffix(".log")
        command = [sys.executable, "-m", "orchestrator", "dashboard", "--port", "0", "--runs", str(folder)]
        command += ["--token-file", str(tokens), "--audit-log", str(folder.with_suffix(".audit"))]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[1].rstrip("/")
        self.headers = {"Authorization": f"Bearer {json.loads(tokens.read_text())['read']}"}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.address, headers=self.headers, timeout=600, trust_env=False)

    @property
    def lines(self) -> int:
        """Lines of its log."""
        return self._log.read_bytes().count(b"\n")

    @property
    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    @property
    def memory_mib(self) -> float:
        return psutil.Process(self._process.pid).memory_info().rss / 2**20

    def end(self) -> float:
        """End it with SIGTERM; return the seconds that it took."""
        began_s = time.perf_counter()
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return time.perf_counter() - began_s


@contextmanager
def serving(folder: Path) -> Iterator[Service]:
    service = Service(folder)
    try:
        yield service
    finally:
        print(f"  SIGTERM ended it in {service.end():.1f} s")


def seconds(client: httpx.Client, path: str) -> float:
    """Seconds of a read; infinite if there was no answer."""
    began_s = time.perf_counter()
    try:
        client.get(path).raise_for_status()
    except httpx.HTTPError as error:
        print(f"  no answer: {type(error).__name__}")
        return float("inf")
    return time.perf_counter() - began_s


def listed(name: str, folder: Path, grown: Path) -> None:
    """Print how long the list takes, and what a small read takes beside it."""
    with serving(folder) as service, service.client() as client, service.client() as beside:
        reads_s: list[float] = []
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                reads_s.append(seconds(beside, "/api/v1/jobs"))
                time.sleep(BETWEEN_S)

        reader = threading.Thread(target=read)
        reader.start()
        first_s = seconds(client, "/api/v1/runs")
        done.set()
        reader.join()
        again_s = median(seconds(client, "/api/v1/runs") for _ in range(9))
        page_s = median(seconds(client, "/runs") for _ in range(5))
        with grown.open("a") as file:
            file.write(Record(time_s=1e9, event=step_report(LONG_STEPS + 1)).to_json() + "\n")
        grown_s = seconds(client, "/api/v1/runs")
        print(
            f"{name}: first {first_s:.2f} s, again {again_s * 1e3:.0f} ms, the page {page_s * 1e3:.0f} ms, once a log"
            f" has grown {grown_s * 1e3:.0f} ms; memory {service.memory_mib:.0f} MiB"
        )
        p99_ms = percentile(reads_s, 0.99) * 1e3
        text = f"  p99 of a read beside the first: {p99_ms:.0f} ms (p50 {median(reads_s) * 1e3:.0f} ms)"
        print(under(text, p99_ms, 100), flush=True)


async def hold(host: str, port: int, until_s: float) -> int:
    """Hold one connection whose headers never end; return how often it was opened."""
    opened = 0
    while time.monotonic() < until_s:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            opened += 1
            try:
                writer.write(b"GET / HTTP/1.1\r\n")
                while time.monotonic() < until_s:
                    writer.write(b"X-Slow: 1\r\n")
                    await writer.drain()
                    await asyncio.sleep(LINE_S)
            finally:
                writer.transport.abort()
        await asyncio.sleep(LINE_S)
    return opened


async def send(host: str, port: int, request: bytes, until_s: float) -> int:
    """Send a bad request again and again, each on a connection of its own; return how many were answered."""
    answered = 0
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection(host, port)
                try:
                    writer.write(request)
                    answered += bool(await reader.read(65_536))
                finally:
                    writer.transport.abort()
        await asyncio.sleep(max(0.0, 1 / SENT_PER_S - (time.monotonic() - began_s)))
    return answered


async def attack(address: str, name: str, for_s: float) -> None:
    """Attack the service on this machine for some seconds. Prints a line as it begins, and at the end how many
    connections were opened or requests answered."""
    print("begun", flush=True)
    host, port, until_s = "127.0.0.1", urlsplit(address).port or 0, time.monotonic() + for_s
    if name == SLOW:
        counts = await asyncio.gather(*(hold(host, port, until_s) for _ in range(HELD)))
    else:
        counts = await asyncio.gather(*(send(host, port, BAD[name], until_s) for _ in range(SENDERS)))
    print(sum(counts), flush=True)


def reads(service: Service, for_s: float) -> tuple[list[float], list[float]]:
    """(seconds of reads on one connection, on new connections) for some seconds."""
    kept, fresh = [], []
    with service.client() as client:
        seconds(client, READ)
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s:
            kept.append(seconds(client, READ))
            time.sleep(BETWEEN_S)
            with service.client() as other:
                fresh.append(seconds(other, READ))
            time.sleep(BETWEEN_S)
    return kept, fresh


def attacked(service: Service, name: str | None, for_s: float) -> None:
    """Print what reads take beside an attack; None: beside none."""
    lines, cpu_s, began_s = service.lines, service.cpu_s, time.perf_counter()
    attacker, count = None, 0
    if name is not None:
        command = [sys.executable, "-m", "benchmarks.dashboard_attacks", "--attack", service.address, name]
        attacker = subprocess.Popen(
            [*command, str(for_s + 2)], stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.nice(19)
        )
        assert attacker.stdout is not None
        attacker.stdout.readline()
        time.sleep(2.0)
    kept, fresh = reads(service, for_s)
    if attacker is not None:
        count = int(attacker.communicate()[0])
    busy = (service.cpu_s - cpu_s) / (time.perf_counter() - began_s)
    kept_ms, fresh_ms = (percentile(found, 0.99) * 1e3 for found in (kept, fresh))
    text = (
        f"{name or 'no attack'} ({count:,}): p99 of a read {kept_ms:.0f} ms on a connection that is kept (p50"
        f" {median(kept) * 1e3:.0f} ms), {fresh_ms:.0f} ms on a new one; {len(kept) + len(fresh)} reads, {busy:.0%} of"
        f" a core, {service.lines - lines:,} lines of log"
    )
    print(under(text, max(kept_ms, fresh_ms), 100), flush=True)


def main(for_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="attacks") as name:
        many, long = Path(name) / "many", Path(name) / "long"
        write_many(many)
        write_long(long)
        listed(f"list of {RUNS} runs", many, many / "run000" / "events.jsonl")
        listed(
            f"list of a run of {LONG_STEPS:,} steps without a view", long, long / "run000" / "events.jsonl"
        )
        with serving(many) as service:
            for attack_name in (None, *ATTACKS, None):
                attacked(service, attack_name, for_s)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--attack"]:
        asyncio.run(attack(sys.argv[2], sys.argv[3], float(sys.argv[4])))
    else:
        main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
