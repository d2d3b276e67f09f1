"""A network whose outbox frees messages at once, so that counted memory does not depend on its thread."""

import time
from typing import Any
from unittest.mock import patch

from jobs import DEVICE
from torch import Tensor

from workers.protocol.orders import Generation
from workers.transport import process_group
from workers.transport.channel import Channel
from workers.transport.open_channel import open_channel
from workers.transport.outbox import MOST, Outbox

TIMEOUT_S = 60.0


class PromptOutbox(Outbox):
    """An outbox whose sender waits until the thread has freed all messages that it may free.

    Otherwise the thread runs late on a busy machine, and each message that it has not freed adds to the peak.
    """

    def put(self, work: Any, tensor: Tensor) -> None:
        frees = self.held == MOST
        super().put(work, tensor)
        deadline_s = time.monotonic() + TIMEOUT_S
        while frees and self.held > MOST // 2:
            assert time.monotonic() < deadline_s, f"{self.held} messages have not left in {TIMEOUT_S:g} s"
            time.sleep(1e-4)


def prompt_channel(generation: Generation, rank: int) -> Channel:
    """The usual channel, with a `PromptOutbox`."""
    with patch.object(process_group, "Outbox", PromptOutbox):
        return open_channel(generation, rank, DEVICE)
