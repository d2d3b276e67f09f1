"""Real Ray nodes on this machine: they come up, die without warning, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import psutil
import pytest
from pace import patient

from orchestrator.rehearsal.local_nodes import LocalNodes
from workers.protocol.errors import JobError

Told = TypeVar("Told")


def family() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def told(ask: Callable[[], Told]) -> Told | None:
    """What `ask` returns about a process; None if the process has just ended, as Ray's often do."""
    try:
        return ask()
    except psutil.NoSuchProcess:
        return None


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=patient(20))
    return not [process for process in alive if told(process.status) not in (None, psutil.STATUS_ZOMBIE)]


def test_nodes_come_are_killed_whole_and_leave_nothing() -> None:
    before = set(family())
    with LocalNodes() as nodes:
        assert nodes.address.startswith("127.0.0.1:")
        nodes.add("a", {"CPU": 1})
        nodes.add("b", {"CPU": 1, "slot": 1})
        nodes.wait_for({"a", "b"})
        # Dead raylets of earlier clusters may come to this process only now.
        dead = psutil.STATUS_ZOMBIE
        ours = [process for process in family() if process not in before and told(process.status) != dead]
        listening = [
            connection.laddr.ip
            for process in ours
            for connection in told(lambda process=process: process.net_connections("inet")) or []
            if connection.status == psutil.CONN_LISTEN
        ]
        assert {address.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
        # In the order in which they were started; their numbers may have begun anew in between.
        raylets = sorted(
            (process for process in ours if told(process.name) == "raylet"),
            key=lambda process: process.create_time(),
        )
        assert len(raylets) == 3
        # b's raylet was started last.
        doomed = [raylets[-1], *raylets[-1].children(recursive=True)]
        assert len(doomed) > 1
        nodes.kill("b")
        assert gone(doomed)
        nodes.add("c", {"CPU": 1})
        nodes.kill("c")  # before it is up
        nodes.add("d", {"CPU": 1})
        nodes.wait_for({"d"})
        with pytest.raises(JobError, match="1 of 2 nodes were not up within 0 s"):
            nodes.wait_for({"d", "e"}, timeout_s=0)
        nodes.notice("d", gone_s=time.time() + 60)
        lives = {life.name: life for life in nodes.lives()}
        assert lives["d"].noticed_s is not None
        assert [life.name for life in nodes.lives()] == ["a", "b", "c", "d"]
        assert lives["a"].down_s is lives["d"].down_s is None
        assert lives["b"].down_s is not None
        assert lives["b"].down_s > lives["b"].up_s
        assert len({life.node for life in lives.values()}) == 4
        ours = [process for process in family() if process not in before]
    assert gone(ours)


def test_nodes_go_with_a_driver_that_is_killed() -> None:
    script = (
        "import time\nfrom orchestrator.rehearsal.local_nodes import LocalNodes\n"
        "with LocalNodes() as nodes:\n    print('up', flush=True)\n    time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline() == "up\n"
    ours = psutil.Process(driver.pid).children(recursive=True)
    assert any(told(process.name) == "raylet" for process in ours)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + patient(150)
    while not gone(ours):
        assert time.monotonic() < deadline


def test_nodes_that_can_no_longer_be_told_anything_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, answers = LocalNodes(), iter([{"name": "a", "node": "id", "pid": os.getpid()}])

    def notice(name: str, gone_s: float) -> None:
        raise RuntimeError(f"drain_node of {name} failed")

    monkeypatch.setattr(nodes, "_answer", lambda: next(answers, None))
    monkeypatch.setattr(nodes, "notice", notice)
    nodes._notices["a"] = time.time()
    nodes._listen()
    for act in (lambda: nodes.add("b", {}), lambda: nodes.kill("a"), lambda: nodes.wait_for({"b"})):
        with pytest.raises(JobError, match="out of control: RuntimeError: drain_node of a failed"):
            act()
