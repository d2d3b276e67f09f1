"""How far a job's page is behind the job: a real job on a cluster of its own, and its page in Chromium.

A step's event has its time in the log. The page notes by itself when it shows which step: an observer of its changes
takes the time of the next frame. Beside that stands when the service had the event, as a client that waits for events
over REST learns it. One machine, so one clock.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

from benchmarks.dashboard_load import JOB, Service, spec
from benchmarks.parts.targets import percentile

WATCH = """
window.shown = [];
const head = document.querySelector('#head');
const note = () => {
  const step = Number(/step ([\\d,]+) of/.exec(head.querySelector('.progress').textContent)[1].replaceAll(',', ''));
  if (step > (shown.at(-1)?.[0] ?? 0)) requestAnimationFrame(() => shown.push([step, Date.now() / 1e3]));
};
new MutationObserver(note).observe(head, {childList: true, subtree: true, characterData: true});
"""


@dataclass(frozen=True)
class Lags:
    """Seconds after a step's event, one entry per step."""

    service_s: list[float]
    """Until the service had it."""
    page_s: list[float]
    """Until the page showed this step or a later one."""

    @property
    def text(self) -> str:
        return f"{len(self.page_s)} steps: the page {_spread(self.page_s)}; the service {_spread(self.service_s)}"


def _spread(lags_s: Sequence[float]) -> str:
    """E.g. `p50 0.31 s, p95 0.58 s, at most 0.60 s`."""
    return f"p50 {median(lags_s):.2f} s, p95 {percentile(lags_s, 0.95):.2f} s, at most {max(lags_s):.2f} s behind"


class Listener(threading.Thread):
    """Waits for the job's events over REST, and notes when each step's event came."""

    def __init__(self, service: Service) -> None:
        super().__init__(daemon=True)
        headers = {"Authorization": f"Bearer {service.token}"}
        self._client = httpx.Client(base_url=service.address, headers=headers, timeout=30)
        self._over = threading.Event()
        self.had: dict[int, float] = {}
        """Step -> seconds since the Unix epoch."""

    def run(self) -> None:
        after = 0
        while not self._over.is_set():
            page = self._client.get(f"/api/v1/jobs/{JOB}/events", params={"after": after, "wait_s": 1}).json()
            now_s, after = time.time(), page["next"]
            for event in page["events"]:
                if event["event"] == "StepReport":
                    self.had.setdefault(event["step"], now_s)

    def close(self) -> None:
        """Listen no longer."""
        self._over.set()
        self.join()
        self._client.close()


def logged(log: Path, since_s: float, until_s: float) -> dict[int, float]:
    """Step -> time of its event, of the steps in this time."""
    found: dict[int, float] = {}
    whole, _, _ = log.read_text().rpartition("\n")
    for line in whole.splitlines():
        event = json.loads(line)
        if event["event"] == "StepReport" and since_s <= event["time_s"] <= until_s:
            found[event["step"]] = event["time_s"]
    return found


def lags(events: Mapping[int, float], had: Mapping[int, float], shown: Sequence[tuple[int, float]]) -> Lags:
    """Each step's lags; `shown` is what the page showed when, ascending."""
    steps = [step for step, _ in shown]
    page_s = [shown[bisect_left(steps, step)][1] - time_s for step, time_s in events.items()]
    return Lags([had[step] - time_s for step, time_s in events.items()], page_s)


def measure(folder: Path, rounds: int, seconds: float) -> list[Lags]:
    """Train a job and watch its page, in windows of `seconds`. Needs the test helpers on the path."""
    from browser import browser

    from orchestrator.client.blocking_client import BlockingJobClient
    from orchestrator.cluster import connection

    with connection.connected("local", cpus=4):
        import ray

        cluster = ray.get_runtime_context().gcs_address
        (folder / "lag.toml").write_text(spec(folder / "run"))
        command = [sys.executable, "-m", "orchestrator", "train", str(folder / "lag.toml"), "--detach"]
        subprocess.run([*command, "--set", f"cluster.address={cluster}"], check=True)
        client = BlockingJobClient(cluster)
        service = Service(cluster, folder)
        try:
            while client.view(JOB).step < 20:
                time.sleep(0.2)
            listener = Listener(service)
            listener.start()
            found = []
            with browser(service.address, folder / "profile") as window:
                window.driver.get(window.address + "/login")
                window.log_in(service.token)
                window.open(f"/jobs/{JOB}")
                window.script(WATCH)
                for _ in range(rounds):
                    time.sleep(2)
                    began_s = time.time()
                    time.sleep(seconds)
                    events = logged(folder / "run" / "events.jsonl", began_s, time.time())
                    last = max(events)
                    window.until(f"return shown.at(-1)?.[0] >= {last}")
                    found.append(lags(events, listener.had, window.script("return shown")))
                    print(f"  {found[-1].text}", flush=True)
            listener.close()
            return found
        finally:
            service.process.terminate()
            service.process.wait()
            client.outcome(client.abort(JOB), timeout_s=60)
            client.reap(JOB, force=True)
