"""The job spec: TOML, overrides and Python give the same object, and every mistake gets a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from orchestrator.spec import reference as spec_reference
from orchestrator.spec.errors import subsections
from orchestrator.spec.job_spec import ClusterConfig, JobConfig, PipelineConfig, Spec, load, parse_override
from orchestrator.spec.rules import check, needs_profile, searched
from workers.config import ElasticConfig, FreezeConfig, ModelConfig, OptimizerConfig
from workers.protocol.errors import JobError

ROOT = Path(__file__).resolve().parents[3]


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def mistake(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        load(written(folder, text), overrides)
    return str(caught.value)


def test_toml_and_python_give_the_same_object(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [job]
        name = "first"
        steps = 20
        [model]
        family = "llama"
        layers = 4
        [optimizer]
        clip_norm = "null"
        [pipeline]
        ranks = 2
        partition = [2, 4]
        recompute = [0, 1]
        [cluster]
        resources_per_rank = { CPU = 0.5 }
        [cluster.emulated]
        forward_s = [0.1, 0.2]
        """,
    )
    spec = load(path)
    assert spec == Spec(
        job=JobConfig(name="first", steps=20),
        model=ModelConfig(family="llama", layers=4),
        optimizer=OptimizerConfig(clip_norm=None),
        pipeline=PipelineConfig(ranks=2, partition=(2, 4), recompute=(0, 1)),
        cluster=ClusterConfig(
            resources_per_rank={"CPU": 0.5},
            emulated=ClusterConfig().emulated.model_copy(update={"forward_s": (0.1, 0.2)}),
        ),
    )
    assert spec.job.folder == "runs/first"


def test_overrides_are_toml_values_or_bare_words(tmp_path: Path) -> None:
    spec = load(
        written(tmp_path, '[job]\nname = "a"\nsteps = 5\n'),
        [
            "job.steps=7",
            "data.source=my.module:rows",
            "pipeline.partition=[1, 2]",
            "pipeline.ranks = 2",
            "cluster.emulated.forward_s=0.5",
            "optimizer.clip_norm=null",
            'job.output="runs/a=b"',
        ],
    )
    assert spec.job.steps == 7
    assert spec.job.output == "runs/a=b"
    assert spec.data.source == "my.module:rows"
    assert spec.pipeline.partition == (1, 2)
    assert spec.pipeline.ranks == 2
    assert spec.cluster.emulated.forward_s == 0.5
    assert spec.optimizer.clip_norm is None
    assert parse_override("a.b=true") == (("a", "b"), True)
    assert parse_override("a.b=") == (("a", "b"), "")


JOB = '[job]\nname = "a"\n'


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (JOB + "[model]\nwidht = 3", (), "job.toml: [model] has no key 'widht'; did you mean 'width'?"),
        (
            JOB + "[pipline]\nranks = 3",
            (),
            "job.toml: there is no section 'pipline'; did you mean 'pipeline'?",
        ),
        (JOB + "[model]\nlr = 3", (), "job.toml: [model] has no key 'lr'; 'lr' belongs to [optimizer]"),
        (JOB + "[checkpoint]\nzzzzzz = 3", (), "[checkpoint] has no key 'zzzzzz'; it has every_steps, keep"),
        (
            JOB + "[model]\nfamily = 'gpt'\nlayers = 'many'",
            (),
            "model.layers = 'many': should be a valid integer",
        ),
        (
            JOB + "[model]\nlayers = 3",
            (),
            "model.layers = 3 is a setting of gpt, llama and vit: set model.family, or remove it",
        ),
        (
            JOB + "[model]\nfamily = 'gpt'\nkv_heads = 2",
            (),
            "job.toml: model.kv_heads = 2 is a setting of llama, not of gpt: remove it",
        ),
        (
            JOB + "[model]\nfamily = 'vit'\ntied_embeddings = true",
            (),
            "model.tied_embeddings = True is a setting of gpt and llama, not of vit: remove it",
        ),
        (
            JOB + "[model]\nfamily = 'gpt'\narguments = { a = 1 }",
            (),
            "model.arguments = {'a': 1} is a setting of model.factory, not of gpt: remove it",
        ),
        (
            JOB + "[model]\nfamily = 'gpt'\nfactory = 'a:b'",
            (),
            "job.toml: model.family = 'gpt' and model.factory = 'a:b' are both set: keep one of them",
        ),
        (
            JOB + "[model]\nfamily = [1]\nfactory = 'null'",
            (),
            "model.family = [1]: should be 'gpt', 'llama', 'vit', 'vgg' or 'huggingface'",
        ),
        ("model = 3\n" + JOB, (), "[model] should be a section of keys, not 3"),
        (
            JOB + "[model]\nfamily = 'gpx'",
            (),
            "model.family = 'gpx': should be 'gpt', 'llama', 'vit', 'vgg' or 'huggingface'",
        ),
        (JOB + "[pipeline]\nranks = -1", (), "pipeline.ranks = -1: should be greater than 0"),
        (
            JOB + "[pipeline]\npartition = 'even'",
            (),
            "pipeline.partition = 'even': should be 'parameter', 'memory', 'time', 'bottleneck' or 'dynpipe' or"
            " should be a list",
        ),
        (JOB + "[pipeline]\npartition = [2, 0]", (), "item 2 should be greater than 0"),
        (JOB + "[pipeline]\nranks = 'all'", (), "pipeline.ranks = 'all': should be"),
        (JOB + "[pipeline]\nmicrobatches = 0", (), "pipeline.microbatches = 0: should be greater than 0"),
        (JOB + "[freeze]\nr_max = 1.5", (), "freeze.r_max = 1.5: should be less than or equal to 1"),
        (JOB + "[freeze]\nr_max = -0.1", (), "freeze.r_max = -0.1: should be greater than or equal to 0"),
        (
            JOB + "[freeze]\nmethod = 'timely'",
            (),
            "freeze.method = 'timely': should be 'none', 'timelyfreeze'",
        ),
        (
            JOB + "[adapt]\npolicy = 'guess'",
            (),
            "adapt.policy = 'guess': should be 'forest', 'measured', 'epoch' or 'off'",
        ),
        (
            JOB + "[cluster]\nmemory_per_rank_bytes = 0",
            (),
            "memory_per_rank_bytes = 0: should be greater than 0",
        ),
        *(
            (
                JOB + f"[optimizer]\nname = '{name}'",
                (),
                f"optimizer.name = '{name}': {name} needs whole matrices, or all of them at once, and here each rank"
                " updates the elements that it has: choose one of adamw, adam, nadam",
            )
            for name in ("adafactor", "muon", "lbfgs")
        ),
        (
            JOB + "[model]\nfamily = 'gpt'\nlora = { targets = ['query'], use_dora = true }",
            (),
            "use_dora is not trained here (DoRA), as it takes the norms of whole columns",
        ),
        (JOB + "[pipeline]\nranks = 2.5", (), "pipeline.ranks = 2.5: should be a valid integer"),
        ("[job]\nname = 'a/b'", (), "job.name = 'a/b' does not fit. Name of the job"),
        ("[model]\nlayers = 3", (), "job.toml: the section [job] is missing"),
        ("[job]\nsteps = 3", (), "job.toml: job.name is missing"),
        (JOB + "x = ", (), "job.toml is not TOML: Invalid value"),
        (JOB + "seed = 1 2", (), "line 3"),
        ("job = 3", (), "[job] should be a section of keys, not 3"),
        (JOB, ("model.widht=3",), "--set model.widht: [model] has no key 'widht'; did you mean 'width'?"),
        (
            JOB + "[model]\nfamily = 'gpt'",
            ("model.width=abc",),
            "--set model.width: model.width = 'abc': should be a valid integer",
        ),
        (
            JOB,
            ("model.family=gpx",),
            "--set model.family: model.family = 'gpx': should be 'gpt', 'llama', 'vit', 'vgg' or",
        ),
        (
            JOB,
            ("cluster.emulated.forward=1",),
            "[cluster.emulated] has no key 'forward'; did you mean 'forward_s'?",
        ),
        (JOB, ("width=3",), "--set width=3: expected section.key=value"),
        (JOB, ("model.width",), "--set model.width: expected section.key=value"),
        (JOB, ("job.name.x=3",), "--set job.name.x: job.name is a value, not a section"),
    ],
)
def test_a_mistake_is_a_sentence(
    tmp_path: Path, text: str, overrides: tuple[str, ...], expected: str
) -> None:
    assert expected in mistake(tmp_path, text, *overrides)


def test_every_mistake_is_told_at_once(tmp_path: Path) -> None:
    told = mistake(tmp_path, JOB + "[model]\nwidht = 3\nlayers = 'x'\n[optimizer]\nlr = -1").split("\n")
    assert len(told) == 3


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read the spec .*nowhere\.toml: No such file"):
        load(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("pipeline", "cluster", "expected"),
    [
        (
            PipelineConfig(ranks=5, replicas=2),
            ClusterConfig(),
            "pipeline.ranks = 5 is not divisible by pipeline.replicas = 2.*choose 4 or 6",
        ),
        (PipelineConfig(ranks=1, replicas=2), ClusterConfig(), "choose 2"),
        (
            PipelineConfig(ranks=5, replicas=4, pipelines=2),
            ClusterConfig(),
            "pipeline.ranks = 5 is not divisible by pipeline.pipelines = 2.*all pipelines, choose 4 or 6",
        ),
        (
            PipelineConfig(ranks=8, replicas=2, pipelines=4),
            ClusterConfig(),
            "pipeline.pipelines = 4 is more than pipeline.replicas = 2.*use 2 pipelines at most",
        ),
        (
            PipelineConfig(ranks=2, partition=(2, 2, 2)),
            ClusterConfig(),
            "lists 3 stages, but 1f1b on 2 ranks has 2",
        ),
        (
            PipelineConfig(ranks=1, partition=(2, 2)),
            ClusterConfig(),
            "lists 2 stages, but 1f1b on 1 rank has 1",
        ),
        (
            PipelineConfig(ranks=2, schedule="zbv", partition=(2, 2)),
            ClusterConfig(),
            "lists 2 stages, but zbv on 2 ranks has 4",
        ),
        (PipelineConfig(), ClusterConfig(device="cuda", resources_per_rank={"CPU": 1}), "reserves no GPU"),
        (
            PipelineConfig(schedule="1f2b"),
            ClusterConfig(),
            "pipeline.schedule: unknown schedule '1f2b', did you mean '1f1b'",
        ),
        (
            PipelineConfig(ranks=4, schedule="interleaved", microbatches=2),
            ClusterConfig(),
            "2 microbatches on 4 ranks, needs a multiple of the ranks: use 4 microbatches",
        ),
        (
            PipelineConfig(ranks="auto", partition=(2, 3)),
            ClusterConfig(),
            'lists 2 stages, and pipeline.ranks = "auto" leaves open how many there are',
        ),
        (
            PipelineConfig(ranks=5, replicas=2, schedule="auto"),
            ClusterConfig(),
            "not divisible by pipeline.replicas = 2",
        ),
        (PipelineConfig(ranks="auto", schedule="1f2b"), ClusterConfig(), "unknown schedule '1f2b'"),
        (PipelineConfig(ranks="auto", schedule="zbv", chunks=3), ClusterConfig(), "3 chunks per rank"),
        (PipelineConfig(schedule="csv:/nowhere.csv"), ClusterConfig(), "cannot read it: No such file"),
        (PipelineConfig(schedule="csv:x", chunks=2), ClusterConfig(), "pipeline.chunks does not go with"),
    ],
)
def test_keys_that_do_not_fit_together(
    pipeline: PipelineConfig, cluster: ClusterConfig, expected: str
) -> None:
    with pytest.raises(JobError, match=expected):
        check(Spec(job=JobConfig(name="a"), pipeline=pipeline, cluster=cluster))


SHARED = {"ranks": 4, "replicas": 2, "shard": "optimizer"}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"pipeline": {"replicas": 1}}, "shares states out among replicas, and pipeline.replicas = 1"),
        ({"pipeline": {"shard": "weights"}}, "Input should be 'none', 'optimizer' or 'gradients'"),
    ],
)
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_shared_states_go_with_some_settings_only(
    sections: dict[str, Any], expected: str, shard: str
) -> None:
    given = {"job": {"name": "a"}, "pipeline": SHARED} | sections
    given |= {
        "job": {"name": "a"} | given["job"],
        "pipeline": SHARED | {"shard": shard} | given["pipeline"],
    }
    with pytest.raises((JobError, ValueError), match=expected):
        check(Spec.model_validate(given))


@pytest.mark.parametrize("migration", ["live", "deferred", "stop"])
def test_shared_states_go_with_every_way_to_move_and_to_adapt(migration: str) -> None:
    elastic = {"migration": migration, "salvage": "weights"}
    given = {"pipeline": SHARED, "elastic": elastic, "adapt": {"policy": "measured"}}
    settled = check(Spec.model_validate({"job": {"name": "a"}, **given})).elastic
    assert (settled.migration, settled.salvage, settled.redundancy) == (migration, "weights", "peer")


@pytest.mark.parametrize("key", ["ranks", "schedule", "microbatches"])
def test_what_is_auto_is_left_to_a_search(key: str) -> None:
    pipeline = PipelineConfig.model_validate({"ranks": 2, key: "auto"})
    check(Spec(job=JobConfig(name="a"), pipeline=pipeline))
    assert searched(pipeline) == (key,)


@pytest.mark.parametrize(
    ("elastic", "ranks", "expected"),
    [
        (
            {"redundancy": "peer"},
            1,
            r'"peer" keeps a copy of every layer on another rank, and the job has 1: use more',
        ),
        ({"min_ranks": 3}, 2, "elastic.min_ranks = 3, and the job has 2 ranks: it would never begin"),
        (
            {"redundancy": "none", "spares": 1},
            2,
            "elastic.spares = 1, but elastic.redundancy = .none. ends the job",
        ),
        ({"redundancy": "none", "min_ranks": 2}, 2, "elastic.min_ranks = 2, but elastic.redundancy = .none."),
        (
            {"redundancy": "none", "salvage": "weights"},
            2,
            'elastic.salvage = "weights", but elastic.redundancy',
        ),
        (
            {"redundancy": "checkpoint", "copy_every": 4},
            2,
            'elastic.copy_every = 4, but elastic.redundancy = "checkpoint" keeps no copies on other ranks',
        ),
        (
            {"redundancy": "auto", "copy_every": 4},
            2,
            'elastic.copy_every = 4, but elastic.redundancy = "auto" chooses it',
        ),
        (
            {"redundancy": "peer", "undone_steps": 4},
            2,
            'elastic.undone_steps = 4 is for elastic.redundancy = "auto"',
        ),
        (
            {"copy_every": 4, "salvage": "weights"},
            2,
            'elastic.salvage = "weights" is of no use with copies of every few steps',
        ),
        (
            {"redundancy": "checkpoint", "copies_in": "host"},
            2,
            'elastic.copies_in = "host", but elastic.redundancy = "checkpoint" keeps no copies',
        ),
        (
            {"redundancy": "peer", "copies_in": "device", "copy_every": 4},
            2,
            'elastic.copies_in = "device", but copies of every 4 steps are kept in host memory',
        ),
        (
            {"redundancy": "checkpoint", "copies": 2},
            4,
            'elastic.copies = 2, but elastic.redundancy = "checkpoint" keeps no copies on other ranks',
        ),
        (
            {"copies": 2},
            2,
            "elastic.copies = 2 needs 3 failure domains, a rank in each, and the job has 2 ranks: use more",
        ),
        ({"notices": ("ray", "ray")}, 2, "names a source twice"),
        ({"notice_file": ""}, 2, "names no file"),
    ],
)
def test_elastic_nonsense_is_refused(elastic: dict[str, Any], ranks: int, expected: str) -> None:
    spec = Spec(
        job=JobConfig(name="a"),
        pipeline=PipelineConfig(ranks=ranks),
        elastic=ElasticConfig.model_validate(elastic),
    )
    with pytest.raises(JobError, match=expected):
        check(spec)


def test_elastic_sense_is_not() -> None:
    sense: tuple[tuple[ElasticConfig, int | Literal["auto"]], ...] = (
        (ElasticConfig(), 1),
        (ElasticConfig(redundancy="checkpoint", spares=2), 1),
        (ElasticConfig(redundancy="peer", min_ranks=2), 2),
        (ElasticConfig(redundancy="peer"), "auto"),
        (ElasticConfig(redundancy="auto", undone_steps=8), 1),
    )
    for elastic, ranks in sense:
        check(Spec(job=JobConfig(name="a"), pipeline=PipelineConfig(ranks=ranks), elastic=elastic))


def test_freezing_is_checked_before_anything_runs() -> None:
    freeze = FreezeConfig(method="timelyfreeze", warm_up=5, monitoring=4)
    with pytest.raises(JobError, match="phases must come in order"):
        check(Spec(job=JobConfig(name="a"), freeze=freeze))


@pytest.mark.parametrize(
    ("pipeline", "cluster", "needed"),
    [
        (PipelineConfig(), ClusterConfig(), False),
        (PipelineConfig(partition=(2, 3)), ClusterConfig(), False),
        (PipelineConfig(partition="time"), ClusterConfig(), True),
        (PipelineConfig(schedule="auto"), ClusterConfig(), True),
        (PipelineConfig(schedule="csv:x", ranks="auto"), ClusterConfig(), False),
        (PipelineConfig(), ClusterConfig(memory_per_rank_bytes=10**9), True),
    ],
)
def test_a_profile_is_needed_where_costs_decide(
    pipeline: PipelineConfig, cluster: ClusterConfig, needed: bool
) -> None:
    spec = Spec(job=JobConfig(name="a"), pipeline=pipeline, cluster=cluster)
    assert needs_profile(spec) is needed


@pytest.mark.parametrize(
    ("freeze", "needed"),
    [
        ({"method": "prefix", "prefix": 2}, True),
        ({"method": "pipetransformer"}, True),
        ({"method": "pipetransformer", "pack": "paper"}, True),
        ({"method": "pipetransformer", "pack": "off"}, False),
        ({"method": "timelyfreeze"}, False),
    ],
)
def test_a_profile_is_needed_where_pipelines_follow_what_is_frozen(
    freeze: dict[str, object], needed: bool
) -> None:
    spec = Spec(job=JobConfig(name="a"), freeze=FreezeConfig.model_validate(freeze))
    assert needs_profile(spec) is needed


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("0F0,0B0\n1F0,1B0,1X0", "row 2, column 3: '1X0' is not an action"),
        ("0F0,0B0", "the table has 1 rank (row), and the job has 2"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", "the table has 2 microbatches, and the job has 1"),
        ("0B0,0F0\n1F0,1B0", "row 1, column 1"),
        ("", "no actions"),
        ("0F0\n1F0,1B0", "the first 1 of its 2 stages have no backward, and a job trains all layers"),
    ],
)
def test_a_table_with_a_mistake_is_named_with_its_place(tmp_path: Path, table: str, expected: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(table)
    pipeline = PipelineConfig(ranks=2, microbatches=1, schedule=f"csv:{path}")
    with pytest.raises(JobError) as caught:
        check(Spec(job=JobConfig(name="a"), pipeline=pipeline))
    assert expected in str(caught.value)


def sections(section: type[BaseModel]) -> list[type[BaseModel]]:
    inner = (each for name in section.model_fields for each in subsections(section, name).values())
    return [section, *(below for each in inner for below in sections(each))]


def test_every_key_has_a_docstring() -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in sections(Spec)
        for name, field in section.model_fields.items()
        if not field.description and not name.startswith("_")
    ]
    assert bare == []


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "spec.md").read_text() == spec_reference.reference(), (
        "run: python -m orchestrator.spec.reference > docs/spec.md"
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_a_spec(path: Path) -> None:
    check(load(path))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optimizer.lr=inf", "optimizer.lr = inf: should be a finite number"),
        ("optimizer.clip_norm=nan", "optimizer.clip_norm = nan: should be a finite number"),
        ("freeze.r_max=nan", "freeze.r_max = nan: should be a finite number"),
        ("cluster.timeout_s=inf", "cluster.timeout_s = inf: should be a finite number"),
        ("elastic.hang_timeout_s=inf", "elastic.hang_timeout_s = inf: should be a finite number"),
        ("cluster.emulated.forward_s=[0.1, -inf]", "item 2 should be a finite number"),
        ("cluster.resources_per_rank={ CPU = inf }", "cluster.resources_per_rank = inf: should be a finite"),
        ("model.arguments={ rates = [1.0, inf] }", "should hold finite numbers, check rates"),
        ("data.arguments={ noise = { scale = nan } }", "should hold finite numbers, check noise"),
    ],
)
def test_a_number_that_is_not_finite_is_refused(tmp_path: Path, override: str, told: str) -> None:
    message = mistake(tmp_path, '[job]\nname = "a"\n', override)
    key = override.partition("=")[0]
    assert message.startswith(f"--set {key}: {key} = ")
    assert told in message


@pytest.mark.parametrize(
    "address",
    ["nonsense", "", "http://x:1", "head:", ":6379", "head:x", "head:0", "head:65536", "ray://head", "a b:1"],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(JobError) as caught:
        check(Spec(job=JobConfig(name="a"), cluster=ClusterConfig(address=address)))
    assert str(caught.value) == (
        f"cluster.address = {address!r} is no address: use 'local', 'auto', 'HOST:PORT' or 'ray://HOST:PORT'"
    )


@pytest.mark.parametrize(
    "address", ["local", "auto", "head:6379", "10.0.0.1:6379", "ray://head-1.lan:10001", "[::1]:6379"]
)
def test_addresses_that_a_job_may_join(address: str) -> None:
    check(Spec(job=JobConfig(name="a"), cluster=ClusterConfig(address=address)))


def test_the_first_run_of_a_newcomer_freezes_nothing() -> None:
    # It starts from scratch, where freezing costs more than it saves and the report warns of it.
    assert load(ROOT / "examples" / "gpt.toml").freeze.method == "none"


def test_patience_needs_validations() -> None:
    with pytest.raises(JobError, match=r"job.patience = 3 counts validations.*: set job.validate_every"):
        check(Spec.model_validate({"job": {"name": "a", "patience": 3}}))
