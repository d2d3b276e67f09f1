"""Ranks that measure a job as processes: where one hangs, the message names it and not those that wait for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import small_config
from pace import patient

from workers.config import DataConfig, ModelConfig
from workers.launch.profile import ProfileRequest, _exit, profile_processes
from workers.launch.waiting import waits_for_a_rank
from workers.process.output import innermost_calls, rank_log_path
from workers.protocol.errors import JobError


def test_the_rank_that_hangs_is_named_and_not_the_one_that_waits_for_it(tmp_path: Path) -> None:
    config = small_config(
        tmp_path,
        model=ModelConfig(factory="hanging_model:model", arguments={"rank": 1}),
        data=DataConfig(source="measured_model:Vectors"),
    )
    told = (
        r"^rank 1 had not measured the job after 10 s \(cluster\.timeout_s\), and was ended\n"
        r"its last calls, innermost first:\n"
    )
    with pytest.raises(JobError, match=told) as failed:
        profile_processes(ProfileRequest(config=config, ranks=2, budget_s=0.0, timeout_s=10.0))
    assert re.search(r"hanging_model\.py\", line \d+ in forward\n", str(failed.value))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (None, "an unknown exit code"),
        (3, "exit code 3"),
        (-15, "signal SIGTERM"),
        (-9, "signal SIGKILL, for want of memory or by another program"),
        (-40, "signal 40"),
    ],
)
def test_the_end_of_a_process_is_said(code: int | None, said: str) -> None:
    assert _exit(code) == said


PORT = """
from multiprocessing import Pipe
from workers.launch import profile
class Rank:
    setup = join = lambda self, *arguments: None
profile.Rank = lambda *arguments: Rank()
request = profile.ProfileRequest(config=None, ranks=2)
ours, theirs = Pipe()
"""


@pytest.mark.parametrize(
    ("prepare", "wait", "waits"),
    [
        ("from workers.transport.waiter import Waiter", "Waiter('gather').get()", True),
        (PORT, "profile._measure(request, 1, theirs)", True),
        ("from multiprocessing import Pipe; ours, theirs = Pipe()", "ours.recv()", False),
        ("import threading", "threading.Event().wait()", False),
    ],
    ids=["for a message", "for the store's port", "in a pipe of its own", "for nothing"],
)
def test_a_late_process_shows_whether_it_waits_for_a_rank(
    tmp_path: Path, prepare: str, wait: str, waits: bool
) -> None:
    code = (
        "import faulthandler",
        "from workers.process.output import keep_output",
        prepare,
        f"keep_output({str(tmp_path)!r}, 1)",
        "faulthandler.dump_traceback_later(0.5, exit=True, file=2)",
        wait,
    )
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=False, timeout=patient(60))
    calls = innermost_calls(rank_log_path(str(tmp_path), 1))
    assert calls.late
    assert waits_for_a_rank("\n".join(calls.lines)) == waits
