"""Joins a Ray cluster, or starts one on this machine for the duration of a job.

A cluster of our own listens on the loopback interface only, asks for its token, and leaves no process behind.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster.actor_names import NAMESPACE
from orchestrator.cluster.address import host_and_port
from orchestrator.cluster.draining import draining
from orchestrator.cluster.placement import Node
from orchestrator.cluster.ports import agents_announced
from workers.protocol import JobError

OBJECT_STORE_BYTES = 128 * 2**20
"""Only small messages pass through Ray; the ranks exchange tensors among themselves."""
ATTEMPTS = 2
"""To start our own cluster: Ray gives up after half a minute, which a busy machine can take."""
SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for what `ray job submit` runs: the runtime environment, whose files lie in that cluster alone."""
SHUTDOWN_S = 10.0
CONNECT_S = 10.0


def prepare_local(environment: dict[str, str]) -> None:
    """Set what Ray reads from `environment` when it is first imported, for our own cluster, and ensure that
    there is a token.

    Call it before `import ray`. Values that the user has set stay.
    """
    stay_without_cluster(environment)
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Despite its name: 0 makes Ray treat this machine as a cluster of one, bound to 127.0.0.1.
    environment.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # Ray's default adds 15: any other process on the machine would take precedence over training.
    environment.setdefault("RAY_worker_niceness", "0")
    environment.setdefault("RAY_AUTH_MODE", "token")
    if environment["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in environment:
        # Ray makes one at its first `ray.init` on a machine, but not for nodes that are started one by one.
        token_file = Path(environment.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
        if not token_file.exists():
            token = secrets.token_hex(16)
            try:
                _write_once(token_file, token)
            except OSError:
                # One in the environment serves this job and its processes.
                environment["RAY_AUTH_TOKEN"] = token


def stay_without_cluster(environment: dict[str, str]) -> None:
    """Have Ray refuse calls of a process that is connected to no cluster, as when a thread outlives its connection: it
    would start a cluster of its own. Call it before `import ray`; a value that the user has set stays."""
    environment.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


class Connection:
    """A driver's connection to a cluster; `own` are the processes that the driver started for it."""

    def __init__(self, own: set[psutil.Process]) -> None:
        self._vital = {process for process in own if process.name() in ("gcs_server", "raylet")}

    def broken(self) -> bool:
        """Whether vital processes of our own cluster are gone: calls into it may never return."""
        return any(
            not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in self._vital
        )


@contextmanager
def connected(address: str, *, cpus: float) -> Iterator[Connection]:
    """Connect as a driver of the cluster at `address`; keep the connection if there is one already.

    Args:
        address: `local`, `auto`, `HOST:PORT` or `ray://HOST:PORT`.
        cpus: what the job needs of a local cluster, which claims at least that many, whatever the machine
            has.

    Raises:
        JobError: there is no such cluster, or a job that Ray runs for a client asks for a local one.
    """
    stay_without_cluster(os.environ)  # pyright: ignore[reportArgumentType]
    if address == "local" and SUBMITTED in os.environ:
        raise JobError(
            "cluster.address = 'local' starts a cluster of its own, and this process is a job that was submitted to one"
            " already: name that one with --set cluster.address=auto"
        )
    if address == "local" or (address == "auto" and _is_on_loopback(os.environ)):
        prepare_local(os.environ)  # pyright: ignore[reportArgumentType]
    _check_reachable(address)
    import ray
    import ray.job_config

    if ray.is_initialized():
        yield Connection(set())
        return
    before = set(psutil.Process().children())
    options: dict[str, Any] = {"namespace": NAMESPACE, "log_to_driver": False, "logging_level": logging.ERROR}
    if not address.startswith("ray://"):  # where paths of this machine mean nothing
        options["job_config"] = ray.job_config.JobConfig(_py_driver_sys_path=import_paths())
    if address == "local":
        size = max(os.cpu_count() or 1, math.ceil(cpus))
        options |= {
            "num_cpus": size,
            # Ray's default is one process per core at a time, and a warning on the terminal beyond a few.
            "_system_config": {"worker_maximum_startup_concurrency": size},
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
        }
    # Ray ends what it has fully started; we end what an interruption leaves half started.
    patience_s = 0.0
    try:
        _initialise(address, options)
        patience_s = SHUTDOWN_S
        with _without_ray_errors():
            yield Connection(set(psutil.Process().children()) - before)
    finally:
        family = _family(set(psutil.Process().children()) - before) if address == "local" else set()
        ray.shutdown()
        _wait_or_kill(family, patience_s)


@contextmanager
def _without_ray_errors() -> Iterator[None]:
    """Keep what Ray's processes publish to every driver off the terminal: a raylet's death alone prints fifty
    lines of Ray's state. Freshet reports what failed, and Ray's log files have the rest."""
    from ray._private import worker

    printed = worker.print_to_stdstream
    worker.print_to_stdstream = lambda data, ignore_prefix: None
    try:
        yield
    finally:
        worker.print_to_stdstream = printed


def _initialise(address: str, options: Mapping[str, Any]) -> None:
    """`ray.init`.

    Raises:
        JobError: there is no such cluster, or one of our own does not start.
    """
    import ray
    from ray.exceptions import RayError

    if address != "local":
        try:
            ray.init(address, **options)
        except (ConnectionError, RuntimeError, RayError) as error:
            raise JobError(_unreachable(address, error)) from error
        return
    for attempt in range(1, ATTEMPTS + 1):
        before = set(psutil.Process().children())
        try:
            with _in_groups_of_their_own(), agents_announced():
                ray.init(address, **options)
            return
        except Exception as error:  # Ray raises no narrower type
            # A half-started cluster must not come up later.
            family = _family(set(psutil.Process().children()) - before)
            ray.shutdown()
            _wait_or_kill(family, 0.0)
            if attempt == ATTEMPTS:
                raise JobError(_unreachable(address, error)) from error


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Start Ray's processes in process groups of their own: a signal to this process's group is for the driver, which
    stops the job in order. Ray's processes end with the driver all the same, even where that is killed."""
    from ray._private import services

    popen: Any = services.ConsolePopen

    class GroupLeader(popen):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options, process_group=0)

    services.ConsolePopen = GroupLeader
    try:
        yield
    finally:
        services.ConsolePopen = popen


def nodes() -> tuple[Node, ...]:
    """Return the nodes of the connected cluster, without draining ones."""
    import ray
    from ray._private.state import available_resources_per_node

    going = draining()
    available: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return tuple(
        Node(
            id=node["NodeID"],
            host=node["NodeManagerAddress"],
            total=node["Resources"],
            available=available.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in going
    )


def import_paths() -> list[str]:
    """Return the entries of this process's import path that are not the interpreter's own: the user's code,
    and ours if it is not installed."""
    own = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)}
    found = [os.path.realpath(path or os.curdir) for path in sys.path]
    return list(
        dict.fromkeys(
            path
            for path in found
            if os.path.isdir(path) and not any(path.startswith(prefix + os.sep) for prefix in own)
        )
    )


def _is_on_loopback(environment: Mapping[str, str]) -> bool:
    """Whether the cluster that `auto` finds is one that `prepare_local` bound to this machine."""
    if "RAY_ADDRESS" in environment:
        return False
    raylets = [
        process.info["cmdline"] or []
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "raylet"
    ]
    return any(part.startswith("--gcs-address=127.0.0.1:") for raylet in raylets for part in raylet)


def _check_reachable(address: str) -> None:
    """Try to connect before Ray does, which would wait for minutes."""
    target = host_and_port(address)
    if target is None:
        return
    try:
        socket.create_connection(target, timeout=CONNECT_S).close()
    except OSError as error:
        raise JobError(_unreachable(address, error)) from error


def _unreachable(address: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    if address == "local":
        return f"could not start Ray on this machine, tried {ATTEMPTS} times: {reason}"
    return (
        f"cluster.address = {address!r}: no Ray cluster answers there ({reason})."
        " Start one with `ray start --head`, or use cluster.address = 'local'"
    )


def _write_once(path: Path, text: str) -> None:
    """Write a file for its owner alone, atomically; if another process was first, its content stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(text)
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _family(started: set[psutil.Process]) -> set[psutil.Process]:
    """Return `started` and all their descendants: detached actors end with the raylet, their parent."""
    return started | {child for process in started for child in _descendants(process)}


def _wait_or_kill(family: set[psutil.Process], patience_s: float) -> None:
    _, alive = psutil.wait_procs(family, timeout=patience_s)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=SHUTDOWN_S)
