"""Rules of a spec that need the spec alone: its mistakes are found, and what follows from its keys is filled in, before
torch, Ray or the data are touched."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.cluster.address import host_and_port
from orchestrator.spec.freeze_phases import settle_phases
from orchestrator.spec.freeze_prefix import check_prefix
from orchestrator.spec.job_spec import PipelineConfig, Spec
from planner.ir import Schedule
from planner.schedule import registry, table_format
from planner.schedule.table_format import CSV_PREFIX
from planner.schedule.validate import ScheduleError
from planner.search.shapes import PipelineShape, shape_of
from planner.wording import counted
from workers.config import CheckpointConfig, ElasticConfig, JobConfig, OptimizerConfig
from workers.protocol.errors import JobError

AUTO = "auto"


def check(spec: Spec) -> Spec:
    """Check that the keys of `spec` fit together, once per start of a job, and settle what follows from them alone: the
    phases of freezing in so many steps, a user's own table and its numbers, the redundancy of a given number of ranks.

    Args:
        spec: a spec with absolute paths.

    Raises:
        JobError: names the keys, their values and the way out.
    """
    pipeline, elastic = spec.pipeline, spec.elastic
    if searched(pipeline):
        _check_search(pipeline)
    else:
        if pipeline.schedule.startswith(CSV_PREFIX):
            spec = spec.with_table(_read_table(pipeline))
        shape = given_shape(spec)
        _check_partition(pipeline, shape)
        numbers = {"ranks": shape.ranks * pipeline.pipeline_count, "microbatches": shape.microbatches}
        pipeline = pipeline.model_copy(update=numbers)
    _check_validation(spec.job, spec.checkpoint)
    _check_optimizer(spec.optimizer)
    freeze = spec.freeze
    check_prefix(freeze, table=pipeline.schedule.startswith(CSV_PREFIX))
    if spec.job.epochs is None:  # else the steps follow from the data
        freeze = settle_phases(freeze, spec.optimizer, spec.job.steps)
    _check_device(spec)
    _check_logging(spec)
    if pipeline.ranks != AUTO:
        elastic = settle_elastic(elastic, pipeline.ranks)
    _check_shard(spec)
    _check_buckets(spec)
    _check_elastic(elastic)
    host_and_port(spec.cluster.address)
    return spec.model_copy(update={"pipeline": pipeline, "freeze": freeze, "elastic": elastic})


def searched(pipeline: PipelineConfig) -> tuple[str, ...]:
    """The keys whose `auto` a search settles. A user's own table gives ranks and microbatches itself."""
    if pipeline.schedule.startswith(CSV_PREFIX):
        return ()
    keys = {
        "ranks": pipeline.ranks,
        "schedule": pipeline.schedule,
        "microbatches": pipeline.microbatches,
    }
    return tuple(key for key, value in keys.items() if value == AUTO)


def needs_profile(spec: Spec) -> bool:
    """Whether the plan needs measured costs."""
    partition = spec.pipeline.partition
    return (
        (isinstance(partition, str) and partition != "parameter")
        or bool(searched(spec.pipeline))
        or spec.cluster.memory_per_rank_bytes is not None
        or spec.adapt.policy != "off"
        or spec.elastic.redundancy == AUTO
        or (spec.freeze.by_prefix and (spec.freeze.pack != "off" or spec.freeze.timely))
        or spec.freeze.method == AUTO
    )


def pipeline_ranks(pipeline: PipelineConfig) -> int | None:
    """P, the ranks of one pipeline; None if not settled yet.

    Raises:
        JobError: there are more pipelines than replicas, or the ranks are not a multiple of the pipelines.
    """
    count, replicas = pipeline.pipeline_count, pipeline.replicas
    if count > replicas:
        raise JobError(
            f"pipeline.pipelines = {count} is more than pipeline.replicas = {replicas}, and each pipeline executes at"
            f" least one replica: use {replicas} pipelines at most, or more replicas (their number is part of the"
            " trajectory)"
        )
    if pipeline.ranks == AUTO:
        return None
    if pipeline.ranks % count:
        below = pipeline.ranks // count * count
        near = f"{below} or {below + count}" if below else f"{count}"
        key, all_of = ("replicas", "replicas") if pipeline.pipelines is None else ("pipelines", "pipelines")
        raise JobError(
            f"pipeline.ranks = {pipeline.ranks} is not divisible by pipeline.{key} = {count}:"
            f" ranks counts the ranks of all {all_of}, choose {near}"
        )
    return pipeline.ranks // count


def settle_elastic(elastic: ElasticConfig, ranks: int) -> ElasticConfig:
    """Settle `elastic` for a job with `ranks` ranks.

    Raises:
        JobError: there is no other rank to hold copies, or the job waits for more ranks than it has.
    """
    if elastic.redundancy == "peer" and ranks == 1:
        raise JobError(
            'elastic.redundancy = "peer" keeps a copy of every layer on another rank, and the job has 1: use more'
            ' (pipeline.ranks), or elastic.redundancy = "checkpoint"'
        )
    if elastic.redundancy in (None, "peer", AUTO) and elastic.copies > 1 and elastic.copies >= ranks:
        raise JobError(
            f"elastic.copies = {elastic.copies} needs {elastic.copies + 1} failure domains, a rank in each, and the job"
            f" has {counted(ranks, 'rank')}: use more ranks (pipeline.ranks), or elastic.copies = {max(1, ranks - 1)}"
        )
    if elastic.min_ranks > ranks:
        raise JobError(
            f"elastic.min_ranks = {elastic.min_ranks}, and the job has {counted(ranks, 'rank')}: it would never"
            f" begin; use elastic.min_ranks = {ranks} at most, or more ranks (pipeline.ranks)"
        )
    if elastic.redundancy == AUTO and ranks == 1:
        return elastic.model_copy(update={"redundancy": "checkpoint", "undone_steps": 0})
    if elastic.redundancy is not None:
        return elastic
    return elastic.model_copy(update={"redundancy": "peer" if ranks > 1 else "checkpoint"})


def given_shape(spec: Spec) -> PipelineShape:
    """One replica's pipeline as the spec gives it: its schedule and its numbers, without a cut.

    The spec must need no search, see `searched`, and have its table, if it names one.

    Raises:
        JobError: there is no such schedule, or the family cannot be built with these numbers.
    """
    if spec.table is not None:
        return shape_of(spec.table)
    pipeline = spec.pipeline
    ranks, microbatches = pipeline_ranks(pipeline), pipeline.microbatches
    assert ranks is not None
    assert microbatches != AUTO
    try:
        family = registry.family(pipeline.schedule)
        chunks = family.default_chunks if pipeline.chunks is None else pipeline.chunks
        family.check(ranks, microbatches, chunks)
    except ScheduleError as error:
        raise JobError(f"pipeline.schedule: {error}") from error
    return PipelineShape(name=family.name, ranks=ranks, chunks=chunks, microbatches=microbatches)


def _read_table(pipeline: PipelineConfig) -> Schedule:
    """The user's own schedule.

    Raises:
        JobError: the file cannot be read, has a mistake, or is for other numbers than the spec's.
    """
    ranks = pipeline_ranks(pipeline)
    microbatches = None if pipeline.microbatches == AUTO else pipeline.microbatches
    if pipeline.chunks is not None:
        raise JobError("pipeline.chunks does not go with a csv: schedule, whose table places the stages")
    try:
        path = Path(pipeline.schedule.removeprefix(CSV_PREFIX))
        text = path.read_text(encoding="utf-8")
        table = table_format.parse(text, pipeline.schedule, ranks=ranks, microbatches=microbatches)
    except ScheduleError as error:
        raise JobError(f"pipeline.schedule: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"pipeline.schedule = {pipeline.schedule!r}: cannot read it: {reason}") from error
    if table.frozen_stages:
        # Other ranks, or another partition, would freeze other layers: a table must not decide that.
        raise JobError(
            f"pipeline.schedule = {pipeline.schedule!r}: the first {table.frozen_stages} of its {table.stages} stages"
            " have no backward, and a job trains all layers: give every forward of the table its backward"
        )
    return table


def _check_validation(job: JobConfig, checkpoint: CheckpointConfig) -> None:
    """Raises:
    JobError: nothing is validated before the last step, and so nothing ends the job earlier or is better than that.
    """
    if checkpoint.keep_best is not None and not job.validate_every:
        raise JobError(
            f'checkpoint.keep_best = "{checkpoint.keep_best}" goes by validations, and job.validate_every = 0 has one'
            " after the last step only: set job.validate_every"
        )
    if job.stop_at is not None and not job.validate_every:
        raise JobError(
            f'job.stop_at = "{job.stop_at}" is looked at in validations, and job.validate_every = 0 has one after the'
            " last step only: set job.validate_every"
        )
    if job.patience is not None and not job.validate_every:
        raise JobError(
            f"job.patience = {job.patience} counts validations, and job.validate_every = 0 has one after the last step"
            " only: set job.validate_every"
        )


def _check_optimizer(optimizer: OptimizerConfig) -> None:
    """Raises JobError where settings do not go together, as torch refuses them."""
    if optimizer.nesterov and (optimizer.name != "sgd" or not optimizer.momentum or optimizer.dampening):
        raise JobError(
            "optimizer.nesterov = true needs optimizer.name = 'sgd' with momentum and without dampening, and they are"
            f" {optimizer.name!r}, {optimizer.momentum:g} and {optimizer.dampening:g}: change them, or leave it out"
        )
    if optimizer.amsgrad and optimizer.name not in ("adam", "adamw"):
        raise JobError(
            f"optimizer.amsgrad = true is a setting of adam and adamw, not of {optimizer.name}: leave it out"
        )
    if (optimizer.schedule == "step") != bool(optimizer.milestones):
        raise JobError(
            f"optimizer.schedule = {optimizer.schedule!r} and optimizer.milestones = {list(optimizer.milestones)}:"
            " milestones are the steps at which the schedule 'step' lowers the rate; set both or neither"
        )


def _check_shard(spec: Spec) -> None:
    """Raises:
    JobError: there is nothing to share states out among.
    """
    shard = spec.pipeline.shard
    if shard == "none":
        return
    if spec.pipeline.replicas == 1 and spec.freeze.batch == "keep":
        raise JobError(
            f'pipeline.shard = "{shard}" shares states out among replicas, and pipeline.replicas = 1: use more replicas'
            " (their number is part of the trajectory), or leave shard out"
        )


def _check_buckets(spec: Spec) -> None:
    """Raises:
    JobError: replicas cannot draw from so many parts of the samples.
    """
    buckets, replicas = spec.data.buckets, spec.pipeline.replicas
    if replicas % buckets:
        divisors = [number for number in range(1, replicas + 1) if not replicas % number]
        choices = ", ".join(map(str, divisors))
        raise JobError(
            f"data.buckets = {buckets} and pipeline.replicas = {replicas}: as many replicas draw from each part, so use"
            f" a divisor of the replicas ({choices})"
        )
    if buckets > 1 and spec.data.weights is not None:
        raise JobError(
            f"data.buckets = {buckets} and data.weights: tables that are mixed by weights are not parted; leave one out"
        )


def _check_partition(pipeline: PipelineConfig, shape: PipelineShape) -> None:
    if not isinstance(pipeline.partition, str) and len(pipeline.partition) != shape.stages:
        raise JobError(
            f"pipeline.partition lists {counted(len(pipeline.partition), 'stage')}, but {pipeline.schedule} on"
            f" {counted(shape.ranks, 'rank')} has {shape.stages}: give {shape.stages} numbers of layers,"
            " or change pipeline.ranks"
        )


def _check_search(pipeline: PipelineConfig) -> None:
    """Refuse a pipeline that is wrong whatever a search finds for its open keys."""
    ranks = pipeline_ranks(pipeline)
    keys = searched(pipeline)
    stages_open = [f'pipeline.{key} = "auto"' for key in keys if key != "microbatches"]
    if not isinstance(pipeline.partition, str) and stages_open:
        raise JobError(
            f"pipeline.partition lists {counted(len(pipeline.partition), 'stage')}, and {' and '.join(stages_open)}"
            " leaves open how many there are: give a number and a schedule, or let a program cut (pipeline.partition ="
            ' "dynpipe")'
        )
    if "schedule" in keys:
        return
    try:
        family = registry.family(pipeline.schedule)
        # A search can choose an open number to fit: only given numbers are checked here.
        size = ranks or 1
        family.check(size, size, family.default_chunks if pipeline.chunks is None else pipeline.chunks)
    except ScheduleError as error:
        raise JobError(f"pipeline.schedule: {error}") from error


def _check_elastic(elastic: ElasticConfig) -> None:
    """Refuse settings for failed ranks that can never take effect."""
    if elastic.redundancy == "none" and elastic.spares:
        raise JobError(
            f'elastic.spares = {elastic.spares}, but elastic.redundancy = "none" ends the job with the first rank that'
            ' is lost: use "peer" or "checkpoint", or no spares'
        )
    if elastic.redundancy == "none" and elastic.min_ranks > 1:
        raise JobError(
            f'elastic.min_ranks = {elastic.min_ranks}, but elastic.redundancy = "none" ends the job with the first rank'
            ' that is lost: use "peer" or "checkpoint", or leave min_ranks out'
        )
    if elastic.redundancy == "none" and elastic.salvage != "none":
        raise JobError(
            f'elastic.salvage = "{elastic.salvage}", but elastic.redundancy = "none" ends the job with the first rank'
            ' that is lost: use "peer" or "checkpoint", or leave salvage out'
        )
    if elastic.copy_every > 1 and elastic.redundancy not in (None, "peer"):
        instead = "chooses it" if elastic.redundancy == AUTO else "keeps no copies on other ranks"
        raise JobError(
            f'elastic.copy_every = {elastic.copy_every}, but elastic.redundancy = "{elastic.redundancy}" {instead}: use'
            ' "peer", or leave copy_every out'
        )
    if elastic.undone_steps and elastic.redundancy != AUTO:
        raise JobError(
            f'elastic.undone_steps = {elastic.undone_steps} is for elastic.redundancy = "auto": use that, or leave'
            " undone_steps out"
        )
    if elastic.salvage != "none" and (elastic.copy_every > 1 or elastic.undone_steps):
        raise JobError(
            f'elastic.salvage = "{elastic.salvage}" is of no use with copies of every few steps: a lost rank takes all'
            " layers back to the same step; leave salvage out, or copy every step (elastic.copy_every = 1)"
        )
    if elastic.redundancy not in (None, "peer", AUTO) and elastic.copies > 1:
        raise JobError(
            f'elastic.copies = {elastic.copies}, but elastic.redundancy = "{elastic.redundancy}" keeps no copies on'
            ' other ranks: use "peer", or leave copies out'
        )
    if elastic.redundancy not in (None, "peer", AUTO) and elastic.copies_in != "auto":
        raise JobError(
            f'elastic.copies_in = "{elastic.copies_in}", but elastic.redundancy = "{elastic.redundancy}" keeps no'
            ' copies on other ranks: use "peer", or leave copies_in out'
        )
    if elastic.copies_in == "device" and elastic.copy_every > 1:
        raise JobError(
            f'elastic.copies_in = "device", but copies of every {elastic.copy_every} steps are kept in host memory:'
            " copy every step (elastic.copy_every = 1), or leave copies_in out"
        )
    if len(set(elastic.notices)) < len(elastic.notices):
        raise JobError(f"elastic.notices = {list(elastic.notices)} names a source twice: name each once")
    if elastic.notice_file == "":
        raise JobError('elastic.notice_file = "" names no file: give a path, or leave it out')


def _check_logging(spec: Spec) -> None:
    logging, folder = spec.logging, spec.job.folder
    output = urlsplit(folder if "://" in folder else "")
    if output.username or output.password:
        raise JobError(
            "job.output holds a user name or a password, which would be kept in the job's log: give it to the job's"
            " processes in the environment variables of that storage"
        )
    for key in ("mlflow", "otel"):
        address = urlsplit(getattr(logging, key) or "")
        if address.username or address.password:
            raise JobError(
                f"logging.{key} holds a user name or a password, which would be kept in the job's log: give it to the"
                " job's processes in the environment variables of that service"
            )
    if logging.mlflow is not None and "://" in logging.mlflow and not _is_http(logging.mlflow):
        raise JobError(
            f"logging.mlflow = {logging.mlflow!r}: expected http://HOST:PORT, https://HOST or the path of a folder"
        )
    if logging.otel is not None and logging.otel not in ("console", "env") and not _is_http(logging.otel):
        raise JobError(
            f"logging.otel = {logging.otel!r}: expected http://HOST:PORT, https://HOST, env or console"
        )
    local = {"tensorboard = true": logging.tensorboard, 'wandb = "offline"': logging.wandb == "offline"}
    for key, wanted in local.items():
        if wanted and "://" in folder:
            raise JobError(
                f"logging.{key} writes files beside the event log, and job.output = {folder!r} is no folder: use a"
                " folder that all nodes see, or log to a server (logging.mlflow)"
            )


def _is_http(text: str) -> bool:
    return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)


def _check_device(spec: Spec) -> None:
    resources = spec.cluster.resources_per_rank
    if spec.cluster.device == "cuda" and resources is not None and "GPU" not in resources:
        raise JobError(
            "cluster.device = 'cuda', but cluster.resources_per_rank reserves no GPU:"
            " add GPU = 1, or a fraction where ranks share one"
        )
