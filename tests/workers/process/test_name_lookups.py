"""A silent name server delays nobody for long."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pace import patient

from workers.process.name_lookups import RESOLVER, keep_lookups_short

LOOK_UP = """
import socket, sys, time
if sys.argv[1] == "short":
    from workers.process.name_lookups import keep_lookups_short
    keep_lookups_short()
begun_s = time.monotonic()
try:
    socket.getnameinfo(("203.0.113.7", 80), socket.NI_NUMERICSERV)
except socket.gaierror:
    pass
print(time.monotonic() - begun_s)
"""


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RES_OPTIONS", "")
    monkeypatch.delenv("RES_OPTIONS")
    keep_lookups_short()
    assert os.environ["RES_OPTIONS"] == RESOLVER
    monkeypatch.setenv("RES_OPTIONS", "rotate")
    keep_lookups_short()
    assert os.environ["RES_OPTIONS"] == "rotate"


def has_mounts_of_its_own() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "--mount", "true"], check=False).returncode == 0


@pytest.mark.skipif(not has_mounts_of_its_own(), reason="needs a mount namespace of its own")
def test_a_silent_name_server_is_asked_for_three_seconds(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        try:
            silent.bind(("127.0.0.53", 53))
        except OSError:
            pytest.skip("something serves names here")
        resolver = tmp_path / "resolv.conf"
        resolver.write_text("nameserver 127.0.0.53\n")

        def seconds(how: str) -> float:
            mount = f"mount --bind {resolver} /etc/resolv.conf"
            command = f'{mount} && exec "$0" -c "$1" {how}'
            environment = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"}
            return float(
                subprocess.run(
                    ["unshare", "--mount", "sh", "-c", command, sys.executable, LOOK_UP],
                    env=environment,
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=patient(60),
                ).stdout
            )

        if (without := seconds("long")) < 1:
            pytest.skip("this machine asks no name server")
        assert without > 9.5
        assert 2.5 < seconds("short") < 6
