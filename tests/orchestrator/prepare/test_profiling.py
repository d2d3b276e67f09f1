"""Where a profile comes from: measured once, cached by what it depends on, checked against the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from resolving import settle_spec
from tiny_jobs import tiny, write_spec

from orchestrator.cli.main import main
from orchestrator.prepare import profile_reference, profiling
from orchestrator.prepare.model_outline import ModelOutline, absolute, outline_model
from orchestrator.prepare.profile_cache import CACHE_VARIABLE, cache_folder
from orchestrator.prepare.profiling import (
    key_of,
    machine_key,
    obtain,
    read,
    write,
)
from orchestrator.spec.job_spec import Spec
from planner.profile import Profile
from workers.config import ModelConfig
from workers.protocol.errors import JobError

# One process takes the measurement for all tests.
pytestmark = pytest.mark.xdist_group("profiling")

ROOT = Path(__file__).resolve().parents[3]
SMALL = {"ranks": 2, "microbatches": 2, "microbatch_size": 1}


def settled(folder: Path, **sections: dict[str, Any]) -> tuple[Spec, ModelOutline]:
    local: dict[str, Any] = {"cluster": {"address": "local", "device": "cpu"}, "pipeline": SMALL}
    spec = absolute(tiny(folder, "profiled", **{**local, **sections}))
    found = outline_model(spec)
    return settle_spec(spec, found, {"CPU": 2}), found


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Spec, ModelOutline, Profile, Path]:
    """A real measurement, and the cache that holds it."""
    folder = tmp_path_factory.mktemp("measured")
    spec, found = settled(folder)
    said: list[str] = []
    profile = obtain(spec, found, ranks=2, cache=folder / "cache", say=said.append)
    # Other work beside these tests may make it say more.
    assert said[0] == "profiling 6 layers on 2 ranks"
    return spec, found, profile, folder / "cache"


def test_a_measurement_is_of_the_spec_and_says_what_it_is(
    measured: tuple[Spec, ModelOutline, Profile, Path],
) -> None:
    spec, found, profile, _ = measured
    assert tuple(layer.name for layer in profile.model.layers) == found.layers
    assert tuple(layer.parameters for layer in profile.model.layers) == found.parameters
    assert (profile.model.microbatch_size, profile.model.precision, profile.model.threads) == (
        1,
        "float32",
        1,
    )
    assert profile.model.settings == {
        "model.family": "gpt",
        "model.heads": 2,
        "model.context": 16,
        "model.dropout": 0.0,
        "optimizer.name": "adamw",
    }
    assert len(profile.cluster.devices) == 2
    assert profile.key == key_of(spec, 2)
    assert profile.noise is not None
    assert 0 <= profile.noise.others <= 1
    assert profile.measured_s is not None
    assert profile.source.startswith("measured on ")
    assert profile.source.endswith(f"by 2 ranks on 1 machine ({profile.cluster.devices[0].name})")


def test_the_cache_is_used_until_something_that_counts_changes(
    measured: tuple[Spec, ModelOutline, Profile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found, profile, cache = measured
    calls: list[int] = []

    def measure(spec: Spec, ranks: int) -> Profile:
        calls.append(ranks)
        return replace(profile, source="again")

    monkeypatch.setattr(profiling, "_measure", measure)
    assert obtain(spec, found, ranks=2, cache=cache) == profile
    longer = spec.model_copy(update={"job": spec.job.model_copy(update={"steps": 99, "name": "other"})})
    assert obtain(longer, found, ranks=2, cache=cache) == profile
    assert calls == []
    larger = spec.model_copy(update={"pipeline": spec.pipeline.model_copy(update={"microbatch_size": 2})})
    obtain(larger, found, ranks=2, cache=cache)
    obtain(spec, found, ranks=3, cache=cache)
    assert calls == [2, 3]
    assert len(list(cache.iterdir())) == 3
    obtain(spec, found, ranks=2, cache=cache, afresh=True)
    assert calls == [2, 3, 2]


def test_keys_tell_apart_what_costs_depend_on(tmp_path: Path) -> None:
    spec, _ = settled(tmp_path)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("model", {"width": 32}),
        ("model", {"dropout": 0.5}),
        ("pipeline", {"microbatch_size": 3}),
        ("job", {"precision": "bfloat16"}),
        ("job", {"threads": 2}),
        ("cluster", {"device": "cuda"}),
        ("optimizer", {"name": "sgd"}),
    ]
    keys = {key_of(spec, 2), key_of(spec, 4)}
    for section, fields in changes:
        changed = getattr(spec, section).model_copy(update=fields)
        keys.add(key_of(spec.model_copy(update={section: changed}), 2))
    assert len(keys) == 2 + len(changes)


def test_a_machine_is_told_apart_by_the_gpus_that_its_ranks_may_use() -> None:
    one, other, smaller = ("H200", 150), ("A100", 80), ("A100", 40)
    keys = [
        machine_key("cpu", 8, gpus)
        for gpus in ([], [one], [other], [smaller], [one, one], [one, other], [other, one])
    ]
    assert len({json.dumps(key) for key in keys}) == len(keys)
    assert machine_key("cpu", 8, [one]) == machine_key("cpu", 8, [one])
    assert machine_key("cpu", 8, [one]) != machine_key("cpu", 4, [one])


def test_a_job_s_key_has_the_gpus_only_if_it_uses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = settled(tmp_path)
    on_gpus = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"device": "cuda"})})

    def keys(*gpus: tuple[str, int]) -> tuple[str, str]:
        monkeypatch.setattr("workers.devices.machine.visible_gpus", lambda: list(gpus))
        return key_of(spec, 2), key_of(on_gpus, 2)

    (cpu, gpu), (cpu_again, other_gpu) = keys(("H200", 150)), keys(("A100", 80))
    assert cpu == cpu_again
    assert len({cpu, gpu, other_gpu}) == 3


def test_keys_know_the_users_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = tmp_path / "some_users_model.py"
    code.write_text("one = 1\n")
    spec, _ = settled(tmp_path)
    spec = spec.model_copy(update={"model": ModelConfig(factory="some_users_model:make")})
    before = key_of(spec, 2)
    assert key_of(spec, 2) == before
    code.write_text("one = 2\n")
    assert key_of(spec, 2) != before


def test_a_broken_cache_is_measured_over(
    measured: tuple[Spec, ModelOutline, Profile, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found, profile, _ = measured
    monkeypatch.setattr(profiling, "_measure", lambda spec, ranks: profile)
    path = tmp_path / f"{key_of(spec, 2)}.json"
    path.write_text("{")
    assert obtain(spec, found, ranks=2, cache=tmp_path).model == profile.model
    assert read(path, found).model == profile.model
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_file_is_taken_without_a_measurement(
    measured: tuple[Spec, ModelOutline, Profile, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found, profile, _ = measured
    monkeypatch.setattr(profiling, "_measure", None)
    elsewhere = replace(profile, source="a larger machine")
    write(elsewhere, tmp_path / "some.json")
    assert obtain(spec, found, ranks=2, profile_file=tmp_path / "some.json") == elsewhere


def test_another_models_profile_is_refused(
    measured: tuple[Spec, ModelOutline, Profile, Path], tmp_path: Path
) -> None:
    spec, found, profile, _ = measured
    path = tmp_path / "profile.json"
    first, *others = profile.model.layers
    wrong = [
        ((first, *others[:-1]), "it has 5 layers, the model has 6"),
        ((replace(first, name="front"), *others), "its layer 0 is front with"),
        ((replace(first, parameters=7), *others), "its layer 0 is embed with 7 parameters"),
    ]
    for layers, problem in wrong:
        write(replace(profile, model=replace(profile.model, layers=tuple(layers))), path)
        with pytest.raises(JobError, match="another model's profile") as caught:
            obtain(spec, found, ranks=2, profile_file=path)
        assert problem in str(caught.value)


def test_a_file_that_is_no_profile_is_refused(
    measured: tuple[Spec, ModelOutline, Profile, Path], tmp_path: Path
) -> None:
    spec, found, profile, _ = measured
    path = tmp_path / "profile.json"
    with pytest.raises(JobError, match="cannot read the profile"):
        obtain(spec, found, ranks=2, profile_file=path)
    data = json.loads(profile.to_json())
    data["model"]["layers"][1]["forward_s"] = -1.0
    path.write_text(json.dumps(data))
    with pytest.raises(JobError, match=r"forward_s is -1\.0"):
        obtain(spec, found, ranks=2, profile_file=path)


def test_the_cache_folder_is_the_users() -> None:
    assert cache_folder({CACHE_VARIABLE: "/a"}) == Path("/a")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/freshet/profiles")
    assert cache_folder({}) == Path.home() / ".cache/freshet/profiles"


def test_a_model_that_does_not_work_is_told_in_its_own_words(tmp_path: Path) -> None:
    spec, found = settled(tmp_path)
    gone = spec.model_copy(update={"data": spec.data.model_copy(update={"path": (str(tmp_path / "gone"),)})})
    with pytest.raises(JobError, match="gone"):
        obtain(gone, found, ranks=1, cache=tmp_path / "cache")


def test_the_command_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    spec, out = write_spec(tmp_path, "told"), tmp_path / "told.json"
    monkeypatch.setattr(
        "sys.argv", ["freshet", "profile", str(spec), "--set", "pipeline.ranks=1", "--out", str(out)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    profile = Profile.from_json(out.read_text())
    for layer in profile.model.layers:
        assert f"{layer.name} " in printed
        assert f"{layer.parameters:,}" in printed
    assert f"wrote {out}" in printed
    assert [path.stem for path in (tmp_path / "cache").iterdir()] == [profile.key]


def test_the_reference_is_up_to_date_and_says_what_every_field_means() -> None:
    text = profile_reference.reference()
    assert "|  |" not in text
    assert (ROOT / "docs" / "profile.md").read_text() == text, (
        "run: python -m orchestrator.prepare.profile_reference > docs/profile.md"
    )
