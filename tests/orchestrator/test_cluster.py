"""The token of a cluster of our own: made once, for its owner alone, and never in the way of who brings one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from orchestrator.cluster import prepare_local


def test_the_first_on_a_machine_makes_a_token_and_all_others_take_it(tmp_path: Path) -> None:
    token = tmp_path / "home" / "token"
    for _ in range(2):
        environment = {"RAY_AUTH_TOKEN_PATH": str(token)}
        prepare_local(environment)
        assert "RAY_AUTH_TOKEN" not in environment
        made = token.read_text()
        assert len(made) == 32
    assert token.read_text() == made
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert os.listdir(token.parent) == ["token"]


def test_where_none_can_be_kept_it_is_this_jobs_own() -> None:
    environment = {"RAY_AUTH_TOKEN_PATH": "/dev/null/token"}
    prepare_local(environment)
    assert len(environment["RAY_AUTH_TOKEN"]) == 32


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    token = tmp_path / "token"
    for given in ({"RAY_AUTH_TOKEN": "mine"}, {"RAY_AUTH_MODE": "disabled"}):
        environment = {"RAY_AUTH_TOKEN_PATH": str(token), **given}
        prepare_local(environment)
        assert environment.items() >= given.items()
        assert not token.exists()
