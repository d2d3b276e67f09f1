"""Notices that reach a rank itself, on a real Ray cluster: a signal, and the file of its node."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray_jobs import job_of, wait_for
from tiny_jobs import tiny

from workers.actor import CONTROL, Home, RankActor
from workers.protocol.reports import NoticeReport, Report, WarningReport


def listener_class() -> Any:
    """The class of an actor in a controller's place. Defined in here: its process need not import this module."""

    class Listener:
        """Receives a rank's reports in place of a controller."""

        def __init__(self) -> None:
            self._reports: list[Report] = []

        def report(self, report: Report) -> None:
            self._reports.append(report)

        def reports(self) -> list[Report]:
            return self._reports

    return Listener


@pytest.mark.usefixtures("two_nodes")
def test_a_rank_hears_a_signal_and_the_file_of_its_node_and_goes_on(tmp_path: Path) -> None:
    spec = tiny(tmp_path, "heard", elastic={"notice_file": f"{tmp_path}/{{node}}"})
    listener: Any = ray.remote(listener_class()).remote()
    remote: Any = ray.remote(concurrency_groups={CONTROL: 2})(RankActor)  # pyright: ignore[reportCallIssue]
    rank = remote.remote(job_of(spec).config, 3, listener, None)
    home: Home = ray.get(rank.setup.remote())  # pyright: ignore[reportAssignmentType]

    def heard(count: int) -> list[Report]:
        wait_for(lambda: len(ray.get(listener.reports.remote())) >= count)
        return ray.get(listener.reports.remote())

    file = tmp_path / home.node
    file.mkdir()
    trouble = f"file does not say whether the node is to go: {file} cannot be read: Is a directory"
    assert heard(1) == [WarningReport(rank=3, text=trouble)]
    file.rmdir()
    written = tmp_path / "written"
    written.write_text("25")
    written.rename(file)
    heard(2)
    os.kill(home.pid, signal.SIGTERM)
    assert heard(3)[1:] == [
        NoticeReport(
            rank=3, source="file", left_s=25.0, text=f"{file} is there and says '25'", node=home.node
        ),
        NoticeReport(rank=3, source="sigterm", left_s=None, text="the process got SIGTERM", node=home.node),
    ]
    assert ray.get(rank.leave.remote()) is None
    assert "thread MainThread:" in ray.get(rank.stacks.remote())
    # The next signal ends the process, as Ray has set it up.
    os.kill(home.pid, signal.SIGTERM)
    wait_for(lambda: not psutil.pid_exists(home.pid))
