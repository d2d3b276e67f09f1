"""Rescues: checkpoints that ranks write because the cluster's head is lost, at once and before Ray ends them all.

Decides on given times alone; whoever watches the head says when it is lost. Knows neither Ray nor the network.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

HEAD_LOST, HEAD_LOST_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""Environment variable with the seconds for which Ray's processes go on without the cluster's head, and its default."""
MOST = 2
"""Checkpoints for one loss: the first as soon as it is noticed, the last as late as is safe."""
RESERVE = 0.25
"""Share of the time until Ray ends the processes that is left when the last checkpoint begins, at least."""
TOOK = 2.0
"""Times as long as the first checkpoint that the last one may take."""
NOTICED_S = 15.0
"""Seconds by which another rank may notice a loss, and have all write a checkpoint, before this one does."""


def patience_s(environment: Mapping[str, str] = os.environ) -> float:
    """Seconds for which the processes of a cluster go on without its head, as far as `environment` says."""
    try:
        return float(environment.get(HEAD_LOST, HEAD_LOST_S))
    except ValueError:  # Ray refuses to start then
        return HEAD_LOST_S


@dataclass(frozen=True)
class _Written:
    begun_s: float
    ended_s: float


class Rescues:
    """The checkpoints of one rank for a lost head.

    Each rank asks for them in its commit records, and takes part in those that others ask for: whichever rank notices
    the loss first has all of them write. Thread-safe. Times are those of one clock of this machine.

    Args:
        patience_s: time from the loss of the head until Ray ends the processes of the cluster.
        then: called on every rank after each checkpoint, in the training thread.
    """

    def __init__(self, patience_s: float, then: Callable[[], None] = lambda: None) -> None:
        self.patience_s = patience_s
        self._then = then
        self._lock = threading.Lock()
        self._lost_s: float | None = None
        self._written: list[_Written] = []
        self._asked_s: float | None = None

    @property
    def lost_s(self) -> float | None:
        """When this rank found the head lost; None: it has not, or the head is back."""
        with self._lock:
            return self._lost_s

    def lost(self, now_s: float) -> None:
        """Record that the head cannot be reached."""
        with self._lock:
            if self._lost_s is None:
                self._lost_s = now_s

    def back(self) -> None:
        """Record that the head can be reached again."""
        with self._lock:
            self._lost_s = None

    def due(self, now_s: float) -> bool:
        """Whether to ask for a checkpoint of the step that is being committed. Call it at each commit: the time between
        two calls says when the next one will be."""
        with self._lock:
            step_s = 0.0 if self._asked_s is None else now_s - self._asked_s
            self._asked_s = now_s
            lost_s = self._lost_s
            if lost_s is None:
                return False
            own = [each for each in self._written if each.ended_s > lost_s - NOTICED_S]
            if not own:
                return True
            took_s = own[0].ended_s - own[0].begun_s
            last_s = lost_s + self.patience_s - max(RESERVE * self.patience_s, TOOK * took_s)
            return len(own) < MOST and now_s + step_s > last_s

    def wrote(self, begun_s: float, ended_s: float) -> None:
        """Record that all ranks wrote, or tried to write, a checkpoint."""
        with self._lock:
            self._written = [*self._written[1 - MOST :], _Written(begun_s, ended_s)]
        self._then()
