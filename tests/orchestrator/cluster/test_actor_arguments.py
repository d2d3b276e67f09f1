from __future__ import annotations

import pickle

from orchestrator.cluster.actor_arguments import from_pieces, in_pieces

KEPT_BYTES = 100 * 1024
"""Ray keeps an argument of at most this size with the actor."""


def test_arguments_of_any_size_come_back_from_pieces_that_are_kept_with_the_actor() -> None:
    arguments = ({"order": 1}, bytes(range(256)) * 2000, None)
    pieces = in_pieces(*arguments)
    assert from_pieces(tuple(pieces)) == arguments
    assert len(pieces) > 1
    assert max(len(pickle.dumps(piece)) for piece in pieces) < KEPT_BYTES
