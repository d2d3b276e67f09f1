"""The nodes that Ray drains."""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, int]
"""Draining node -> its deadline in milliseconds since the Unix epoch; 0: none is known."""


def draining() -> Table:
    """Return the draining nodes of the connected cluster."""
    from ray._private.state import state

    return state.get_draining_nodes()
