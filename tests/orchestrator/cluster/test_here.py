"""Which cluster an address means, with two real ones on this machine; other tests may have theirs here too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from command_line import freshet_here
from ray_heads import Head, ray_head

from orchestrator.cli.exit_codes import DONE, USER_ERROR
from orchestrator.cluster import connection, here
from orchestrator.cluster.connection import connected
from orchestrator.cluster.here import SUBMITTED, ClusterHere, clusters_here, end_cluster, find, same
from workers.protocol.errors import JobError

ROOT = Path(__file__).resolve().parents[3]
A, B = "127.0.0.1:6379", "127.0.0.1:6399"


NAMING = ("RAY_ADDRESS", "FRESHET_ADDRESS", SUBMITTED)
"""Variables that name a cluster."""


def test_with_two_clusters_a_command_asks_for_the_address_and_ends_one_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMING:
        monkeypatch.delenv(name, raising=False)
    bin = Path(sys.executable).parent
    with (
        ray_head(bin, dashboard=False, RAY_AUTH_MODE="disabled") as one,
        ray_head(bin, dashboard=False, RAY_AUTH_MODE="disabled") as other,
    ):
        found = {cluster.address: cluster for cluster in clusters_here()}
        assert {one.gcs, other.gcs} <= found.keys()
        assert found[other.gcs].started_s - found[one.gcs].started_s >= 0
        assert time.time() - found[one.gcs].started_s < 600

        assert freshet_here("cancel", "mine") == USER_ERROR
        asked = capsys.readouterr().err
        assert "Ray clusters run on this machine: name one, with --address HOST:PORT" in asked
        for head in (one, other):
            assert f"\n  {found[head.gcs].text}" in asked

        by_name = subprocess.run(
            [sys.executable, "-m", "orchestrator", "jobs"],
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": other.gcs, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert by_name.stdout == "no job is running\n"
        assert (
            by_name.stderr == f"joined the Ray cluster at {found[other.gcs].text}, which RAY_ADDRESS names\n"
        )

        assert freshet_here("clusters", "--end", one.gcs) in (DONE, None)
        assert f"the Ray cluster at {one.gcs} has ended on this machine" in capsys.readouterr().out
        assert not _ray_processes(one)
        assert _ray_processes(other)
        left = {cluster.address for cluster in clusters_here()}
        assert one.gcs not in left
        assert other.gcs in left


def _ray_processes(head: Head) -> list[str]:
    """The names of Ray's servers that run in the cluster's folder."""
    return [
        process.info["name"]
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] in ("gcs_server", "raylet")
        and any(head.folder in part for part in process.info["cmdline"] or ())
    ]


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[ClusterHere]:
    """Clusters made up for a test."""
    made_up: list[ClusterHere] = []
    monkeypatch.setattr(here, "clusters_here", lambda: tuple(made_up))
    return made_up


def test_auto_is_the_only_cluster_which_is_named(clusters: list[ClusterHere]) -> None:
    with pytest.raises(
        JobError, match=r"no Ray cluster runs on this machine\. Start one with `ray start --head`"
    ):
        find("auto", {})
    clusters.append(ClusterHere(address=A, started_s=time.time() - 3 * 86_400, by="process 7, freshet train"))
    found = find("auto", {})
    assert found.address == A
    assert found.text == clusters[0].text
    assert found.text.startswith(f"{A}, started 20")
    assert found.text.endswith(" by process 7, freshet train")
    clusters.append(ClusterHere(address=B, started_s=time.time()))
    with pytest.raises(JobError, match="2 Ray clusters run on this machine"):
        find("auto", {})
    assert find(B, {}) == here.FoundCluster(address=B)


def test_ray_address_names_the_cluster_among_several(clusters: list[ClusterHere]) -> None:
    clusters += [ClusterHere(address=each, started_s=1.0) for each in (A, B)]
    assert find("auto", {"RAY_ADDRESS": B}).address == B
    assert find("auto", {"RAY_ADDRESS": "ray://h:10001"}).address == "ray://h:10001"
    for given in ("", "auto"):
        with pytest.raises(JobError, match="2 Ray clusters"):
            find("auto", {"RAY_ADDRESS": given})
    with pytest.raises(JobError, match="RAY_ADDRESS = 'http://h:8265' is no address of a cluster: set it"):
        find("auto", {"RAY_ADDRESS": "http://h:8265"})


ASKING = """
import sys
from orchestrator.cluster.here import find
from workers.protocol.errors import JobError

for address in sys.argv[1:]:
    try:
        print(find(address))
    except JobError as error:
        print(error)
"""


def test_a_submitted_job_is_in_the_cluster_of_the_raylet_above_it(tmp_path: Path) -> None:
    """Ray itself sets RAY_ADDRESS to the newest cluster of the machine, whichever the job was submitted to."""
    raylet = tmp_path / "raylet"
    raylet.write_text(f"#!/bin/sh\ncd {ROOT}\n'{sys.executable}' -c \"$ASKING\" auto {A} {B}\ntrue\n")
    raylet.chmod(0o755)
    done = subprocess.run(
        [raylet, f"--gcs-address={A}"],
        env={**os.environ, "ASKING": ASKING, SUBMITTED: "{}", "RAY_ADDRESS": B},
        capture_output=True,
        text=True,
        timeout=60,
    )
    auto, own, other = done.stdout.splitlines()
    assert auto == f"FoundCluster(address='{A}', text='{A}, to which this job was submitted')"
    assert own == f"FoundCluster(address='{A}', text='')"
    assert other.startswith(f"cluster.address = '{B}': this process is a job of the Ray cluster at {A}")


def test_one_store_has_several_names() -> None:
    assert same(A, "localhost:6379")
    assert not same(A, B)
    assert not same(A, "10.0.0.1:6379")
    assert same("no.such.host.invalid:6379", A)  # it cannot be told
    assert same("ray://127.0.0.1:10001", A)


def test_ending_an_unknown_cluster_says_which_there_are(clusters: list[ClusterHere]) -> None:
    clusters.append(ClusterHere(address=A, started_s=1.0))
    with pytest.raises(
        JobError, match=rf"no process of a Ray cluster at 127\.0\.0\.1:1 runs .* clusters here: {A}"
    ):
        end_cluster("127.0.0.1:1")


@contextmanager
def listener(answer: bytes | None) -> Iterator[str]:
    """Address of something that accepts a connection, and answers so, or never."""
    held: list[socket.socket] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            peer, _ = server.accept()
            held.append(peer)
            if answer is not None:
                peer.recv(4096)
                peer.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    for peer in held:
        peer.close()


def test_an_address_of_something_else_is_refused_before_ray_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SUBMITTED, raising=False)
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(
            JobError, match=f"'{address}': something answers there, but no Ray cluster. Name the port"
        ),
        connected(address, cpus=0),
    ):
        raise AssertionError("it connected")
    monkeypatch.setattr(connection, "CONNECT_S", 0.1)
    with (
        listener(None) as address,
        pytest.raises(
            JobError, match=rf"'{address}': no Ray cluster answers there \(.*`freshet clusters` lists"
        ),
        connected(address, cpus=0),
    ):
        raise AssertionError("it connected")


def test_a_machine_has_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store listens on all of them, and is known by one."""
    made_up = {"lo": [SimpleNamespace(address="127.0.0.1")], "eth0": [SimpleNamespace(address="10.1.2.3")]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: made_up)
    assert same(A, "10.1.2.3:6379")
    assert not same(A, "10.1.2.4:6379")
