"""The process that keeps the Ray nodes of a rehearsal: `python -m orchestrator.rehearsal.node_keeper`, orders on input.

An order is a line of JSON, and so is each answer on its output. It goes with all its nodes when its input ends: also
when the process that gives the orders is killed. Knows no trace and no job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

import psutil

from orchestrator.cluster.connection import OBJECT_STORE_BYTES, prepare_local
from orchestrator.cluster.ports import agents_announced

NODE = {"object_store_memory": OBJECT_STORE_BYTES, "include_log_monitor": False}
"""Every node. Ray's log monitor would carry the ranks' output to the driver; the job's folder has it."""
HEALTH_CHECK_MS = 200
"""Period of Ray's health checks of a node. By default Ray takes 15 s to see that one is gone, and offers its room for
new ranks until then."""
ATTEMPTS = 3
"""Attempts to start a node; each may take half a minute."""


def keep_nodes(orders: IO[str], answers: IO[str]) -> None:
    """Start a head that holds no rank, then carry out orders until they end.

    The first answer is `{"address": HOST:PORT}`. `{"add": NAME, "resources": {...}}` starts a node; the answer is
    `{"name": NAME, "node": ID, "pid": PID}` with the process id of its raylet, or `{"name": NAME, "error": WHY}`.
    `{"gone": NAME}` says that a node was killed; it has no answer.
    """
    prepare_local(os.environ)  # pyright: ignore[reportArgumentType]
    from ray.cluster_utils import Cluster

    # Loopback and tokens come by the environment. Nodes share the fate of this process even if it is killed.
    head: dict[str, Any] = {
        "num_cpus": 0,
        "include_dashboard": False,
        **NODE,
        "_system_config": {"health_check_period_ms": HEALTH_CHECK_MS},
    }
    cluster = _started(lambda: Cluster(initialize_head=True, head_node_args=head))
    try:
        _answer(answers, {"address": cluster.address})
        nodes: dict[str, Any] = {}
        for line in orders:
            order = json.loads(line)
            if "gone" in order:
                node = nodes.pop(order["gone"])
                cluster.remove_node(node, allow_graceful=False)
                continue
            name = order["add"]
            try:
                options = NODE | _options(order["resources"])
                node = _started(lambda options=options: cluster.add_node(**options))
            except (
                Exception
            ) as error:  # whatever Ray raises: the rehearsal gets it as the answer, and other nodes stay
                _answer(answers, {"name": name, "error": f"{type(error).__name__}: {error}"})
                continue
            nodes[name] = node
            [raylet] = node.all_processes["raylet"]
            _answer(answers, {"name": name, "node": node.node_id, "pid": raylet.process.pid})
    finally:
        cluster.shutdown()


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """`resources` as Ray's nodes take them."""
    custom = dict(resources)
    return {"num_cpus": custom.pop("CPU", 0), "num_gpus": custom.pop("GPU", 0), "resources": custom}


def _started(start: Callable[[], Any]) -> Any:
    """A head or node that is up. On a busy machine Ray may give up one that would have come: it must not come later."""
    for attempt in range(1, ATTEMPTS + 1):
        before = set(psutil.Process().children())
        try:
            with agents_announced():
                return start()
        except Exception:  # Ray raises no narrower type
            for stray in set(psutil.Process().children()) - before:
                with suppress(psutil.NoSuchProcess):
                    for process in (*stray.children(recursive=True), stray):
                        process.kill()
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("no attempt was made")


def _answer(answers: IO[str], values: dict[str, Any]) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def main() -> None:
    """Orders on standard input, answers on standard output; what Ray prints goes to the error output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    keep_nodes(sys.stdin, answers)


if __name__ == "__main__":
    main()
