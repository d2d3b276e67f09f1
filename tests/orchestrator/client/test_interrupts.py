"""A driver whose terminal closes counts that as a signal and discards its output."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pace import patient

from orchestrator.client.interrupts import Interrupts

ROOT = Path(__file__).parents[3]
CHILD = """
import fcntl, sys, termios, time
from orchestrator.client.interrupts import Interrupts
fcntl.ioctl(1, termios.TIOCSCTTY, 0)
with Interrupts() as interrupts:
    interrupts.hold()
    print("held", flush=True)
    while not interrupts.count:
        time.sleep(0.01)
    print("stopping", flush=True)
    open(sys.argv[1], "w").write("stopped in order")
"""


@pytest.fixture(autouse=True)
def hangups() -> Iterator[None]:
    """SIGHUP as it is by default, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_closed_terminal_stops_the_job_in_order(tmp_path: Path) -> None:
    terminal, output = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "end")],
        cwd=ROOT,
        stdin=output,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    os.close(output)
    try:
        assert b"held" in os.read(terminal, 100)
        os.close(terminal)
        assert child.wait(timeout=patient(60)) == 0
    finally:
        child.kill()
    assert (tmp_path / "end").read_text() == "stopped in order"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_signals_are_counted(number: signal.Signals) -> None:
    with Interrupts() as interrupts:
        interrupts.hold()
        os.kill(os.getpid(), number)
        assert interrupts.count == 1


def test_a_signal_whose_error_was_lost_ends_the_program_before_the_job_runs() -> None:
    with Interrupts() as interrupts:
        with suppress(KeyboardInterrupt):  # as Python does in a hook of os.fork
            os.kill(os.getpid(), signal.SIGINT)
        for ends in (interrupts.check, interrupts.hold):
            with pytest.raises(KeyboardInterrupt):
                ends()


def test_under_nohup_a_closed_terminal_is_no_signal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            interrupts.hold()
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)
