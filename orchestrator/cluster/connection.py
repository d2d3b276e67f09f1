"""Joins a Ray cluster, or starts one on this machine for the duration of a job.

A cluster of our own listens on the loopback interface only, asks for its token, and leaves no process behind.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster.actor_names import NAMESPACE
from orchestrator.cluster.address import host_and_port
from orchestrator.cluster.draining import draining
from orchestrator.cluster.here import SUBMITTED, FoundCluster, answers, find, is_on_loopback
from orchestrator.cluster.placement import Node
from orchestrator.cluster.ports import agents_announced
from workers.control.rescues import HEAD_LOST
from workers.protocol.errors import JobError

OBJECT_STORE_BYTES = 128 * 2**20
"""Only small messages pass through Ray; the ranks exchange tensors among themselves."""
ATTEMPTS = 2
"""To start our own cluster: Ray gives up after half a minute, which a busy machine can take."""
SHUTDOWN_S = 10.0
CONNECT_S = 10.0
CLUSTER_LOST_S = 2_000_000
"""Time that a driver outlives its cluster: three weeks, whose milliseconds fit into 32 bits. Ray would end the process
after a minute, in the middle of its message."""
NO_NODE = "cannot find a local Raylet"
"""Ray's message that a driver's machine is no node of the cluster."""
LEAVE_S = 3.0
"""Time limit for leaving a cluster whose head does not answer."""
GREETING, SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 4
"""Connection preface of an HTTP/2 client, and the type of frame with which a server answers."""


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

    def __init__(self, own: set[psutil.Process], address: str = "") -> None:
        self.address = address
        """`HOST:PORT` or `ray://HOST:PORT` of the cluster; empty for one of our own."""
        self._raylets = {process for process in own if process.name() == "raylet"}
        self._vital = self._raylets | {process for process in own if process.name() == "gcs_server"}

    def headless(self) -> bool:
        """Whether the cluster has lost its head, and its other processes may go on for a while. Blocks for up to a
        second."""
        if self.address:
            return not answers(self.address.removeprefix("ray://"))
        return not any(map(_gone, self._raylets)) and self.broken()

    def broken(self) -> bool:
        """Whether vital processes of our own cluster are gone: calls into it may never return."""
        return any(map(_gone, self._vital))


def _gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def connected(address: str, *, cpus: float, say: Callable[[str], None] = _to_stderr) -> Iterator[Connection]:
    """Connect as a driver of the cluster at `address`; keep the connection if there is one already.

    Args:
        address: `local`, `auto`, `HOST:PORT` or `ray://HOST:PORT`.
        cpus: what the job needs of a local cluster, which claims at least that many, whatever the machine
            has.
        say: receives which cluster `auto` was.

    Raises:
        JobError: there is no such cluster, `auto` may be several, or a job that Ray runs for a client asks for a local
            one, or another one.
    """
    stay_without_cluster(os.environ)  # pyright: ignore[reportArgumentType]
    if address == "local" and SUBMITTED in os.environ:
        raise JobError(
            "cluster.address = 'local' starts a cluster of its own, and this process is a job that was submitted to one"
            " already: name that one with --set cluster.address=auto"
        )
    if (joined := _joined_already()) is not None:
        yield Connection(set(), joined)
        return
    found = FoundCluster(address="") if address == "local" else find(address)
    if address == "local" or is_on_loopback(found.address):
        prepare_local(os.environ)  # pyright: ignore[reportArgumentType]
    if address != "local":
        address = found.address
        check_store(address)
    import ray
    import ray.job_config

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
        if found.text:
            say(f"joined the Ray cluster at {found.text}")
        with _without_ray_errors():
            yield Connection(set(psutil.Process().children()) - before, found.address)
    finally:
        family = _family(set(psutil.Process().children()) - before) if address == "local" else set()
        _leave(found.address)
        _wait_or_kill(family, patience_s)


def _joined_already() -> str | None:
    """Address of the cluster that this process is a driver of."""
    # What Ray reads as it is imported may not be set yet.
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    return ray.get_runtime_context().gcs_address


def _leave(address: str) -> None:
    """`ray.shutdown`; does not wait for a cluster that is gone.

    Args:
        address: of a cluster that is not our own; else empty.
    """
    import ray

    if not address or answers(address.removeprefix("ray://")):
        ray.shutdown()
        return
    atexit.unregister(ray.shutdown)
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)


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
            with _patient():
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
def _patient() -> Iterator[None]:
    """Have the driver that connects go on without its cluster. Ray reads its settings once, as it connects: the
    variable is not left for child processes."""
    before = os.environ.get(HEAD_LOST)
    os.environ[HEAD_LOST] = str(CLUSTER_LOST_S)
    try:
        yield
    finally:
        if before is None:
            del os.environ[HEAD_LOST]
        else:
            os.environ[HEAD_LOST] = before


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


def check_store(address: str) -> None:
    """Try to connect before Ray does, which would wait for minutes.

    Raises:
        JobError: nothing answers at `address`, or something that cannot be a cluster's control store.
    """
    target = host_and_port(address)
    assert target is not None
    try:
        with socket.create_connection(target, timeout=CONNECT_S) as connection:
            if not address.startswith("ray://") and not _greets(connection):
                raise JobError(
                    f"cluster.address = {address!r}: something answers there, but no Ray cluster. Name the port that"
                    f" `ray start --head` prints, by default {target[0]}:6379"
                )
    except OSError as error:
        raise JobError(_unreachable(address, error)) from error


def _greets(connection: socket.socket) -> bool:
    """Whether the peer speaks HTTP/2, as all of Ray's servers of calls do; with TLS that cannot be seen."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    try:
        connection.sendall(GREETING)
        answer = b""
        while len(answer) < 4 and (more := connection.recv(4096)):
            answer += more
    except ConnectionError:
        return False
    return answer[3:4] == bytes([SETTINGS])


def _unreachable(address: str, error: Exception) -> str:
    reason = str(error).strip().split("\n")[0]
    if address == "local":
        return f"could not start Ray on this machine, tried {ATTEMPTS} times: {reason}"
    if NO_NODE in str(error):
        return (
            f"cluster.address = {address!r}: a Ray cluster is there, but this machine is no node of it. Make it one"
            f" with `ray start --address={address}`, reach the cluster at ray://HOST:10001, or its jobs through a"
            " Freshet service, --address http://HOST:8270"
        )
    return (
        f"cluster.address = {address!r}: no Ray cluster answers there ({reason})."
        " `freshet clusters` lists those of this machine; start one with `ray start --head`, or use cluster.address ="
        " 'local'"
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
