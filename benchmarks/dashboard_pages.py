"""How fast and how heavy a job's page is in a browser, and how far it is behind the job.

    python -m benchmarks.dashboard_pages [ROUNDS]

A service in this process shows one live job whose log is made up: 100,000 events, 20,000 steps, the newest of them with
a timeline of 5,120 actions on 16 ranks. Chromium opens the page with an empty cache; its performance API gives the
times. Then a real job of four emulated ranks trains on a local cluster, and the page of a service of its own follows it
(`benchmarks/parts/page_lag.py`). Needs Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlparse

import uvicorn

from benchmarks.parts import page_lag
from benchmarks.parts.long_job import job
from benchmarks.parts.targets import percentile, under
from dashboard.app import create_app
from dashboard.jobs.live_job import LiveJob, frame_of
from dashboard.service.access import Role, open_tokens
from dashboard.service.settings import ServiceSettings
from orchestrator.client.job_client import JobClient
from orchestrator.events.types import Issued, Record
from planner.plan import Plan
from planner.schedule.registry import build
from workers.protocol.reports import ActionSpan, TimelineReport

EVENTS, RANKS, MICROBATCHES = 100_000, 16, 160
ACTION_S = 0.001
LAG_S = 10.0
"""Length of a round in which the page follows a job."""
FIRST_VIEW = """
const [page] = performance.getEntriesByType('navigation');
const [paint] = performance.getEntriesByName('first-contentful-paint');
const files = performance.getEntriesByType('resource').filter((file) => !/api|chart_library/.test(file.name));
const parts = [page, ...files].map((file) => [file.name, file.transferSize, file.decodedBodySize]);
return {paint: paint.startTime, loaded: page.loadEventEnd, parts};
"""
LATE = """
return performance.getEntriesByName('first-contentful-paint').length
  && [...document.querySelectorAll('section[data-late]')].every(each => each.dataset.loaded)
"""
DRAW = """
const figure = document.querySelector('figure.timeline-view');
figure.classList.remove('drawn');
const began = performance.now();
freshetTimelines.drawAll(figure.parentElement);
// Reading a pixel back waits until everything is drawn.
figure.querySelector('canvas').getContext('2d').getImageData(0, 0, 1, 1);
return performance.now() - began;
"""


def records() -> Iterator[Record]:
    """The events, and at their end a plan for 16 ranks and the timeline of a step."""
    newest = None
    for newest in job(EVENTS):
        yield newest
    assert newest is not None
    plan = Plan(
        epoch=1,
        version=2,
        reason="as many ranks as the timeline has",
        layers=tuple((rank, rank + 1) for rank in range(RANKS)),
        stage_ranks=tuple(range(RANKS)),
        schedule="1f1b",
        chunks=1,
        microbatches=MICROBATCHES,
        replicas=1,
    )
    yield Record(time_s=newest.time_s, event=Issued(plan=plan))
    step = (EVENTS - 7) // 5
    for rank, program in enumerate(build("1f1b", RANKS, MICROBATCHES).programs):
        spans = tuple(
            ActionSpan(action=str(action), start_s=(rank + n) * ACTION_S, end_s=(rank + n + 0.9) * ACTION_S)
            for n, action in enumerate(program)
        )
        report = TimelineReport(step=step, rank=rank, step_s=0.4, spans=spans, memory_bytes=0)
        yield Record(time_s=newest.time_s, event=report)


def live_job() -> LiveJob:
    """The job, as the service holds it."""
    made = LiveJob("takeover", JobClient())
    for number, record in enumerate(records(), 1):
        made.view.fold(record)
        made.frames.append(frame_of(number, record))
    made.version = 1
    made.ready.set()
    return made


def serve(settings: ServiceSettings, shown: LiveJob) -> tuple[uvicorn.Server, int]:
    """Serve `shown` in a thread; return the server and its port."""
    app = create_app(settings)
    live = app.state.services.live

    async def find(name: str) -> LiveJob:
        return shown

    live.find = find
    live.jobs = lambda: [shown]
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server, server.servers[0].sockets[0].getsockname()[1]


def weight(parts: list[tuple[str, int, int]]) -> str:
    """What a page and the files that it loads weigh, in all and each."""
    sent, whole = (sum(part[place] for part in parts) / 1e3 for place in (1, 2))
    each = ", ".join(
        f"{urlparse(name).path.rpartition('/')[2]} {size / 1e3:.0f}"
        for name, _, size in sorted(parts, key=lambda part: -part[2])
        if size
    )
    text = f"page without the chart library: {sent:.0f} kB sent, {whole:.0f} kB unpacked"
    return f"{under(text, whole, 150)}: {each}"


def show_first_views(rounds: int, folder: Path) -> None:
    """Print how long the page of a job with a long log takes to show, and what it weighs."""
    from browser import browser

    settings = ServiceSettings(address=None, tokens=folder / "tokens.json", audit=folder / "audit.jsonl")
    began_s = time.perf_counter()
    shown = live_job()
    kept = f"{len(shown.view.steps):,} of {shown.view.step:,} steps kept"
    print(f"folded {shown.view.events:,} events in {time.perf_counter() - began_s:.1f} s, {kept}")
    server, port = serve(replace(settings), shown)
    views: list[dict[str, Any]] = []
    draws: list[float] = []
    for number in range(rounds):
        with browser(f"http://127.0.0.1:{port}", folder / f"profile{number}") as window:
            window.driver.get(window.address + "/login")
            window.log_in(open_tokens(settings.tokens)[Role.CONTROL])
            began_s = time.perf_counter()
            window.driver.get(window.address + "/jobs/takeover")
            window.until(LATE)
            all_s = time.perf_counter() - began_s
            views.append(window.script(FIRST_VIEW) | {"all_ms": all_s * 1e3})
            draws.append(window.script(DRAW))
            paint, loaded, whole = (views[-1][name] for name in ("paint", "loaded", "all_ms"))
            print(
                f"  round {number + 1}: painted after {paint:.0f} ms, loaded after {loaded:.0f} ms, with all sections"
                f" after {whole:.0f} ms, timeline drawn in {draws[-1]:.0f} ms",
                flush=True,
            )
    server.should_exit = True
    for what, name in (("painted", "paint"), ("loaded", "loaded"), ("loaded with all sections", "all_ms")):
        middle = median(view[name] for view in views)
        print(under(f"first view, {kept}: {what} after {middle:.0f} ms", middle, 1_000))
    print(weight(views[0]["parts"]))
    actions = sum(len(report.spans) for report in shown.view.timelines.values())
    print(under(f"timeline of {actions:,} actions drawn in {median(draws):.0f} ms", median(draws), 200))


def show_lags(rounds: int, folder: Path) -> None:
    """Print how far the page of a job that trains is behind it."""
    found = page_lag.measure(folder, rounds, LAG_S)
    page_s = [lag_s for lags in found for lag_s in lags.page_s]
    service_s = [lag_s for lags in found for lag_s in lags.service_s]
    print(
        f"live, {len(page_s)} steps: the page showed a step {median(page_s):.2f} s after its event (p50), the service"
        f" had it after {median(service_s):.2f} s"
    )
    print(under(f"live, p95: {percentile(page_s, 0.95):.2f} s", percentile(page_s, 0.95), 1))
    print(under(f"live, the slowest step: {max(page_s):.2f} s", max(page_s), 1))


def main(rounds: int) -> None:
    tests = Path(__file__).parents[1] / "tests"
    sys.path[:0] = [str(tests), str(tests / "dashboard"), str(tests / "orchestrator")]
    with tempfile.TemporaryDirectory(prefix="pages") as name:
        for part in (show_first_views, show_lags):
            folder = Path(name, part.__name__)
            folder.mkdir()
            part(rounds, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
