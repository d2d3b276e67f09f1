"""The job spec: ten sections, read from TOML or built in Python, the same object either way.

Sections that ranks consume live in `workers/config.py`. What depends on the model, the data or the cluster is
settled in `orchestrator/prepare/resolve.py`; what can be told from the spec alone is checked in `checks.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from orchestrator.spec.errors import explain
from workers.config import (
    AdaptConfig,
    CheckpointConfig,
    DataConfig,
    DeviceKind,
    ElasticConfig,
    EmulatedConfig,
    FreezeConfig,
    OptimizerConfig,
    Precision,
)
from workers.models.model_config import DEFAULT_MODEL, Model
from workers.protocol import JobError
from workers.section import NonNegative, Positive, Section

PositiveSeconds = Annotated[float, Field(gt=0)]
Auto = Literal["auto"]
PartitionProgram = Literal["parameter", "memory", "time", "bottleneck", "dynpipe"]


class JobConfig(Section):
    """`[job]`: what the run is called, how long it is, where it goes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the job, unique in the cluster: letters, digits, `.`, `_` and `-`."""
    seed: NonNegative = 0
    """Key of every random draw: initial weights, order of the data, dropout."""
    steps: Positive = 100
    """Optimizer steps of the whole job."""
    output: str | None = None
    """Folder of the run, on a file system that every node sees; unset: `runs/` and the name. Where it is a URI, the
    event log is copied there every 5 seconds: that much of the log is lost at most with the controller's node, and
    none of the training."""
    precision: Precision = "float32"
    """Part of the trajectory. `bfloat16` has weights, activations and messages between stages in 16 bits; the
    gradients of microbatches are summed in 32, and updates change a `float32` copy of the weights, which is what
    checkpoints hold (parameters that the model fixes are held in 16 only). `bfloat16-autocast` is torch's autocast
    over weights of 32 bits. On a GPU both need compute capability 8.0. `float16` is as `bfloat16`, with a factor on the
    loss that is halved by each step whose gradients overflow, which is skipped, and doubled after 2000 without."""
    threads: Positive = 1
    """Torch threads per rank. Part of the trajectory: another number gives other bits."""
    compile: bool = False
    """Compile each layer once per shape, with PyTorch's compiler. Part of the trajectory: compiled layers have other
    bits, the same ones for any partition. A layer that cannot be compiled computes as it is, and the log says which and
    why. Each rank compiles before its first step, which takes seconds to a minute, and needs a C++ compiler and
    Python's headers on its node, on a GPU Triton too. Validation is not compiled."""
    validate_every: NonNegative = 0
    """Steps between validations; 0: only after the last step."""
    timeline_every: NonNegative = 50
    """Steps between the timelines that pages and metrics show: what each rank did when; 0: only the last step's and
    those that freezing monitors. Changes no bits."""
    curvature_every: NonNegative = 0
    """Steps between samples of the loss's smoothness and the gradient's second moment, which say how many updates an
    asynchronous pipeline would need; 0: none. At a sample each rank holds a second copy of its weights and gradients
    until the next step. Never sampled where something may be frozen. Changes no bits."""
    sample_tokens: NonNegative = 200
    """Tokens to sample after the last step (language models); 0: none."""

    @property
    def folder(self) -> str:
        """The output folder, given or by default."""
        return self.output if self.output is not None else f"runs/{self.name}"


class PipelineConfig(Section):
    """`[pipeline]`: how the model and the batch are cut."""

    ranks: Positive | Auto = 1
    """All ranks: `replicas` times the ranks of one pipeline. `auto`: as many of the cluster's as make the shortest
    step."""
    schedule: str = "1f1b"
    """`gpipe`, `1f1b`, `interleaved`, `zb-h1`, `zbv`, or `csv:PATH`. `auto`: the family with the shortest step."""
    chunks: Positive | None = None
    """Stages per rank, for the families that have a choice; unset: 2 for `interleaved` and `zbv`, else 1."""
    microbatches: Positive | Auto = 4
    """Microbatches per replica in one step. `auto`: searched; part of the trajectory, so a resumed job keeps it."""
    microbatch_size: Positive = 4
    """Samples in a microbatch. A step's batch is `replicas x microbatches x microbatch_size` samples."""
    replicas: Positive = 1
    """Data-parallel copies of the pipeline. Part of the trajectory: another number gives other bits, even with as many
    samples in a step."""
    shard: Literal["none", "optimizer", "gradients"] = "none"
    """`optimizer` shares optimizer states, and in 16 bits the 32-bit weights, out among replicas (ZeRO's first stage):
    each keeps those of an equal part of every layer. Changes no bits. `gradients` shares out the sums of gradients too
    (ZeRO's second stage): those of each microbatch go to the parts' owners while the step runs, `microbatches` times
    the traffic, so it is for jobs that are short of memory. It adds gradients up microbatch by microbatch over all
    replicas, not replica by replica, and so is part of the trajectory; ranks, partition and losses change no bits. It
    is not for layers with buffers that training changes (BatchNorm). Copies of shards, which `elastic.redundancy =
    "peer"` keeps, take memory too: on the device they pay from 4 replicas on, in 16 bits from 3; in host memory, or
    with `"checkpoint"`, always."""
    partition: PartitionProgram | tuple[Positive, ...] = "parameter"
    """`parameter`, `memory` and `time` balance the stages by that; `bottleneck` minimizes the time of the busiest rank
    or link, communication included, or of the busiest single stage or link where ranks hold several stages and the
    model has more than 250,000 cuts; `dynpipe` takes the shortest simulated step of DynPipe's cut, those of the other
    programs and the cuts near them. All but `parameter` measure the model first. A list gives the layers per stage, in
    order."""
    recompute: bool | tuple[NonNegative, ...] = False
    """Layers whose activations are recomputed in the backward pass: none, a list of layer indices, or `true`: all but
    the last. The loss keeps the last layer's outputs anyway, so recomputing that layer takes more memory, not less."""


class ClusterConfig(Section):
    """`[cluster]`: where the ranks run."""

    address: str = "local"
    """`local` starts a cluster on this machine for this job; `auto` joins the only one with a node here;
    `HOST:PORT` and `ray://HOST:PORT` join the one there."""
    resources_per_rank: dict[str, Annotated[float, Field(gt=0)]] | None = None
    """Resources that each rank reserves; unset: 1 CPU (`cpu`), 1 CPU and 1 GPU (`cuda`), 0.05 CPU (`emulated`)."""
    device: DeviceKind | Literal["auto"] = "auto"
    """`auto`: `cuda` if the cluster has GPUs for all ranks, else `cpu`. `emulated`: times are modelled."""
    pin_cores: bool = False
    """Bind each rank to one core of its node: of the n cores that it may use there, rank r has number r mod n. Ranks
    whose numbers differ by n share a core. A neighbour on one core then slows only that core's ranks. Changes no
    bits."""
    memory_per_rank_bytes: Positive | None = None
    """Memory limit of a rank; no plan that needs more is taken. Unset: the device's memory, for plans that are made on
    a profile."""
    wait_s: PositiveSeconds = 60.0
    """Time limit for the cluster's resources and for the start of the ranks, each."""
    timeout_s: PositiveSeconds = 300.0
    """Longest wait of a rank for another one before the step counts as failed. Also the time limit for measuring the
    model."""
    emulated: EmulatedConfig = EmulatedConfig()
    """`[cluster.emulated]`: the modelled times."""


class LoggingConfig(Section):
    """`[logging]`: where the job's numbers go besides its event log. A logger that fails costs one warning."""

    tensorboard: bool = False
    """Whether to write TensorBoard's event files to `tensorboard/` in the job's folder (extra `tensorboard`)."""
    mlflow: str | None = None
    """MLflow tracking server, `http://` or `https://`, or a folder of MLflow's files (extra `mlflow`)."""
    wandb: Literal["online", "offline"] | None = None
    """Weights & Biases (extra `wandb`). `offline` writes to `wandb/` in the job's folder, for `wandb sync`."""
    project: str | None = None
    """Experiment at MLflow and project at Weights & Biases; unset: `freshet`."""
    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    """Identity of the run at MLflow and Weights & Biases; unset: a random one. A resumed job keeps it."""
    otel: str | None = None
    """OpenTelemetry spans of recoveries and moves (extra `otel`). An OTLP endpoint, `http://` or `https://`; `env`:
    what the OTEL_ variables of the controller's process say; `console`: the controller's output."""

    @property
    def recorded(self) -> bool:
        """Whether a logger keeps runs under an identity."""
        return self.mlflow is not None or self.wandb is not None


class Spec(Section):
    """A whole job."""

    job: JobConfig
    """The run."""
    model: Model = DEFAULT_MODEL
    """The model: `family` with its sizes, or `factory` with a function of your own."""
    data: DataConfig = DataConfig()
    """The data."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The update rule."""
    pipeline: PipelineConfig = PipelineConfig()
    """The cut."""
    freeze: FreezeConfig = FreezeConfig()
    """The weight gradients that are skipped."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """The checkpoints."""
    elastic: ElasticConfig = ElasticConfig()
    """The handling of ranks that fail, join or receive notice."""
    adapt: AdaptConfig = AdaptConfig()
    """The adaptation to machines that slow down."""
    cluster: ClusterConfig = ClusterConfig()
    """Where it runs."""
    logging: LoggingConfig = LoggingConfig()
    """Where its numbers go."""


def load(path: Path, overrides: Iterable[str] = ()) -> Spec:
    """The spec in the TOML file `path`, with `overrides` such as `model.width=256` applied in order.

    Raises:
        JobError: the file is missing or no TOML, an override is malformed, a key unknown or a value wrong.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read the spec {path}: {getattr(error, 'strerror', None) or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}") from error
    overridden = set()
    for override in overrides:
        key, value = parse_override(override)
        _put(tables, key, value)
        overridden.add(".".join(key))
    try:
        return Spec.model_validate(_nulls(tables))
    except ValidationError as error:
        raise JobError(explain(error, Spec, source=str(path), overridden=overridden)) from error


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Key path and value of `a.b=c`: the value is read as TOML, a bare word as a string.

    Raises:
        JobError: there is no `=`, or the key has no section.
    """
    name, equals, value = text.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or len(key) < 2 or not all(key):
        raise JobError(f"--set {text}: expected section.key=value, such as model.width=256")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return key, value.strip()


def _put(tables: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    """Set `tables[key[0]][key[1]]...`, making tables on the way."""
    table = tables
    for depth, part in enumerate(key[:-1], 1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise JobError(f"--set {'.'.join(key)}: {'.'.join(key[:depth])} is a value, not a section")
    table[key[-1]] = value


def _nulls(value: Any) -> Any:
    """`value` with each string `null` as None: TOML has no null, and some settings are turned off by it."""
    if isinstance(value, dict):
        return {key: _nulls(item) for key, item in value.items()}
    return None if value == "null" else value
