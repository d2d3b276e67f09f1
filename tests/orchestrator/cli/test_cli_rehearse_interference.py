"""`freshet rehearse --interference`: which jobs its options make, and what it refuses before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import write_spec
from typer.testing import CliRunner

from orchestrator.cli.exit_codes import INTERRUPTED
from orchestrator.cli.main import app
from orchestrator.cli.rehearsing import RehearsalOptions
from orchestrator.cli.rehearsing_interference import InterferenceOptions, Trials, trials_of
from orchestrator.events.rehearsed import DisturbedSteps
from workers.protocol.errors import JobError

HEAVY = InterferenceOptions(level="heavy")
LONG = "job.steps=100"


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RehearsalOptions:
    monkeypatch.chdir(tmp_path)
    return RehearsalOptions(spec=write_spec(tmp_path, "a"), overrides=(LONG,))


def made(options: RehearsalOptions, given: InterferenceOptions = HEAVY) -> Trials:
    return trials_of(options, given, 2, lambda text: None)


def test_the_same_job_is_trained_without_and_with_adaptation(options: RehearsalOptions) -> None:
    done = made(options)
    off, adapted = done.specs
    assert [spec.job.name for spec in done.specs] == ["a-off", "a-measured"]
    assert [spec.adapt.policy for spec in done.specs] == ["off", "measured"]
    assert [spec.job.folder for spec in done.specs] == [
        "runs/a-interference/off",
        "runs/a-interference/measured",
    ]
    assert off.model_copy(update={"job": adapted.job, "adapt": adapted.adapt}) == adapted
    assert (adapted.pipeline.ranks, adapted.cluster.pin_cores) == (2, True)
    assert done.interference.visits == (DisturbedSteps(first=21, last=40), DisturbedSteps(first=61, last=80))
    assert done.trace is None


def test_options_change_the_neighbour_the_ranks_and_the_folder(
    options: RehearsalOptions, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "a-interference").mkdir(parents=True)
    assert made(options).folder == Path("runs/a-interference-2")
    given = InterferenceOptions(level="light", kind="memory", rank=0, every=40, beside_off=False)
    done = made(replace(options, ranks=4, out=tmp_path / "o"), given)
    (adapted,) = done.specs
    assert (adapted.pipeline.ranks, adapted.job.folder) == (4, str(tmp_path / "o" / "measured"))
    plan = done.interference
    assert (plan.kind, plan.rank, plan.visits) == ("memory", 0, (DisturbedSteps(first=41, last=80),))
    asked = replace(options, overrides=(LONG, "pipeline.ranks=3"))
    assert made(asked).specs[0].pipeline.ranks == 3


def test_several_policies_are_compared_beside_the_same_neighbour(options: RehearsalOptions) -> None:
    done = made(options, InterferenceOptions(level="heavy", policies=("measured", "forest")))
    assert [spec.adapt.policy for spec in done.specs] == ["off", "measured", "forest"]
    assert len({spec.job.name for spec in done.specs}) == len({spec.job.folder for spec in done.specs}) == 3


def test_the_jobs_own_policy_is_the_one_that_is_compared(options: RehearsalOptions) -> None:
    forest = replace(options, overrides=(LONG, "adapt.policy=forest"))
    assert [spec.adapt.policy for spec in made(forest).specs] == ["off", "forest"]
    chosen = made(forest, replace(HEAVY, policies=("epoch",)))
    assert [spec.adapt.policy for spec in chosen.specs] == ["off", "epoch"]


def test_a_trace_may_be_replayed_meanwhile(options: RehearsalOptions) -> None:
    done = made(replace(options, synthetic="0.1:5", nodes=3))
    assert done.trace is not None
    assert done.trace.ranks == done.specs[0].pipeline.ranks == 3


@pytest.mark.parametrize(
    ("options_change", "change", "said"),
    [
        ({}, {"level": "severe"}, "--interference severe: expected light or heavy"),
        ({}, {"kind": "noise"}, "--kind noise: expected compute, hashes, memory"),
        ({}, {"policies": ("off",)}, "--policy off adapts nothing"),
        ({}, {"policies": ("guess",)}, "adapt.policy"),
        ({}, {"policies": ("forest", "forest")}, "one of them is named twice"),
        ({}, {"rank": 2}, "--rank 2: the job has ranks 0 to 1"),
        ({}, {"minutes": 0.0}, "--minutes 0: give the jobs more than no time"),
        ({}, {"every": 3}, "--every 3: a visit lasts at least 10 steps"),
        ({}, {"every": 100}, "--every 100: the job has 100 steps, and the neighbour would never come"),
        ({"overrides": ()}, {}, "job.steps = 6: too few"),
        ({"ranks": 1}, {}, "nowhere to move its layers"),
        ({"speedup": 2.0}, {}, "--speedup goes with a trace"),
        ({"finish": True}, {}, "--finish goes with a trace"),
        ({"overrides": (LONG, "cluster.device=cuda")}, {}, "does not slow a GPU down"),
        (
            {"overrides": (LONG, "cluster.device=emulated")},
            {"kind": "disk"},
            "no neighbour disturbs emulated devices",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: RehearsalOptions, options_change: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobError) as refused:
        made(replace(options, **options_change), replace(HEAVY, **change))
    assert said in str(refused.value)


def test_the_command_line_passes_its_options_on(options: RehearsalOptions) -> None:
    given = ["--interference", "heavy", "--kind", "noise", "--set", LONG]
    result = CliRunner().invoke(app, ["rehearse", str(options.spec), *given])
    assert isinstance(result.exception, JobError)
    assert "--kind noise" in str(result.exception)


@pytest.mark.parametrize(
    "given",
    [
        ["--policy", "forest"],
        ["--no-beside-off"],
        ["--kind", "disk"],
        ["--rank", "0"],
        ["--every", "20"],
        ["--minutes", "5"],
        ["--dashboard"],
    ],
)
def test_options_of_the_neighbour_are_refused_without_one(
    options: RehearsalOptions, given: list[str]
) -> None:
    result = CliRunner().invoke(app, ["rehearse", str(options.spec), "--synthetic", "0.1:5", *given])
    assert isinstance(result.exception, JobError)
    assert (
        str(result.exception)
        == f"{given[0]} goes with a neighbour: name one with --interference light or heavy"
    )


def test_a_signal_while_the_job_is_measured_leaves_nothing(
    options: RehearsalOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run has the same name."""
    begun: list[bool] = []

    def interrupted(*given: object, **named: object) -> None:
        begun.append(any(Path("runs/a-interference").rglob("*.sha256")))
        raise KeyboardInterrupt

    monkeypatch.setattr("orchestrator.cli.rehearsing_interference.profile_of", interrupted)
    command = ["rehearse", str(options.spec), "--interference", "heavy", "--set", LONG]
    assert CliRunner().invoke(app, command).exit_code == INTERRUPTED
    assert begun == [True], "the token cache was there"
    assert not Path("runs/a-interference").exists()
    assert made(options).folder == Path("runs/a-interference")


def test_an_error_names_the_option_that_named_the_folder(options: RehearsalOptions, tmp_path: Path) -> None:
    out = tmp_path / "o"
    (out / "off").mkdir(parents=True)
    (out / "off" / "notes.txt").touch()
    with pytest.raises(
        JobError, match=rf"^--out {out}/off holds notes\.txt and no run: choose an empty folder$"
    ):
        made(replace(options, out=out))


def test_what_can_be_known_before_is_refused_before_anything_is_measured(options: RehearsalOptions) -> None:
    given = ["rehearse", str(options.spec), "--interference", "heavy", "--set", LONG]
    result = CliRunner().invoke(app, [*given, "--ranks", "50"])
    assert "more than the model can fill" in str(result.exception)
    assert "profiling" not in result.output
    result = CliRunner().invoke(app, [*given, "--out", "/proc/none"])
    assert str(result.exception).startswith("cannot write /proc/none/profile.json: ")
    assert "profiling" not in result.output
