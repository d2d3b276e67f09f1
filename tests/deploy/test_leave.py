"""`leave.sh` on a real Ray cluster with token authentication: Ray takes the drain, and the node's raylet ends."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import DEPLOY

NODE = """
import sys
from ray.cluster_utils import Cluster

options = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "object_store_memory": 2**27}
try:
    cluster = Cluster(initialize_head=True, head_node_args=options)
except Exception:  # a busy machine may take longer than Ray waits
    cluster = Cluster(initialize_head=True, head_node_args=options)
print(cluster.address, flush=True)
sys.stdin.readline()
(raylet,) = cluster.head_node.all_processes["raylet"]
print(raylet.process.wait(20), flush=True)
cluster.shutdown()
"""
"""A node of its own process, because the token must be there before Ray is imported."""


@pytest.mark.xdist_group("test_leave")
def test_a_node_leaves_the_cluster_in_order() -> None:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("RAY_")},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
    }
    node = subprocess.Popen(
        [sys.executable, "-c", NODE],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert node.stdin is not None
    assert node.stdout is not None
    try:
        address = node.stdout.readline().strip()
        # It waits for any raylet of the machine, and others may have theirs: one second.
        done = subprocess.run(
            [DEPLOY / "leave.sh", "1"],
            env={**environment, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        node.stdin.write("\n")
        node.stdin.flush()
        assert node.stdout.readline().strip() == "0"
        assert node.wait(20) == 0
    finally:
        node.kill()
        node.wait()


def test_it_says_how_it_is_used() -> None:
    done = subprocess.run([DEPLOY / "leave.sh"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "usage: leave.sh SECONDS" in done.stderr
