"""The job's folder: which job owns it, and what may start or continue there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from resolving import resolve_spec

from orchestrator.events import types as events
from orchestrator.events.log import EventLog
from orchestrator.history.folder import EVENTS, LOCK, MARKER, PROFILE, JobFolder, starting_points
from orchestrator.prepare.model_outline import ModelOutline, absolute
from orchestrator.spec.job_spec import JobConfig, Spec
from workers.checkpoint.manifest import Manifest
from workers.config import ElasticConfig, EmulatedConfig, ModelConfig, WorkerConfig
from workers.protocol.errors import JobError
from workers.protocol.orders import Generation
from workers.protocol.reports import StepReport

STEP = StepReport(
    generation=1,
    step=7,
    loss=2.5,
    grad_norm=1.0,
    lr=0.1,
    samples=16,
    tokens=0,
    step_s=0.5,
    bubble=0.25,
    skipped=False,
)

GENERATION = Generation(number=4, epoch=1, members=(0,), store_host="h", store_port=1, timeout_s=1.0)


def log(folder: Path, *given: events.Event) -> None:
    writer = EventLog(folder / EVENTS)
    for event in given:
        writer.append(events.Record(time_s=0.0, event=event))
    writer.close()


def refusal(location: Path, *, resume: bool = False) -> str:
    with pytest.raises(JobError) as caught:
        JobFolder(str(location)).admit("mine", resume=resume)
    return str(caught.value)


def test_an_empty_or_missing_folder_takes_a_new_job_but_none_to_resume(tmp_path: Path) -> None:
    for location in (tmp_path, tmp_path / "new"):
        JobFolder(str(location)).admit("mine", resume=False)
        assert "holds no run" in refusal(location, resume=True)
    assert not (tmp_path / "new").exists()


def test_what_a_spec_check_leaves_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / LOCK).touch()
    JobFolder(str(tmp_path)).admit("mine", resume=False)


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert "holds thesis.tex and no run: choose an empty folder" in refusal(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "cannot be used: Not a directory" in refusal(tmp_path / "file")


def test_another_jobs_folder_is_refused(tmp_path: Path) -> None:
    JobFolder(str(tmp_path)).claim("theirs", {})
    for resume in (False, True):
        assert "holds another job, 'theirs', and this one is 'mine'" in refusal(tmp_path, resume=resume)


def test_a_run_of_this_job_goes_on_only_with_resume(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    folder.claim("mine", {})
    log(tmp_path, STEP)
    assert "holds a run of 'mine' with 7 steps" in refusal(tmp_path)
    assert "--resume" in refusal(tmp_path)
    folder.admit("mine", resume=True)


def test_a_run_that_never_made_a_step_may_start_again(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    folder.claim("mine", {})
    assert folder.incarnations() == (0, 0)
    log(
        tmp_path,
        events.Submitted(job="mine", epoch=1, spec={}, resume=False),
        events.Formed(generation=GENERATION, start=None, step=0),
    )
    folder.admit("mine", resume=False)
    assert folder.incarnations() == (1, 4)
    (tmp_path / "checkpoints" / "step-00000004-gen-1").mkdir(parents=True)
    assert "holds a run" in refusal(tmp_path)


@pytest.mark.parametrize("line", ["{", "{}", "null", '{"time_s": 0.0, "kind": "StepReport"}'])
def test_a_damaged_event_log_is_named_with_a_way_out(tmp_path: Path, line: str) -> None:
    folder = JobFolder(str(tmp_path))
    folder.claim("mine", {})
    log(tmp_path, STEP)
    with (tmp_path / EVENTS).open("a") as file:
        file.write(line + "\n")
    told = refusal(tmp_path)
    assert told.startswith(f"{tmp_path / EVENTS}, line 2, is no event: ")
    assert told.endswith("delete that line to do without it, or choose another job.output")
    assert "\n" not in told
    with pytest.raises(JobError, match="line 2, is no event"):
        folder.incarnations()


def test_a_claim_is_new_each_time_and_holds_the_spec(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path / "deep" / "run"))
    first, second = (folder.claim("mine", {"job": {"seed": 1}}) for _ in range(2))
    assert first.run != second.run
    assert folder.marker() == second
    assert (tmp_path / "deep" / "run" / MARKER).read_bytes() == second.to_bytes()


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"name": "mine"})])
def test_a_marker_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    assert "cannot read" in refusal(tmp_path)
    assert MARKER in refusal(tmp_path)


def test_only_one_controller_holds_a_folder(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    held = folder.lock()
    assert held is not None
    with pytest.raises(JobError, match="another run is at work"):
        JobFolder(str(tmp_path)).lock()
    with pytest.raises(JobError, match="another run is at work"):
        folder.claim("mine", {})
    assert folder.marker() is None
    held.close()
    folder.claim("mine", {})
    again = folder.lock()
    assert again is not None
    again.close()


def test_a_uri_keeps_its_log_beside_it_and_gets_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "bucket").mkdir()
    # pyarrow's own scheme for local files stands for any store; `resolve.absolute` would turn it into a path.
    location = f"file://{tmp_path}/bucket/run"
    folder = JobFolder(location)
    assert folder.lock() is None
    folder.claim("mine", {})
    assert folder.events_path.is_relative_to(tmp_path / "home")
    written = folder.open_log(1)
    written.append(events.Record(time_s=1.0, event=STEP))
    written.close()
    folder.publish_log()
    written.path.unlink()
    assert JobFolder(location).steps() == 7
    assert folder.events_path.exists()

    # The profile, which pictures need, is copied too, and another machine fetches it.
    folder.keep_profile("measured")
    beside = folder.events_path.with_name(PROFILE)
    assert beside.read_text() == (tmp_path / "bucket" / "run" / PROFILE).read_text() == "measured"
    beside.unlink()
    assert JobFolder(location).profile() == "measured"
    assert beside.exists()
    folder.keep_profile(None)
    assert JobFolder(location).profile() is None
    assert not beside.exists()


def test_a_start_without_a_profile_leaves_none_of_another(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path / "run"))
    assert folder.profile() is None
    folder.keep_profile(None)
    folder.keep_profile("measured")
    assert folder.profile() == (tmp_path / "run" / PROFILE).read_text() == "measured"
    folder.keep_profile(None)
    assert folder.profile() is None


def ranks_config(output: Path) -> WorkerConfig:
    found = ModelOutline(
        layers=("embed", "head"), parameters=(1, 1), vocabulary=256, language=True, emulated=EmulatedConfig()
    )
    spec = absolute(Spec(job=JobConfig(name="mine", output=str(output))))
    return resolve_spec(spec, found, {}, epoch=1).config


def test_a_resume_needs_a_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"holds no checkpoint: start again in another job\.output"):
        starting_points(ranks_config(tmp_path))
    checkpoint = tmp_path / "checkpoints" / "step-00000004-gen-1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(JobError, match=r"no checkpoint is readable: .*manifest\.json was altered"):
        starting_points(ranks_config(tmp_path))


def test_what_may_change_on_resume_is_told_and_may(tmp_path: Path) -> None:
    config = ranks_config(tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-00000004-gen-1"
    checkpoint.mkdir(parents=True)
    made = Manifest(
        step=4, generation=1, spec=config.model_dump(mode="json"), plan={}, layers=(), samples=0, files={}
    )
    (checkpoint / "manifest.json").write_text(made.to_json())
    other = config.model_copy(update={"elastic": ElasticConfig(redundancy="none", attempts=9)})
    assert [ref.step for ref in starting_points(other)] == [4]
    weights = ModelConfig(family="gpt", weights="/elsewhere/copy.safetensors", vocabulary=256)
    assert starting_points(config.model_copy(update={"model": weights}))
    changed = weights.model_copy(update={"weights_sha256": "other"})
    with pytest.raises(JobError, match=r"model\.weights_sha256 was None and is 'other'"):
        starting_points(config.model_copy(update={"model": changed}))
    moved = config.data.model_copy(update={"path": ("/elsewhere/copy.txt",)})
    assert starting_points(config.model_copy(update={"data": moved}))
    another = moved.model_copy(update={"sha256": "other"})
    with pytest.raises(JobError, match=r"settings: data\.sha256 was None and is 'other'\. Set"):
        starting_points(config.model_copy(update={"data": another}))
    with pytest.raises(
        JobError, match=r"seed was 0 and is 1\. .* \[checkpoint\], \[elastic\], \[adapt\] and \[cluster\]$"
    ):
        starting_points(other.model_copy(update={"job": other.job.model_copy(update={"seed": 1})}))
    assert starting_points(config, "optimizer")
    with pytest.raises(JobError, match=r"settings: pipeline\.shard was 'none' and is 'gradients'"):
        starting_points(config, "gradients")
    made = replace(made, plan={"shard": "gradients"})
    (checkpoint / "manifest.json").write_text(made.to_json())
    assert starting_points(config, "gradients")
    with pytest.raises(JobError, match=r"settings: pipeline\.shard was 'gradients' and is 'optimizer'"):
        starting_points(config, "optimizer")
