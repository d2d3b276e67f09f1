"""Looks at all sources of notices, each in a thread of its own, and reports each notice once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from workers.notices.node_turn import NodeTurn
from workers.notices.notice import Notice, NoticeError, Source

PATIENCE = 3
"""After so many failed looks in a row it warns."""


class Watch:
    """Watches as soon as it is made.

    Args:
        report: takes each notice, once; one that was withdrawn and comes again is another. Called on any thread.
        warn: takes a sentence on why a source has no answer, once for each source.
        turn: of the job's processes on this node, one of which looks at the node's sources. None: this process is
            alone.
    """

    def __init__(
        self,
        sources: Iterable[Source],
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
        """Stop; waits for looks under way."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _follow_in_turn(self, source: Source) -> None:
        if self._turn is None or not source.of_node:
            self._follow(source)
            return
        with self._turn.held(source.name, self._closed) as is_mine:
            if is_mine:
                self._follow(source)

    def _follow(self, source: Source) -> None:
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
