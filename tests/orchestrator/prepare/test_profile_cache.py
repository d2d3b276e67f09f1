"""Kept profiles that deserve no trust: they are told, and measured again once steps have contradicted them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_profile import made_profile
from resolving import settle_spec
from tiny_jobs import tiny

from orchestrator.events.types import ProfileDoubted
from orchestrator.prepare import profiling
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.prepare.profile_cache import OLD_S, doubts, forget_stale, mark_stale, stale
from orchestrator.prepare.profiling import key_of, obtain, write
from planner.profile import Noise, Profile

NOW_S = 1_700_000_000.0
QUIET, NOISY = Noise(others=0.02, spread=0.05), Noise(others=0.62, spread=0.1)
PROFILE = replace(made_profile(["a", "b"], [10, 10], 2), key="abc", measured_s=NOW_S, noise=QUIET)
DOUBT = ProfileDoubted(
    key="abc", profile_s=NOW_S, disturbed="", predicted_s=1.02, took_s=0.3, step=25, again=True
)


def of_kind(kind: str, noise: Noise) -> Profile:
    device = replace(PROFILE.cluster.devices[0], kind=kind)
    return replace(PROFILE, noise=noise, cluster=replace(PROFILE.cluster, devices=(device,) * 2))


def test_noise_and_age_are_told_with_their_numbers() -> None:
    assert doubts(PROFILE, NOW_S + 60) == ()
    (noisy,) = doubts(replace(PROFILE, noise=NOISY), NOW_S + 60)
    assert noisy.startswith(
        "the profile of 2023-11-14 is noisy: while it was measured, other work took 62.0 % of the processors."
    )
    (spread,) = doubts(replace(PROFILE, noise=Noise(others=0.0, spread=0.5)), NOW_S)
    assert "its repeats differed by 50.0 %" in spread
    (old,) = doubts(PROFILE, NOW_S + OLD_S + 86_400 * 2)
    assert old == "the profile of 2023-11-14 is 9 days old; freshet profile measures again"
    assert doubts(replace(PROFILE, measured_s=None, noise=None), NOW_S) == ()
    assert doubts(of_kind("emulated", NOISY), NOW_S) == ()
    # Other work on the host's processors takes little from a GPU.
    assert doubts(of_kind("cuda", NOISY), NOW_S) == ()
    assert len(doubts(of_kind("cuda", Noise(others=0.0, spread=0.5)), NOW_S)) == 1


def test_a_mark_is_of_one_measurement_and_only_where_another_may_help(tmp_path: Path) -> None:
    mark_stale(tmp_path, DOUBT)  # the cache has no such profile
    assert list(tmp_path.iterdir()) == []
    write(PROFILE, tmp_path / "abc.json")
    mark_stale(tmp_path, replace(DOUBT, again=False))
    assert stale(tmp_path, PROFILE) is None
    mark_stale(tmp_path, DOUBT)
    assert str(stale(tmp_path, PROFILE)) == "steps took 300 ms, and 1.02 s were predicted"
    assert stale(tmp_path, replace(PROFILE, measured_s=NOW_S + 1)) is None
    for damage in ("{", "[]", '{"profile_s": 1}', "null"):
        (tmp_path / "abc.stale").write_text(damage)
        assert stale(tmp_path, PROFILE) is None
    forget_stale(tmp_path, "abc")
    forget_stale(tmp_path, "abc")
    assert [file.name for file in tmp_path.iterdir()] == ["abc.json"]


def test_a_profile_that_steps_contradicted_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = {"cluster": {"address": "local", "device": "cpu"}, "pipeline": {"ranks": 2, "microbatches": 2}}
    spec = absolute(tiny(tmp_path, "again", **local))
    found = outline_model(spec)
    spec = settle_spec(spec, found, {"CPU": 2})
    key = key_of(spec, 2)
    kept = replace(made_profile(found.layers, found.parameters, 2), key=key, measured_s=NOW_S, noise=NOISY)
    write(kept, tmp_path / f"{key}.json")
    noise_now = [NOISY]
    monkeypatch.setattr(profiling, "_measure", lambda spec, ranks: replace(kept, noise=noise_now[0]))
    monkeypatch.setattr(profiling.time, "time", lambda: NOW_S + 60)

    def start() -> tuple[Profile, str]:
        said: list[str] = []
        return obtain(spec, found, ranks=2, cache=tmp_path, say=said.append), "\n".join(said)

    profile, said = start()
    assert profile == kept
    assert "is noisy: while it was measured, other work took 62.0 %" in said
    doubt = replace(DOUBT, key=key)
    mark_stale(tmp_path, doubt)
    profile, said = start()
    assert profile.measured_s == NOW_S + 60
    assert "as the last profile does not hold: steps took 300 ms, and 1.02 s were predicted" in said
    assert "is noisy" in said
    assert not list(tmp_path.glob("*.stale"))
    assert start()[0] == profile

    # A quiet one does not give way to a noisy one, and waits for a quiet start.
    quiet = replace(kept, noise=QUIET)
    write(quiet, tmp_path / f"{key}.json")
    mark_stale(tmp_path, doubt)
    profile, said = start()
    assert profile == quiet
    assert "the profile of before stays" in said
    noise_now[0] = QUIET
    assert start()[0].measured_s == NOW_S + 60
    assert not list(tmp_path.glob("*.stale"))
