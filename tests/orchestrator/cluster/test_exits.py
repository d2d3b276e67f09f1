"""How a rank's process ended, parsed from Ray's own message (Ray 2.60)."""

from __future__ import annotations

import pytest

from orchestrator.cluster.exits import UNKNOWN, cause_of_death

DIED = "The actor died unexpectedly before finishing this task.\n\tpid: 16101\n"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:"
            " Worker exits unexpectedly. Worker exits with an exit code 4.",
            "exit code 4",
        ),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail:"
            " Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1)"
            " the process was killed by the OOM killer due to high memory usage",
            UNKNOWN,
        ),
        ("The actor died because its node has died. Node Id: 3f", "its node is gone"),
        ("The actor is dead because it was killed by `ray.kill`.", "killed by ray.kill"),
        (
            "Task was killed due to the node running low on memory.",
            "Ray killed it because its node ran low on memory",
        ),
    ],
)
def test_the_cause_is_what_ray_knows(text: str, cause: str) -> None:
    assert cause_of_death(DIED + text) == cause
