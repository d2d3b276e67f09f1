"""What a resumed job adopts: searched numbers, default phases, and the plan if it still fits the request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from resolving import resolve_spec, settle_spec

from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.resumption import adopt, still_right
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from workers.config import EmulatedConfig, FreezeConfig

FOUND = ModelOutline(
    layers=("embed", "block0", "block1", "block2", "head"),
    parameters=(50, 10, 10, 10, 50),
    vocabulary=256,
    language=True,
    emulated=EmulatedConfig(),
)


def spec(steps: int = 100, freeze: FreezeConfig | None = None, **pipeline: Any) -> Spec:
    return Spec(
        job=JobConfig(name="a", steps=steps),
        pipeline=PipelineConfig.model_validate({"ranks": 2, **pipeline}),
        freeze=freeze or FreezeConfig(),
    )


def before(given: Spec) -> dict[str, Any]:
    """What `job.json` holds after an earlier start of `given`."""
    return resolve_spec(given, FOUND, {}, epoch=1).spec.model_dump(mode="json")


def test_what_was_searched_stays() -> None:
    earlier = before(spec(ranks=2, schedule="zbv", microbatches=6))
    open_ = spec(ranks="auto", schedule="auto", microbatches="auto", partition="dynpipe")
    adopted = adopt(open_, earlier).pipeline
    assert (adopted.ranks, adopted.schedule, adopted.chunks, adopted.microbatches) == (2, "zbv", 2, 6)
    assert adopted.partition == "dynpipe"


def test_what_the_spec_says_is_not_overruled() -> None:
    earlier = before(spec(ranks=2, schedule="zbv", microbatches=6))
    adopted = adopt(spec(ranks=4, schedule="1f1b", microbatches="auto"), earlier).pipeline
    assert (adopted.ranks, adopted.schedule, adopted.chunks, adopted.microbatches) == (4, "1f1b", None, 6)


def test_a_run_that_gave_the_weights_may_have_gone_on() -> None:
    given = spec()
    named = given.model_copy(update={"model": given.model.model_copy(update={"weights": "/runs/base"})})
    pinned = {"weights": "/runs/base/checkpoints/step-00000004-gen-1", "weights_sha256": "ab"}
    adopted = adopt(named, {"model": pinned}).model
    assert (adopted.weights, adopted.weights_sha256) == (pinned["weights"], "ab")
    other = adopt(
        named, {"model": {**pinned, "weights": "/runs/other/checkpoints/step-00000004-gen-1"}}
    ).model
    assert (other.weights, other.weights_sha256) == ("/runs/base", None)


def test_default_phases_stay_when_the_job_is_made_longer() -> None:
    timely = FreezeConfig(method="timelyfreeze", r_max=0.8)
    earlier = before(spec(100, timely))
    longer = resolve_spec(adopt(spec(1000, timely), earlier), FOUND, {}, epoch=2).config.freeze
    assert (longer.warm_up, longer.monitoring, longer.ramp) == (10, 20, 30)
    other = resolve_spec(
        adopt(spec(1000, FreezeConfig(method="apf")), earlier), FOUND, {}, epoch=2
    ).config.freeze
    assert other.warm_up == 100


def test_what_the_freezing_was_by_default_stays_where_a_default_has_changed_since() -> None:
    earlier = before(spec(freeze=FreezeConfig(method="apf", apf_threshold=0.01)))
    assert adopt(spec(freeze=FreezeConfig(method="apf")), earlier).freeze.apf_threshold == 0.01
    assert (
        adopt(spec(freeze=FreezeConfig(method="apf", apf_threshold=0.5)), earlier).freeze.apf_threshold == 0.5
    )
    other = FreezeConfig(method="timelyfreeze+apf")
    assert adopt(spec(freeze=other), earlier).freeze == other


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"chunks": 1}, True),
        ({"ranks": 4}, False),
        ({"replicas": 2, "ranks": 4}, False),
        ({"schedule": "gpipe"}, False),
        ({"microbatches": 8}, False),
        ({"partition": "dynpipe"}, False),
        ({"partition": (2, 3)}, True),
        ({"partition": (3, 2)}, False),
        ({"recompute": True}, False),
        ({"ranks": "auto"}, False),
    ],
)
def test_a_plan_is_kept_while_it_is_what_is_asked_for(changes: dict[str, Any], right: bool) -> None:
    plan = resolve_spec(spec(), FOUND, {}, epoch=1).plan
    assert still_right(plan, settle_spec(spec(**changes), FOUND, {}), len(FOUND.layers)) is right


def test_a_plan_that_drops_backward_passes_is_not_kept() -> None:
    """It was for the layers that were frozen by then."""
    plan = resolve_spec(spec(), FOUND, {}, epoch=1).plan
    for freeze in (FreezeConfig(), FreezeConfig(method="prefix", prefix=3, pack="off")):
        given = settle_spec(spec(freeze=freeze), FOUND, {})
        assert still_right(plan, given, len(FOUND.layers))
        assert not still_right(replace(plan, frozen=3), given, len(FOUND.layers))


def test_a_plan_of_fewer_pipelines_than_replicas_is_not_kept() -> None:
    given = spec(ranks=4, replicas=2)
    plan = resolve_spec(given, FOUND, {}, epoch=1).plan
    assert still_right(plan, settle_spec(given, FOUND, {}), len(FOUND.layers))
    assert not still_right(
        replace(plan, stage_ranks=(0, 3), pipelines=1), settle_spec(given, FOUND, {}), len(FOUND.layers)
    )


@pytest.mark.parametrize(
    ("peak", "limit", "right"), [(None, None, True), (100, 100, True), (101, 100, False), (None, 100, False)]
)
def test_a_plan_that_does_not_fit_a_new_limit_is_not_kept(
    peak: int | None, limit: int | None, right: bool
) -> None:
    plan = replace(resolve_spec(spec(), FOUND, {}, epoch=1).plan, predicted_peak_memory_bytes=peak)
    asked = spec().model_copy(update={"cluster": ClusterConfig(memory_per_rank_bytes=limit)})
    assert still_right(plan, settle_spec(asked, FOUND, {}), len(FOUND.layers)) is right
