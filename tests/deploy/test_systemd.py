"""The units for machines of one's own: systemd takes them, and finds little that they are exposed to."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import DEPLOY

UNITS = sorted(unit.name for unit in (DEPLOY / "systemd").glob("*.service"))
PROGRAMS = Path(sys.executable).parent

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze, of the Debian package systemd, is not here",
)


def analyze(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on the units, which start the programs of this virtual environment."""
    shutil.copytree(DEPLOY / "systemd", folder, dirs_exist_ok=True)
    for unit in folder.glob("*.service"):
        text = unit.read_text().replace("/opt/freshet/bin/freshet-leave", str(DEPLOY / "leave.sh"))
        unit.write_text(text.replace("/opt/freshet/bin", str(PROGRAMS)))
    return subprocess.run(
        ["systemd-analyze", *arguments],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True,
        text=True,
    )


@needs_systemd
def test_systemd_has_nothing_to_say_against_the_units(tmp_path: Path) -> None:
    done = analyze(tmp_path, "verify", "--man=no", *(str(tmp_path / unit) for unit in UNITS))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_exposed_to_little(unit: str, tmp_path: Path) -> None:
    """On systemd's scale from 0 to 10, where 10 is a service without any limits."""
    done = analyze(
        tmp_path, "security", "--offline=true", "--threshold=25", "--no-pager", str(tmp_path / unit)
    )
    assert done.returncode == 0, done.stdout[-300:] + done.stderr


def test_the_drop_in_hardens_every_unit_and_takes_the_token_as_a_credential() -> None:
    drop_in = (DEPLOY / "systemd" / "freshet-.service.d" / "hardening.conf").read_text()
    assert all(unit.startswith("freshet-") for unit in UNITS)
    for line in (
        "NoNewPrivileges=true",
        "ProtectSystem=strict",
        "User=freshet",
        "Environment=RAY_AUTH_MODE=token",
        "LoadCredential=ray-token:/etc/freshet/ray-token",
        "Environment=RAY_AUTH_TOKEN_PATH=%d/ray-token",
    ):
        assert f"\n{line}\n" in drop_in


def test_a_worker_may_leave_before_systemd_loses_patience() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.read(DEPLOY / "systemd" / "freshet-worker.service")
    service = unit["Service"]
    leave_s = int(re.findall(r"freshet-leave (\d+)", service["ExecStop"])[0])
    assert leave_s + 10 <= int(service["TimeoutStopSec"])
