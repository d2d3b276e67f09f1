"""Alerts and dashboard in a real Prometheus, which scrapes real expositions with the shipped configuration.

Grafana itself is not needed: its dashboard is read with Grafana's own schema, and its queries run in Prometheus.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from eventful_run import eventful
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from pace import patient

from orchestrator.events.types import Finished, Record
from orchestrator.history.job_view import JobView, fold
from orchestrator.telemetry.exposition import CONTENT_TYPE, exposition
from orchestrator.telemetry.metrics import BY_NAME

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana" / "freshet.json"
DASHBOARD: dict[str, Any] = json.loads(GRAFANA.read_text())
GUIDE = (ROOT / "docs" / "guides" / "metrics.md").read_text()
VARIABLES = {"$__rate_interval": "30s", "$job": ".*"}
"""What Grafana puts into a query."""
TOKEN = "read-token"
JOBS = {"python-docs-gpt", "orphan", "by-ray", "done", "by-ray-done"}

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs prometheus and promtool"
)


def expressions() -> list[str]:
    """Every query of the dashboard."""
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return asked + [each["expr"] for each in DASHBOARD["annotations"]["list"]]


def named(text: str) -> set[str]:
    return set(re.findall(r"\bfreshet_\w+", text))


def test_the_dashboard_and_the_alerts_name_only_metrics_of_the_table_and_the_dashboard_all() -> None:
    shown = named(" ".join(expressions()))
    assert shown == set(BY_NAME)
    rules = yaml.safe_load((DEPLOY / "rules.yaml").read_text())["groups"][0]["rules"]
    assert named(" ".join(rule["expr"] for rule in rules)) <= set(BY_NAME)


def test_the_dashboard_fits_grafanas_schema() -> None:
    """Grafana's own types read every key: what they do not know they drop."""
    register_default_plugins()
    read = Dashboard.from_json(DASHBOARD)
    written = json.loads(JSONEncoder(sort_keys=True).encode(read))
    assert list(lost(DASHBOARD, written)) == []


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Where `kept` lacks or changes what is in `given`."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from lost(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif given != kept:
        yield path


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    sources = [panel["datasource"] for panel in panels]
    sources += [target["datasource"] for panel in panels for target in panel["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "job"]


@needs_prometheus
@pytest.mark.parametrize("command", re.findall("^promtool .*$", GUIDE, re.MULTILINE))
def test_promtool_agrees_as_the_guide_has_it(command: str) -> None:
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tested_and_in_the_guide() -> None:
    assert "promtool test rules tests/orchestrator/telemetry/rules_test.yaml" in GUIDE
    rules = yaml.safe_load((DEPLOY / "rules.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((Path(__file__).parent / "rules_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert [rule["alert"] for rule in rules] == re.findall(r"^\| `(Freshet\w+)` \|", GUIDE, re.MULTILINE)
    assert {rule["alert"] for rule in rules} == fired


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **query: str) -> Any:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}", timeout=patient(10)
        ) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[dict[str, Any]]:
        return self.get("query", query=expression)["result"]


def live_view() -> JobView:
    """An eventful run whose newest event is now."""
    run = eventful()
    late_s = time.time() - run.clock_s
    view = fold(run.records)
    view.started_s += late_s
    view.recovery.commits = [
        type(commit)(**{**vars(commit), "time_s": commit.time_s + late_s}) for commit in view.recovery.commits
    ]
    return view


def finished(job: str) -> JobView:
    """The same run, straggler and all, after its end."""
    view = live_view()
    view.fold(
        Record(time_s=time.time(), event=Finished(step=view.step, state_sha256="0" * 64, stopped=False))
    )
    view.job = job
    return view


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus with the shipped configuration, but other addresses and intervals. It scrapes a service with one
    live job and one without a controller, and an endpoint of Ray's with a third job."""
    view = live_view()
    orphan = JobView(job="orphan", state="training", trouble="its controller does not answer")
    done = finished("done")
    by_ray = exposition([JobView(job="by-ray", state="training", step=5), finished("by-ray-done")])
    by_ray = by_ray.replace("freshet_", "ray_freshet_")
    refused: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics" and self.headers["Authorization"] != f"Bearer {TOKEN}":
                refused.append(self.path)
            body = by_ray if self.path == "/ray" else exposition([view, orphan, done])
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    folder = tmp_path_factory.mktemp("prometheus")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = f"127.0.0.1:{server.server_port}"
    write_configuration(folder, target)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=(log := (folder / "log").open("w")),
        stderr=subprocess.STDOUT,
    )
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        deadline_s = time.monotonic() + patient(60)
        while not is_ready(found):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, (folder / "log").read_text()
            time.sleep(0.1)
        assert not refused, "the token of the configuration is sent"
        yield found
    finally:
        process.terminate()
        process.wait()
        log.close()
        server.shutdown()
        server.server_close()


def write_configuration(folder: Path, target: str) -> None:
    shipped = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    shipped["global"] = {
        "scrape_interval": "500ms",
        "scrape_timeout": "500ms",
        "evaluation_interval": "500ms",
    }
    service, ray = shipped["scrape_configs"]
    (folder / "token").write_text(TOKEN)
    service["authorization"]["credentials_file"] = str(folder / "token")
    service["static_configs"] = [{"targets": [target]}]
    del ray["file_sd_configs"]
    ray["static_configs"] = [{"targets": [target]}]
    ray["metrics_path"] = "/ray"
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(shipped))
    shutil.copy(DEPLOY / "rules.yaml", folder)


def is_ready(prometheus: Prometheus) -> bool:
    """Whether it has scraped both endpoints at least three times and evaluated the rules."""
    try:
        rules = prometheus.get("rules")["groups"][0]["rules"]
        scrapes = prometheus.values("count_over_time(up[1m]) >= 3")
    except (OSError, LookupError):
        return False
    return len(scrapes) == 2 and all(rule["health"] == "ok" for rule in rules)


@needs_prometheus
def test_every_query_of_the_dashboard_has_an_answer(prometheus: Prometheus) -> None:
    for expression in expressions():
        asked = expression
        for variable, value in VARIABLES.items():
            asked = asked.replace(variable, value)
        found = prometheus.values(asked)
        if expression not in {each["expr"] for each in DASHBOARD["annotations"]["list"]}:
            assert found, asked
        assert {each["metric"]["job"] for each in found} <= JOBS, asked


@needs_prometheus
def test_both_scrapes_keep_the_jobs_names_and_rays_get_ours(prometheus: Prometheus) -> None:
    steps = {each["metric"]["job"]: each["value"][1] for each in prometheus.values("freshet_step")}
    assert steps == {"python-docs-gpt": "70", "orphan": "0", "by-ray": "5", "done": "70", "by-ray-done": "70"}
    assert set(steps) == JOBS
    assert {each["metric"]["job"] for each in prometheus.values("up == 1")} == {"freshet", "ray"}
    assert not prometheus.values('{__name__=~"ray_freshet_.*"}')


@needs_prometheus
def test_alerts_are_pending_for_the_jobs_that_deserve_them(prometheus: Prometheus) -> None:
    pending = {
        (alert["labels"]["alertname"], alert["labels"]["job"]) for alert in prometheus.get("alerts")["alerts"]
    }
    assert {
        ("FreshetControllerDown", "orphan"),
        ("FreshetStraggling", "python-docs-gpt"),
        ("FreshetStalled", "orphan"),
    } <= pending
    assert not [alert for alert, job in pending if job in ("done", "by-ray-done")]
    assert ("FreshetStalled", "python-docs-gpt") not in pending
    assert ("FreshetWithoutRedundancy", "python-docs-gpt") not in pending
