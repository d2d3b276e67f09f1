"""Jobs on a real Ray cluster that are planned first: the plan is logged, kept by a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_profile import made_profile
from ray_jobs import Log, state_sha256
from tiny_jobs import STEPS, tiny

from orchestrator.events import types as events
from orchestrator.history.folder import JobFolder
from orchestrator.prepare.model_outline import absolute, outline_model
from orchestrator.prepare.planning import replanner_of
from orchestrator.prepare.preparation import settle
from orchestrator.prepare.resumption import adopt
from orchestrator.prepare.settling import with_model
from orchestrator.spec.rules import check
from orchestrator.trainer import PipelineTrainer
from planner.profile import Profile

AUTO: dict[str, Any] = {"ranks": "auto", "schedule": "auto", "microbatches": "auto", "partition": "dynpipe"}


pytestmark = pytest.mark.usefixtures("two_nodes")


@pytest.fixture
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that would hold profiles if any were made."""
    monkeypatch.setenv("FRESHET_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_a_planned_job_trains_to_the_usual_bits_and_keeps_its_plan(tmp_path: Path, unmeasured: Path) -> None:
    given = tiny(tmp_path, "planned", pipeline=AUTO)
    found = outline_model(absolute(given))
    profile = tmp_path / "profile.json"
    profile.write_text(made_profile(found.layers, found.parameters, 2).to_json())

    log = Log()
    result = PipelineTrainer(given, profile=profile, observe=log).fit()
    (issued,) = log.of(events.Issued)
    plan = issued.plan
    assert plan.partition == "dynpipe"
    assert plan.predicted_step_s is not None
    assert plan.world_size <= 2
    assert plan.layers in [each.layers for each in issued.alternatives if not each.why_not]
    settled = log.of(events.Submitted)[0].spec["pipeline"]
    assert (settled["ranks"], settled["schedule"]) == (plan.world_size, plan.schedule)
    assert settled["microbatches"] == plan.microbatches
    assert result.metrics is not None
    alone = {"ranks": 1, "microbatches": plan.microbatches}
    assert result.metrics["state_sha256"] == state_sha256(tiny(tmp_path, "alone", pipeline=alone))

    longer = tiny(tmp_path, "planned", job={"steps": 2 * STEPS}, pipeline=AUTO)
    log = Log()
    PipelineTrainer(longer, resume=True, observe=log).fit()
    (kept,) = log.of(events.Issued)
    assert (kept.plan.layers, kept.plan.microbatches) == (plan.layers, plan.microbatches)
    assert kept.plan.predicted_step_s == plan.predicted_step_s
    assert log.of(events.Submitted)[0].spec["pipeline"] == settled
    # Freezing and later partitions use the same profile although no cache has it, and none on another device.
    folder = JobFolder(str(tmp_path / "planned"))
    marker = folder.marker()
    assert marker is not None
    spec = adopt(absolute(longer), marker.spec)
    emulated = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"device": "emulated"})})
    known = [
        settle(with_model(check(each), found), found, folder, resume=True, profile_file=None, say=print)
        for each in (spec, emulated)
    ]
    assert [each.profile for each in known] == [Profile.from_json(profile.read_text()), None]
    assert [replanner_of(each).profile is not None for each in known] == [True, False]
    assert not unmeasured.exists()
