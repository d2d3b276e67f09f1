"""Effects of faults on the process that they run in. Knows no phase and no step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from workers.protocol.errors import ChannelError

_STOPPER = """
import os, select, signal, sys
process, seconds = int(sys.argv[1]), float(sys.argv[2])
life = os.pidfd_open(process)
signal.pidfd_send_signal(life, signal.SIGSTOP)
# A descriptor of a process that has ended is readable: whoever kills it meanwhile leaves nothing of the drill behind.
if not select.select([life], [], [], seconds)[0]:
    signal.pidfd_send_signal(life, signal.SIGCONT)
"""


class DrillError(RuntimeError):
    """An exception that an injected fault raised."""


def kill() -> None:
    """End this process with SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """Stop all threads of this process for `seconds`; returns afterwards.

    Another process does it, as a stopped process cannot continue itself.

    Raises:
        DrillError: this system cannot stop a process.
    """
    # Without a copy of this process, and without its sockets: neighbours would think them open after a kill.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _STOPPER, str(os.getpid()), str(seconds)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DrillError(f"this process could not be stopped: {done.stderr.strip().splitlines()[-1:]}")


def lose_records(step: int) -> None:
    """Raises:
    ChannelError: as if a connection had failed within the gather of `step`.
    """
    raise ChannelError(f"a drill lost the records of commit {step}")
