"""Ray nodes of this machine that come and go: processes that listen on the loopback interface only.

A node is killed as a machine is lost: its raylet and all that run under it at once, without notice. Knows no
trace and no job.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, Self

import psutil

from orchestrator.cluster.connection import SHUTDOWN_S, prepare_local
from orchestrator.events.rehearsed import NodeLife
from workers.protocol.errors import JobError

START_S = 120.0
"""Time limit for the start of a node."""
CLOSE_S = 30.0
"""Time limit for an orderly shutdown of the nodes."""


@dataclass
class _Running:
    """A node that is there."""

    life: NodeLife
    raylet: psutil.Process


class LocalNodes:
    """A cluster of nodes on this machine. A context; on leaving it nothing is left of them.

    `add`, `kill` and `notice` may be called from any thread; where the nodes can no longer be made to come and go, they
    raise JobError.
    """

    def __init__(self) -> None:
        self.address = ""
        """Address of the cluster, from entering on."""
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._running: dict[str, _Running] = {}
        self._past: list[NodeLife] = []
        self._doomed: set[str] = set()
        """Nodes to kill as soon as they are there."""
        self._notices: dict[str, float] = {}
        """Nodes that get notice as soon as they are there -> when they will be gone."""
        self._failed: dict[str, str] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._lost: str | None = None
        """Why the nodes' keeper no longer answers."""

    def __enter__(self) -> Self:
        prepare_local(os.environ)  # pyright: ignore[reportArgumentType]
        self._errors = tempfile.TemporaryFile()
        # A session of its own: Ctrl-C is for the job, the nodes stay until it has ended.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.rehearsal.node_keeper"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.curdir for path in sys.path)},
        )
        try:
            first = self._answer()
            if first is None:
                raise JobError(f"could not start Ray on this machine: {self._last_error()}")
            self.address = first["address"]
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, name: str, resources: Mapping[str, float]) -> None:
        """Start a node; returns before it is there, see `wait_for`."""
        self._check()
        self._order({"add": name, "resources": dict(resources)})

    def wait_for(self, names: set[str], timeout_s: float = START_S) -> None:
        """Until all of `names` are there.

        Raises:
            JobError: one could not be started, or not in time.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._closing
                    or self._lost is not None
                    or bool(self._failed.keys() & names)
                    or names <= self._running.keys()
                ),
                timeout_s,
            )
            for name in names:
                if name in self._failed:
                    raise JobError(f"node {name} could not be started: {self._failed[name]}")
            if missing := names - self._running.keys():
                self._check()
                raise JobError(
                    f"{len(missing)} of {len(names)} nodes were not up within {timeout_s:g} s:"
                    f" {self._last_error()}"
                )

    def kill(self, name: str) -> None:
        """Kill a node, now or as soon as it is there."""
        self._check()
        with self._changed:
            if name not in self._running:
                self._doomed.add(name)
                return
            running = self._running.pop(name)
            self._past.append(replace(running.life, down_s=time.time()))
            _kill_tree(running.raylet)
        self._order({"gone": name})

    def notice(self, name: str, gone_s: float) -> None:
        """Announce to Ray that a node will be gone at `gone_s`, since the Unix epoch; once it is there."""
        from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
        from ray.core.generated import autoscaler_pb2

        self._check()
        with self._changed:
            running = self._running.get(name)
            if running is None:
                self._notices[name] = gone_s
                return
            running.life = replace(running.life, noticed_s=time.time())
        reasons: Any = autoscaler_pb2
        GcsClient(address=self.address).drain_node(
            running.life.node,
            reasons.DRAIN_NODE_REASON_PREEMPTION,
            "preempted by the trace",
            round(gone_s * 1000),
        )

    def failed(self) -> dict[str, str]:
        """Nodes that could not be started, and why."""
        with self._changed:
            return dict(self._failed)

    def lives(self) -> tuple[NodeLife, ...]:
        """All nodes that were ever there, in the order in which they came."""
        with self._changed:
            lives = [*self._past, *(running.life for running in self._running.values())]
        return tuple(sorted(lives, key=lambda life: life.up_s))

    def close(self) -> None:
        """End all nodes; safe at any point, and again."""
        process = self._process
        if process is None:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(CLOSE_S)
        except (OSError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(family, timeout=0)
        for left in alive:
            _kill(left)
        psutil.wait_procs(alive, timeout=SHUTDOWN_S)
        if self._errors is not None:
            self._errors.close()
        self._process = None

    def _order(self, order: dict[str, Any]) -> None:
        process = self._process
        if process is None or self._closing:
            return
        assert process.stdin is not None
        with self._changed:
            try:
                process.stdin.write(json.dumps(order) + "\n")
                process.stdin.flush()
            except OSError as error:
                raise JobError(f"the nodes' keeper is gone: {self._last_error()}") from error

    def _listen(self) -> None:
        """Take in which nodes are there, until the keeper ends; the next call raises what goes wrong."""
        try:
            while (answer := self._answer()) is not None:
                self._take(answer)
            why = f"the nodes' keeper is gone: {self._last_error()}"
        except Exception as error:  # whatever Ray raises of a node that gets notice
            why = f"the nodes are out of control: {type(error).__name__}: {error}"
        with self._changed:
            if not self._closing:
                self._lost = why
            self._changed.notify_all()

    def _take(self, answer: dict[str, Any]) -> None:
        name = answer["name"]
        with self._changed:
            doomed = self._take_in(name, answer)
            self._changed.notify_all()
        if doomed:
            self.kill(name)
        elif name in self._notices:
            self.notice(name, self._notices[name])

    def _check(self) -> None:
        """Raises:
        JobError: the nodes can no longer be made to come and go.
        """
        if self._lost is not None:
            raise JobError(self._lost)

    def _take_in(self, name: str, answer: dict[str, Any]) -> bool:
        """Note what became of an order to start a node; whether it is there and to be killed."""
        if "error" in answer:
            self._failed[name] = answer["error"]
            return False
        try:
            raylet = psutil.Process(answer["pid"])
        except psutil.NoSuchProcess:
            self._failed[name] = "its raylet died at once"
            return False
        life = NodeLife(name=name, node=answer["node"], up_s=time.time())
        self._running[name] = _Running(life, raylet)
        return name in self._doomed

    def _answer(self) -> dict[str, Any] | None:
        """The keeper's next answer; None: it has ended."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def _last_error(self) -> str:
        """The last line of the keeper's errors."""
        if self._errors is None:
            return "it said nothing"
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


def _kill_tree(root: psutil.Process) -> None:
    """SIGKILL `root`, then all that run under it: the head first, so that it cannot report its children's end."""
    try:
        family = root.children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for process in (root, *family):
        _kill(process)


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
