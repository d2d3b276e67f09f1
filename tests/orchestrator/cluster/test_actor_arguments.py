from __future__ import annotations

import pickle
import subprocess
import sys

from orchestrator.cluster.actor_arguments import from_pieces, in_pieces

KEPT_BYTES = 100 * 1024
"""Ray keeps an argument of at most this size with the actor."""


def test_arguments_of_any_size_come_back_from_pieces_that_are_kept_with_the_actor() -> None:
    arguments = ({"order": 1}, bytes(range(256)) * 2000, None)
    pieces = in_pieces(*arguments)
    assert from_pieces(tuple(pieces)) == arguments
    assert len(pieces) > 1
    assert max(len(pickle.dumps(piece)) for piece in pieces) < KEPT_BYTES


def test_a_command_that_submits_a_job_does_not_import_ray_before_it_has_set_its_environment() -> None:
    code = "import sys, orchestrator.client.submit; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
