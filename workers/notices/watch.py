"""Watches all sources of notices, each on a thread of its own, and reports each notice once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from workers.notices.node_turn import NodeTurn
from workers.notices.notice import Notice, NoticeError, NoticeSource

PATIENCE = 3
"""Failed looks in a row before it warns."""


class NoticeWatch:
    """Starts watching as soon as it is created.

    Args:
        report: receives each notice once; one that returns after its withdrawal is new. Called on any thread.
        warn: receives a sentence on why a source does not answer, once per source.
        turn: chooses which of the job's processes on this node watches the node's sources. None: this process
            is alone.
    """

    def __init__(
        self,
        sources: Iterable[NoticeSource],
        report: Callable[[Notice], None],
        warn: Callable[[str], None],
        turn: NodeTurn | None = None,
    ) -> None:
        self._report = report
        self._warn = warn
        self._turn = turn
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._follow_in_turn, args=(source,), name=f"notices from {source.name}", daemon=True
            )
            for source in sources
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop watching; waits for looks under way."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _follow_in_turn(self, source: NoticeSource) -> None:
        if self._turn is None or not source.of_node:
            self._follow(source)
            return
        with self._turn.held(source.name, self._closed) as is_mine:
            if is_mine:
                self._follow(source)

    def _follow(self, source: NoticeSource) -> None:
        standing: frozenset[str] = frozenset()
        failures, warned = 0, False
        while not self._closed.is_set():
            try:
                notices = source.look()
            except NoticeError as error:
                failures += 1
                if failures == PATIENCE and not warned:
                    warned = True
                    self._warn(f"{source.name} does not say whether the node is to go: {error}")
            else:
                failures = 0
                for notice in notices:
                    if notice.text not in standing:
                        self._report(notice)
                standing = frozenset(notice.text for notice in notices)
            self._closed.wait(source.every_s)
