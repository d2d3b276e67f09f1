"""The Ray clusters with nodes on this machine, found by their processes, and the one that `auto` means.

Never the newest of several: a command must not reach another cluster's job. Ray itself is not imported.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

import psutil

from orchestrator.cluster.address import host_and_port
from workers.protocol.errors import JobError

SUBMITTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Ray sets it for what `ray job submit` runs: the runtime environment, whose files lie in that cluster alone."""
RAY_ADDRESS = "RAY_ADDRESS"
STORE = "--gcs-address="
"""Option with which Ray tells its processes where their cluster's control store is."""
_SESSION = re.compile("--session[-_]dir=(.+)")
"""Option with the folder of their cluster's session; the control store itself gets no other address."""
ANSWER_S = 1.0
"""Limit for a store of this machine to accept a connection."""
END_S = 15.0
"""Limit for the processes of a cluster to end in good order."""
LONGEST = 60
"""Most characters of a command that started a cluster."""


@dataclass(frozen=True, kw_only=True)
class ClusterHere:
    """A cluster with a node on this machine."""

    address: str
    """`HOST:PORT` of its control store."""
    started_s: float
    """When its first process on this machine started, in seconds since the Unix epoch."""
    by: str = ""
    """The command that keeps it and ends it, as far as it still runs; a cluster of `ray start` has none."""

    @property
    def text(self) -> str:
        """The cluster in words."""
        return f"{self.address}, started {started_text(self.started_s)}{f' by {self.by}' if self.by else ''}"


@dataclass(frozen=True, kw_only=True)
class FoundCluster:
    """The cluster that an address means."""

    address: str
    """`HOST:PORT` or `ray://HOST:PORT`."""
    text: str = ""
    """The cluster in words, if the address did not name it."""


def clusters_here() -> tuple[ClusterHere, ...]:
    """The clusters with a node on this machine whose control stores answer, oldest first."""
    nodes: dict[str, list[psutil.Process]] = {}
    for address, process in _nodes():
        nodes.setdefault(address, []).append(process)
    found = []
    for address, raylets in nodes.items():
        if answers(address):
            first = min(raylets, key=lambda process: process.create_time())
            found.append(ClusterHere(address=address, started_s=first.create_time(), by=_keeper_of(first)))
    return tuple(sorted(found, key=lambda cluster: (cluster.started_s, cluster.address)))


def find(address: str, environment: Mapping[str, str] = os.environ) -> FoundCluster:
    """The cluster that `address` means: `auto` is a submitted job's own cluster, else the one that `RAY_ADDRESS` names,
    else the only one of this machine.

    Raises:
        JobError: there is none, there are several, or a submitted job names another one.
    """
    own = _above(psutil.Process()) if SUBMITTED in environment else None
    if address != "auto":
        if own is not None and not same(address, own):
            raise JobError(
                f"cluster.address = {address!r}: this process is a job of the Ray cluster at {own}, which alone has the"
                " files that came with it. Leave cluster.address at auto, or submit the job to the other cluster"
            )
        return FoundCluster(address=address)
    if own is not None:
        return FoundCluster(address=own, text=f"{_described(own)}, to which this job was submitted")
    named = environment.get(RAY_ADDRESS, "")
    if named not in ("", "auto"):
        if named.startswith(("http://", "https://")) or host_and_port(named) is None:
            raise JobError(
                f"RAY_ADDRESS = {named!r} is no address of a cluster: set it to HOST:PORT or ray://HOST:PORT, such as"
                " 127.0.0.1:6379, or unset it"
            )
        return FoundCluster(address=named, text=f"{_described(named)}, which RAY_ADDRESS names")
    clusters = list(clusters_here())
    if not clusters:
        raise JobError(
            "cluster.address = 'auto': no Ray cluster runs on this machine. Start one with `ray start --head`, name one"
            " elsewhere by its address, HOST:PORT, or use cluster.address = 'local'"
        )
    if len(clusters) > 1:
        listed = "".join(f"\n  {cluster.text}" for cluster in clusters)
        raise JobError(
            f"{len(clusters)} Ray clusters run on this machine: name one, with --address HOST:PORT, for a job with"
            f" --set cluster.address=HOST:PORT, or for all commands in FRESHET_ADDRESS or RAY_ADDRESS.{listed}"
        )
    return FoundCluster(address=clusters[0].address, text=clusters[0].text)


def _described(address: str) -> str:
    """`address`, and when the cluster started if it has a node here."""
    known = [cluster for cluster in clusters_here() if not address.startswith("ray://")]
    return next((cluster.text for cluster in known if same(cluster.address, address)), address)


def is_on_loopback(address: str) -> bool:
    """Whether `address` is that of a cluster whose store this machine has bound to the loopback interface: Ray must be
    told before it is imported."""
    port = address.rpartition(":")[2]
    return _is_loopback(address) and any(
        _is_loopback(other) and other.rpartition(":")[2] == port for other, _ in _nodes()
    )


def same(one: str, other: str) -> bool:
    """Whether two addresses mean the same control store, as far as names can be resolved."""
    first, second = host_and_port(one), host_and_port(other)
    if first is None or second is None or one.startswith("ray://") or other.startswith("ray://"):
        return one == other or one.startswith("ray://") or other.startswith("ray://")
    if first[1] != second[1]:
        return False
    mine, theirs = (_addresses_of(host) for host, _ in (first, second))
    if not mine or not theirs or mine & theirs:
        return True
    # A store listens on all of its machine's interfaces.
    own = {each.address for interface in psutil.net_if_addrs().values() for each in interface}
    return bool(mine & own) and bool(theirs & own)


def answers(address: str, timeout_s: float = ANSWER_S) -> bool:
    """Whether something accepts connections at `address`, `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
    except (OSError, ValueError):
        return False
    return True


def end_cluster(address: str) -> int:
    """End the processes of one cluster on this machine, and leave other clusters alone. Return how many there were.

    Raises:
        JobError: this machine has no process of it, or some belong to another user.
    """
    sessions = {_session_of(process) for other, process in _nodes() if same(other, address)} - {None}
    doomed = {process for process in psutil.process_iter() if _belongs(process, address, sessions)}
    doomed |= {child for process in doomed for child in _children(process)}
    # `ray start --block` ends with its cluster, and tells what it did.
    doomed -= {psutil.Process(), *psutil.Process().parents()}
    if not doomed:
        known = ", ".join(cluster.address for cluster in clusters_here()) or "none"
        raise JobError(
            f"no process of a Ray cluster at {address} runs on this machine; clusters here: {known}"
        )
    try:
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(doomed, timeout=END_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    except psutil.AccessDenied as error:
        raise JobError(
            f"process {error.pid} of the Ray cluster at {address} belongs to another user: end it as that user"
        ) from error
    psutil.wait_procs(doomed, timeout=END_S)
    return len(doomed)


def started_text(started_s: float) -> str:
    """When a cluster started, in local time."""
    moment = datetime.fromtimestamp(started_s)
    today = time.time() - started_s < 86_400 and moment.date() == datetime.now().date()
    return f"{moment:%H:%M:%S}" if today else f"{moment:%Y-%m-%d %H:%M:%S}"


def _nodes() -> Iterator[tuple[str, psutil.Process]]:
    """(address of the store, process) of each raylet on this machine."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and (address := _store_of(process.info["cmdline"] or ())):
            yield address, process


def _above(process: psutil.Process) -> str | None:
    """Address of the cluster whose raylet started `process` or one of those that did."""
    with suppress(psutil.Error):
        for parent in process.parents():
            with suppress(psutil.Error):
                if parent.name() == "raylet":
                    return _store_of(parent.cmdline())
    return None


def _store_of(arguments: Iterable[str]) -> str | None:
    return next((part.removeprefix(STORE) for part in arguments if part.startswith(STORE)), None)


def _session_of(process: psutil.Process) -> str | None:
    """The folder of the session of a process of Ray's."""
    with suppress(psutil.Error):
        for part in process.cmdline():
            if (match := _SESSION.fullmatch(part)) is not None:
                return match[1]
    return None


def _belongs(process: psutil.Process, address: str, sessions: Container[str | None]) -> bool:
    """Whether `process` is one of Ray's own of the cluster at `address`, which has these `sessions`."""
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    if (found := _store_of(arguments)) is not None:
        return same(found, address)
    session = _session_of(process)
    return session is not None and session in sessions


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _keeper_of(raylet: psutil.Process) -> str:
    """The command above `raylet`, unless that is the machine's first process: a driver's cluster ends with it."""
    with suppress(psutil.Error):
        parent = raylet.parent()
        if parent is not None and parent.pid > 1 and parent.name() not in ("systemd", "init"):
            words = [os.path.basename(word) if word.startswith("/") else word for word in parent.cmdline()]
            text = " ".join(" ".join(words).split()) or parent.name()
            text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
            return f"process {parent.pid}, {text}"
    return ""


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "localhost:"))


def _addresses_of(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()
