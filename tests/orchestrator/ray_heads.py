"""Ray clusters as users start them, `ray start --head`, each with its own ports and folder, and a Python that has
Freshet's dependencies but not Freshet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from pace import patient
from ray_nodes import started

from orchestrator.cluster.ports import free_ports

OF_THIS_PROCESS = ("PYTHONPATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "ray-client-server-port",
    "metrics-export-port",
    "runtime-env-agent-port",
)


def python_without_freshet(folder: Path) -> Path:
    """The `bin` folder of an environment that imports this one's packages, but not what is installed in place."""
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Python does not read the .pth files of a folder that such a file names.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin"


@dataclass(frozen=True)
class Head:
    """A running cluster of one node."""

    url: str
    """Of Ray's dashboard."""
    gcs: str
    environment: Mapping[str, str] = field(repr=False)
    """For its clients."""
    process: subprocess.Popen[str]
    """What `ray start` runs, parent of all others."""
    folder: str


@contextmanager
def ray_head(bin: Path, *, dashboard: bool = True, **settings: str) -> Iterator[Head]:
    """A cluster that `bin/python` runs with the environment variables `settings`.

    Args:
        dashboard: without Ray's dashboard, a cluster starts sooner and takes no submitted jobs.
    """
    head = started(lambda: start(bin, settings, dashboard=dashboard))
    try:
        yield head
    finally:
        end(head)


def start(bin: Path, settings: Mapping[str, str], *, dashboard: bool) -> Head:
    """Start a cluster; raises AssertionError if it does not come up."""
    folder = tempfile.mkdtemp(prefix="fr-")  # short, because sockets are in there
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    environment = {key: value for key, value in os.environ.items() if key not in OF_THIS_PROCESS} | settings
    process = subprocess.Popen(
        [
            bin / "python",
            *("-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *(f"--{name}={port}" for name, port in ports.items()),
            *("--num-cpus=4", "--node-ip-address=127.0.0.1", f"--object-store-memory={2**27}"),
            f"--include-dashboard={str(dashboard).lower()}",
            *(f"--temp-dir={folder}", "--min-worker-port=0", "--max-worker-port=0"),
        ],
        cwd=folder,
        env=environment | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    url, gcs = f"http://127.0.0.1:{ports['dashboard-port']}", f"127.0.0.1:{ports['port']}"
    head = Head(url, gcs, environment, process, folder)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return head
    end(head)
    raise AssertionError("".join(said))


def end(head: Head) -> None:
    """End all processes of a cluster."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(head.process.pid).children(recursive=True)
        for each in (head.process, *reversed(family)):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        _, alive = psutil.wait_procs(family, timeout=patient(30))
        assert not alive
    head.process.communicate()
    shutil.rmtree(head.folder, ignore_errors=True)


def command(*arguments: str | Path) -> list[str]:
    """A command line that runs a module of this Python."""
    return [sys.executable, "-m", *map(str, arguments)]
