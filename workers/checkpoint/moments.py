"""Moments of frozen layers leave the memory of their owners once a complete checkpoint has them, and come back before
they are needed. Knows no rank and no commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.shards import WHOLE
from workers.process.host_memory import give_freed_pages_back, lies_in_memory
from workers.state.layer_state import LayerState, bring_moments_back, digest_of, leave_moments
from workers.state.stored_moments import MomentsLost, StateFile, StoredMoments, same_bits


def release(states: Iterable[LayerState], files: Mapping[int, StoredMoments]) -> int:
    """Let go of the moments that lie in `files`, layer by layer.

    Each file is read once and compared first: then it is known that this rank can have the moments back. Moments stay
    in memory where the file cannot be read or has others, where it lies in memory itself, and where the layer's states
    are shared out or have the statistics of a stability check, which move on.

    Args:
        states: live, of frozen layers none of whose parameters trains on.
        files: layer -> the file of a complete checkpoint, with no digest of its statistics yet.

    Returns:
        The bytes of the moments that have left.
    """
    gone_bytes = 0
    for state in states:
        file = files.get(state.layer)
        if (
            file is None
            or state.stored is not None
            or state.shard != WHOLE
            or state.freezing.keys() - {"energy"}
        ):
            continue
        own_bytes = sum(slot.nbytes for slots in state.slots.values() for slot in slots.values())
        if not own_bytes or lies_in_memory(file.path):
            continue
        try:
            found = file.read()
        except MomentsLost:
            continue
        if _is(found, state):
            leave_moments(
                state,
                StoredMoments(
                    path=file.path,
                    bytes=file.bytes,
                    sha256=file.sha256,
                    statistics=digest_of(state.freezing),
                ),
            )
            gone_bytes += own_bytes
    if gone_bytes:
        give_freed_pages_back()
    return gone_bytes


def bring_back(states: Iterable[LayerState], prefix: int) -> None:
    """Have the moments in memory again of the live `states` that train on above `prefix`, or of which a later
    checkpoint writes another file: their freezing statistics are others.

    Raises:
        MomentsLost: a file cannot be read.
    """
    for state in states:
        stored = state.stored
        if stored is not None and (state.layer >= prefix or stored.statistics != digest_of(state.freezing)):
            bring_moments_back(state)


def _is(file: StateFile, state: LayerState) -> bool:
    """Whether `file` has what `state` has besides weights and buffers."""
    there = {"freezing": file.freezing, **file.slots}
    here = {"freezing": state.freezing, **state.slots}
    return (
        file.updates == state.updates
        and {name: there[name].keys() for name in there} == {name: here[name].keys() for name in here}
        and all(same_bits(there[name][key], tensor) for name in here for key, tensor in here[name].items())
    )
