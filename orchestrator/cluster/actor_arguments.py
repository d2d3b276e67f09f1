"""The arguments of an actor that outlives its driver, in pieces that Ray keeps with the actor.

Ray keeps an argument of more than 100 KiB (`RAY_max_direct_call_object_size`) in the object store, where it belongs to
the driver. Once the driver has exited, Ray cannot restart the actor. Smaller arguments are part of what the cluster
knows of the actor: up to 10 MiB together (`RAY_task_rpc_inlined_bytes_limit`).
"""

from __future__ import annotations

from typing import Any

PIECE_BYTES = 2**16


def in_pieces(*arguments: Any) -> list[bytes]:
    """`arguments`, serialized and cut into pieces of at most `PIECE_BYTES`."""
    # Not above: a command sets what Ray reads from the environment before it is imported.
    from ray import cloudpickle

    whole: bytes = cloudpickle.dumps(arguments)
    return [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]


def from_pieces(pieces: tuple[bytes, ...]) -> Any:
    """The tuple of arguments that `in_pieces` cut into `pieces`."""
    from ray import cloudpickle

    return cloudpickle.loads(b"".join(pieces))
