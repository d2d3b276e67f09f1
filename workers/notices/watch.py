"""Looks at all sources of notices, each in a thread of its own, and tells each notice once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from workers.notices.notice import Notice, NoticeError, Source

PATIENCE = 3
"""Looks in a row that may fail before it is said."""


class Watch:
    """Watches from its making on.

    Args:
        told: takes each notice, once; one that was withdrawn and comes again is another. Called on any thread.
        troubled: takes in words why a source has no answer, once for each source.
    """

    def __init__(
        self, sources: Iterable[Source], told: Callable[[Notice], None], troubled: Callable[[str], None]
    ) -> None:
        self._told = told
        self._troubled = troubled
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._follow, args=(source,), name=f"notices from {source.name}", daemon=True
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

    def _follow(self, source: Source) -> None:
        standing: frozenset[str] = frozenset()
        failures, said = 0, False
        while not self._closed.is_set():
            try:
                notices = source.look()
            except NoticeError as error:
                failures += 1
                if failures == PATIENCE and not said:
                    said = True
                    self._troubled(f"no word from {source.name} whether the node is to go: {error}")
            else:
                failures = 0
                for notice in notices:
                    if notice.text not in standing:
                        self._told(notice)
                standing = frozenset(notice.text for notice in notices)
            self._closed.wait(source.every_s)
