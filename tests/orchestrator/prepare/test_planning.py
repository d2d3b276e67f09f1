"""From a spec and a hand-made profile to a plan: every program, every `auto`, and what is impossible."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from made_profile import made_profile
from resolving import resolve_spec, settle_spec
from rich.console import Console

from orchestrator.cli.text.plan_text import show
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import Freezing, first_plan, freezing, ranks_to_profile, replanner_of
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec
from planner.profile import Profile
from planner.search.alternatives import Alternative
from planner.search.evaluate import PROGRAMS
from planner.search.search import ChosenPlan
from workers.config import EmulatedConfig, FreezeConfig, ModelConfig
from workers.protocol.errors import JobError

FOUND = ModelOutline(
    layers=("embed", "block0", "block1", "block2", "head"),
    parameters=(500, 100, 100, 100, 500),
    vocabulary=256,
    language=True,
    emulated=EmulatedConfig(),
)


def profile(ranks: int, **changes: Any) -> Profile:
    """A profile with a quick embedding and blocks that take ten times as long."""
    return made_profile(FOUND.layers, FOUND.parameters, ranks, weights=[0.1, 1, 1, 1, 0.5], **changes)


def spec(
    *, freeze: FreezeConfig | None = None, cluster: ClusterConfig | None = None, **pipeline: Any
) -> Spec:
    return Spec(
        job=JobConfig(name="a"),
        pipeline=PipelineConfig.model_validate(
            {"ranks": 2, "microbatches": 4, "microbatch_size": 2, **pipeline}
        ),
        freeze=freeze or FreezeConfig(),
        cluster=cluster or ClusterConfig(),
    )


def planned(given: Spec, measured: Profile) -> ChosenPlan:
    return first_plan(settle_spec(given, FOUND, {}), measured)


def counts(choice: ChosenPlan) -> tuple[int, ...]:
    return choice.plan.layers_per_stage


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("parameter", {(2, 3), (3, 2)}),
        ("memory", {(2, 3), (3, 2), (1, 4)}),
        ("time", {(3, 2)}),
        ("bottleneck", {(3, 2)}),
        ("dynpipe", {(3, 2), (2, 3)}),
        ((1, 4), {(1, 4)}),
    ],
)
def test_each_program_gives_a_plan_that_a_job_can_follow(
    partition: str | tuple[int, ...], expected: set[tuple[int, ...]]
) -> None:
    given = spec(partition=partition)
    choice = planned(given, profile(2))
    assert counts(choice) in expected
    done = resolve_spec(given, FOUND, {}, epoch=4, plan=choice.plan)
    assert done.plan.layers_per_stage == counts(choice)
    assert done.schedule == choice.schedule
    assert done.plan.epoch == 4
    assert done.plan.partition == (partition if isinstance(partition, str) else "explicit")
    assert done.plan.predicted_step_s == choice.prediction.step_s > 0
    assert "a step is predicted to take" in done.plan.reason


def test_dynpipe_is_not_slower_than_any_program() -> None:
    best = planned(spec(partition="dynpipe"), profile(2)).prediction.step_s
    for name in ("parameter", "memory", "time", "bottleneck"):
        assert best <= planned(spec(partition=name), profile(2)).prediction.step_s


def test_the_reason_lists_what_was_not_taken_instead_and_never_what_was() -> None:
    """A search for `dynpipe` may take a cut near dynpipe's own, which its own is no alternative to."""
    measured = made_profile(FOUND.layers, FOUND.parameters, 2, weights=[1, 3, 2, 0.5, 3])
    choice = planned(spec(partition="dynpipe"), measured)
    assert choice.programs["dynpipe"].layers != choice.plan.layers
    taken, _, others = choice.plan.reason.partition("(instead: ")
    assert "cut by dynpipe" in taken
    assert [each.split()[0] for each in others.split(", ")] == ["parameter", "memory", "time", "bottleneck"]


def test_a_search_settles_every_number() -> None:
    given = spec(ranks="auto", schedule="auto", microbatches="auto", partition="dynpipe")
    choice = planned(given, profile(4))
    done = resolve_spec(given, FOUND, {}, epoch=1, plan=choice.plan)
    settled = done.spec.pipeline
    assert (settled.ranks, settled.schedule) == (choice.plan.pipeline_ranks, choice.plan.schedule)
    assert settled.microbatches == choice.plan.microbatches == done.config.microbatches
    assert isinstance(settled.ranks, int)
    assert isinstance(settled.microbatches, int)
    assert "auto" not in (settled.schedule, settled.partition)
    assert settled.ranks > 1, "more ranks are faster on links like these"


def test_replicas_share_the_devices() -> None:
    given = spec(ranks="auto", replicas=2, partition="time")
    assert ranks_to_profile(given, layers=5, room=9) == 8
    assert ranks_to_profile(given, layers=3, room=9) == 6
    assert ranks_to_profile(given, layers=5, room=0) == 2
    assert ranks_to_profile(spec(ranks=2), layers=5, room=9) == 2
    choice = planned(given, profile(4))
    assert choice.plan.replicas == 2
    assert choice.plan.pipeline_ranks <= 2


def test_recomputed_layers_reach_plan_and_schedule() -> None:
    choice = planned(spec(partition="time", recompute=(1,)), profile(2))
    assert choice.plan.recompute == (1,)
    assert any(str(action) == "0R0" for program in choice.schedule.programs for action in program)


def test_a_table_of_the_users_own_is_planned_for(tmp_path: Any) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    choice = planned(spec(schedule=f"csv:{path}", microbatches=2, partition="bottleneck"), profile(2))
    assert choice.plan.schedule == f"csv:{path}"
    assert counts(choice) == (3, 2)


def test_a_memory_limit_binds_and_is_told() -> None:
    roomy = planned(spec(partition="time"), profile(2))
    assert roomy.prediction.fits
    tight = ClusterConfig(memory_per_rank_bytes=1000)
    with pytest.raises(JobError, match=r"^no plan: .*bytes"):
        planned(spec(partition="time", cluster=tight), profile(2))
    with pytest.raises(JobError, match=r"^no plan: "):
        planned(spec(partition="dynpipe", ranks="auto", cluster=tight), profile(2))


@pytest.mark.parametrize(
    ("pipeline", "told"),
    [
        ({"ranks": 4}, "the profile has 2 devices .made by hand., and pipeline.ranks = 4"),
        (
            {"ranks": 8, "replicas": 2},
            "the profile has 2 devices .*, and pipeline.ranks = 8 in 2 pipelines needs 4",
        ),
        (
            {"microbatch_size": 8},
            "pipeline.microbatch_size = 2 .made by hand., and the job has pipeline.microbatch_size = 8: .* or set",
        ),
        ({"partition": (2, 2)}, "pipeline.partition .* covers 4 layers, but the model has 5"),
        ({"ranks": 2, "schedule": "zbv", "partition": (3, 2)}, "stages"),
    ],
)
def test_what_cannot_be_planned(pipeline: dict[str, Any], told: str) -> None:
    with pytest.raises(JobError, match=told):
        planned(spec(**{"partition": "time", **pipeline}), profile(2))


def made_with(job: dict[str, Any], model: dict[str, Any], settings: dict[str, Any]) -> ChosenPlan:
    """The first plan of a job on a profile with these fields and settings."""
    given = spec(partition="time")
    given = given.model_copy(
        update={
            "job": given.job.model_copy(update=job),
            "model": ModelConfig(**(model if "factory" in model else {**given.model.model_dump(), **model})),
        }
    )
    made = profile(2)
    made = replace(made, model=replace(made.model, settings=settings))
    return planned(given, made)


@pytest.mark.parametrize(
    ("job", "model", "told"),
    [
        (
            {"precision": "bfloat16"},
            {},
            'job.precision = "float32" .made by hand., and the job has .* "bfloat16": ',
        ),
        (
            {"threads": 2},
            {},
            "job.threads = 1 .*, and the job has job.threads = 2: .* or set job.threads = 1",
        ),
        (
            {},
            {"context": 256},
            "model.context = 128 .*, and the job has model.context = 256: profile this job",
        ),
        ({}, {"heads": 8}, "model.heads = 4 .*, and the job has model.heads = 8"),
        (
            {},
            {"factory": "a:b"},
            'model.family = "gpt" .*, and the job has model.family = null',
        ),
    ],
)
def test_a_profile_of_another_configuration_is_refused(
    job: dict[str, Any], model: dict[str, Any], told: str
) -> None:
    settings = {"model.family": "gpt", "model.heads": 4, "model.context": 128}
    assert made_with({}, {}, settings).prediction.step_s > 0
    with pytest.raises(JobError, match=told):
        made_with(job, model, settings)


def test_a_profile_of_a_users_model_is_not_of_a_family() -> None:
    with pytest.raises(JobError, match=r'model.factory = "a:b" .*, and the job has model.factory = null'):
        made_with({}, {}, {"model.factory": "a:b", "model.arguments": {}})


def test_what_a_profile_does_not_tell_is_not_compared() -> None:
    """Older profiles and those written by hand lack fields."""
    assert made_with({}, {"context": 256, "heads": 8}, {}).prediction.step_s > 0
    with pytest.raises(JobError, match=r"made with model.tallness .*, and a spec has no such key"):
        made_with({}, {}, {"model.tallness": 3})


def test_a_profile_of_other_fixed_parameters_is_refused() -> None:
    told = (
        r"made with model.fixed = null .*, and the job has model.fixed = \[\"embed\.\*\"\]: profile this job"
    )
    with pytest.raises(JobError, match=told):
        made_with({}, {"fixed": ["embed.*"]}, {})
    made_with({}, {"fixed": ["embed.*"]}, {"model.fixed": ["embed.*"]})


def test_threads_count_on_cpus_only() -> None:
    given = spec(partition="time")
    given = given.model_copy(update={"job": given.job.model_copy(update={"threads": 4})})
    made = profile(2)
    gpus = tuple(replace(device, kind="cuda") for device in made.cluster.devices)
    on_gpus = replace(made, cluster=replace(made.cluster, devices=gpus))
    assert planned(given, on_gpus).prediction.step_s > 0


def test_the_table_begins_with_each_program_s_own_pick() -> None:
    choice = planned(spec(partition="dynpipe"), profile(2))
    others = tuple(
        Alternative(
            name="bottleneck",
            schedule="gpipe",
            ranks=2,
            microbatches=32 + number,
            layers=((0, 1), (1, 5)),
            predicted_step_s=0.001,
            why_not="0.1 % slower per sample",
        )
        for number in range(40)
    )
    choice = replace(choice, alternatives=(*others, *choice.alternatives))
    text = StringIO()
    show(Console(file=text, width=200), choice, freezing(spec(), choice), "peer", ())
    table = text.getvalue()[text.getvalue().index("alternatives") :]
    for name in PROGRAMS:
        assert name in table.partition("gpipe")[0], name
    rows = sorted(choice.alternatives, key=lambda each: each.order(choice.plan))
    assert rows[0].layers == choice.plan.layers
    assert rows[len(choice.alternatives) - 40].schedule == "gpipe"


def frozen(freeze: FreezeConfig) -> Freezing:
    given = spec(freeze=freeze, partition="time")
    return freezing(given, planned(given, profile(2)))


def test_the_freeze_program_shortens_the_window_within_its_budget() -> None:
    done = frozen(FreezeConfig(method="timelyfreeze", r_max=0.5))
    assert done.freezes
    assert done.all_frozen_s <= done.solved_s < done.unfrozen_s
    assert done.kappa == done.solved_s / done.unfrozen_s
    assert done.approximate_kappa == pytest.approx(0.5 + 0.5 * done.all_frozen_s / done.unfrozen_s)
    assert max(done.mean_per_stage) <= 0.5 + 1e-9
    assert {(stage, microbatch) for stage, microbatch, _ in done.ratios} == {
        (stage, microbatch) for stage in range(2) for microbatch in range(4)
    }
    assert done.prediction.simulation.makespan_s == pytest.approx(done.solved_s, rel=1e-6)


@pytest.mark.parametrize("method", ["none", "apf"])
def test_nothing_is_predicted_of_other_methods(method: str) -> None:
    done = frozen(FreezeConfig.model_validate({"method": method}))
    assert not done.freezes
    assert done.kappa == done.approximate_kappa == 1
    assert done.solved_s == done.unfrozen_s > done.all_frozen_s
    assert len(done.ratios) == 8


def test_a_model_without_weight_gradients_cannot_be_frozen() -> None:
    bare = profile(2)
    layers = tuple(replace(layer, weight_grad_s=0.0, matrices=()) for layer in bare.model.layers)
    bare = replace(bare, model=replace(bare.model, layers=layers))
    given = spec(freeze=FreezeConfig(method="timelyfreeze"), partition="time")
    with pytest.raises(JobError, match="no weight gradients to skip"):
        planned(given, bare)
    assert planned(spec(partition="time"), bare).prediction.step_s > 0


@pytest.mark.parametrize(
    ("method", "copies"),
    [("none", 0), ("timelyfreeze", 0), ("apf", 3), ("timelyfreeze+apf", 3), ("autofreeze", 1)],
)
def test_what_freezing_keeps_is_in_the_memory_and_in_copies(method: str, copies: int) -> None:
    given = spec(partition="parameter", freeze=FreezeConfig.model_validate({"method": method}))
    rank = planned(given, profile(2)).prediction.memory.ranks[0]
    # Every scalar takes four bytes, both in the rank's own layers and in the copies that it keeps.
    own = rank.peak.weights
    assert rank.peak.statistics == copies * own
    assert own + rank.peak.standbys // (4 + copies) == 4 * sum(FOUND.parameters)


@pytest.mark.parametrize(
    ("kind", "copies_in", "on_host"),
    [("cuda", "auto", True), ("cpu", "auto", False), ("cpu", "host", True), ("cuda", "device", False)],
)
def test_copies_are_in_the_memory_that_they_are_kept_in(kind: str, copies_in: Any, on_host: bool) -> None:
    given = spec(partition="parameter")
    elastic = given.elastic.model_copy(update={"copies_in": copies_in, "refresh_every": 3})
    given = given.model_copy(update={"elastic": elastic})
    measured = profile(2)
    devices = tuple(replace(device, kind=kind) for device in measured.cluster.devices)
    measured = replace(measured, cluster=replace(measured.cluster, devices=devices))
    choice = planned(given, measured)
    cost = choice.prediction.redundancy
    assert (cost.on_host, choice.prediction.profile.cluster.refresh_every) == (on_host, 3 * on_host)
    text = StringIO()
    show(Console(file=text, width=400), choice, freezing(given, choice), "peer", ())
    assert f"of {'a host' if on_host else 'a rank'}'s memory" in text.getvalue()


def test_what_samples_of_the_gradient_keep_is_in_the_memory() -> None:
    given = spec(partition="parameter")
    sampling = given.model_copy(update={"job": given.job.model_copy(update={"curvature_every": 10})})
    without, sampled = (planned(each, profile(2)).prediction for each in (given, sampling))
    assert [rank.peak.statistics for rank in without.memory.ranks] == [0, 0]
    for rank in sampled.memory.ranks:
        assert rank.peak.statistics == 2 * rank.peak.weights
    assert [rank.peak.standbys for rank in without.memory.ranks] == [
        rank.peak.standbys for rank in sampled.memory.ranks
    ]


def test_layers_that_are_never_trained_count_by_their_forward_passes() -> None:
    frozen = FreezeConfig(method="prefix", prefix=3)
    without = planned(spec(ranks=3, partition="time"), profile(3))
    choice = planned(spec(ranks=3, partition="time", freeze=frozen), profile(3))
    assert counts(without) == (2, 1, 2)
    assert counts(choice) == (3, 1, 1)
    assert choice.prediction.step_s < without.prediction.step_s
    same_cut = spec(ranks=3, partition=(2, 1, 2), freeze=frozen)
    alike = planned(same_cut, profile(3)).prediction
    assert alike.peak_memory_bytes <= without.prediction.peak_memory_bytes
    off = frozen.model_copy(update={"pack": "off"})
    same_cut = same_cut.model_copy(update={"freeze": off})
    alike = planned(same_cut, profile(3)).prediction
    assert alike.peak_memory_bytes == without.prediction.peak_memory_bytes, "they may be trained again"


@pytest.mark.parametrize("pack", ["planner", "off"])
def test_the_first_plan_drops_the_backward_passes_of_layers_that_are_never_trained(pack: str) -> None:
    freeze = FreezeConfig.model_validate({"method": "prefix", "prefix": 3, "pack": pack})
    given = spec(freeze=freeze, partition=(3, 2))
    for choice in (planned(given, profile(2)).plan, None):
        done = resolve_spec(given, FOUND, {}, epoch=1, plan=choice)
        assert (done.plan.frozen, done.schedule.frozen_stages) == ((3, 1) if pack == "planner" else (0, 0))
        made = replanner_of(done)
        assert (made.frozen, made.released) == (3, done.plan.frozen)
        again, schedule = made.plan_for(2, epoch=1, version=2, reason="", domains="ab")
        assert (again.frozen, schedule) == (done.plan.frozen, done.schedule)
    thawing = spec(freeze=freeze.model_copy(update={"thaw": "rate"}))
    assert planned(thawing, profile(2)).plan.frozen == 0
