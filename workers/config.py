"""The sections of a job spec that the ranks use. No torch here, so that any process can read a spec.

`orchestrator/spec/job_spec.py` composes them and turns validation errors into readable sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from planner.course import Course, LearningRate, Leg
from planner.freezing import Phases, has_program, prefix_rule
from planner.plan import recomputable
from workers.models.model_config import DEFAULT_MODEL, AnyModel, Model
from workers.protocol.goals import KEPT, Goals
from workers.protocol.section import (
    Arguments,
    Fraction,
    NonNegative,
    NonNegativeSeconds,
    Positive,
    Section,
    Shuffle,
)
from workers.protocol.target import METRICS, Target, parse_target
from workers.state.optimizer_config import OptimizerConfig

PositiveSeconds = Annotated[float, Field(gt=0)]
PositiveNumber = Annotated[float, Field(gt=0)]
Auto = Literal["auto"]
PartitionProgram = Literal["parameter", "memory", "time", "bottleneck", "dynpipe"]
Precision = Literal["float32", "bfloat16", "bfloat16-autocast", "float16"]
DeviceKind = Literal["cpu", "cuda", "emulated"]


def _known_metric(name: str) -> str:
    if name not in METRICS:
        raise PydanticCustomError("metric", "should be one of {names}", {"names": ", ".join(METRICS)})
    return name


def _spelled_target(text: str) -> str:
    try:
        parse_target(text)
    except ValueError as error:
        raise PydanticCustomError("target", "{why}", {"why": str(error)}) from error
    return text


class JobConfig(Section):
    """`[job]`: what the run is called, how long it is, where it goes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the job, unique in the cluster: letters, digits, `.`, `_` and `-`."""
    seed: NonNegative = 0
    """Key of every random draw: initial weights, order of the data, dropout."""
    steps: Positive = 100
    """Optimizer steps of the whole job; with `epochs` they follow from it. A batch that grows (`freeze.batch`) takes
    their samples in fewer."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training samples, in place of `steps`; fractions too. The steps are as many as it takes, so that
    the last one may begin another pass."""
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
    stop_at: Annotated[str, AfterValidator(_spelled_target)] | None = None
    """Metric of a validation at which the job is done, such as `accuracy >= 0.97` or `loss <= 1.2`; the model's task
    says which metrics there are. Unset: the job trains all its steps."""
    patience: Annotated[int, Field(gt=0, le=KEPT)] | None = None
    """Validations in a row without a better value than before after which the job is done. Of the metric of
    `checkpoint.keep_best`, else of `stop_at`, else of the loss. Unset: the job trains all its steps."""
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
    def target(self) -> Target | None:
        """The metric at which the job is done."""
        return None if self.stop_at is None else parse_target(self.stop_at)

    @property
    def folder(self) -> str:
        """The output folder, given or by default."""
        return self.output if self.output is not None else f"runs/{self.name}"


class ModelConfig:
    """`[model]` in Python: `ModelConfig(family=..., layers=4)` is a section of that family, checked."""

    def __new__(cls, **settings: Any) -> Any:
        return TypeAdapter[AnyModel](Model).validate_python(settings)


class AugmentConfig(Section):
    """`[data.augment]`: random changes of images for training, other ones each time that an image is read."""

    crop: Annotated[float, Field(gt=0, le=1)] | None = None
    """Least share of an image's area that a random crop keeps, with sides of 3:4 to 4:3, which is then scaled to the
    model's size; unset: images are scaled and cropped as in validation."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that an image is mirrored."""
    operations: NonNegative = 0
    """Number of operations of RandAugment, of 14 such as turning, shearing, brightness and contrast."""
    magnitude: Annotated[int, Field(ge=0, le=30)] = 9
    """Strength of these operations."""


class DataConfig(Section):
    """`[data]`: where samples come from."""

    source: str = "python-docs"
    """`python-docs`, `text`, `jsonl`, `table`, `digits`, or `package.module:function` that returns a data set or the
    rows of a table."""
    path: str | tuple[str, ...] | None = None
    """Files or folders for `text`, `jsonl` and `table`. A table is Parquet, JSON lines, CSV, Arrow, a folder that
    `save_to_disk` of datasets wrote, or a folder of images (needs the extra `freshet[data]`)."""
    weights: Annotated[tuple[PositiveNumber, ...], Field(min_length=1)] | None = None
    """Weight of each entry of `path`, of tables: training takes samples of them in these proportions, whatever their
    sizes. An epoch is then as many samples as all of them have. Unset: all rows count alike."""
    validation_path: str | tuple[str, ...] | None = None
    """Tables with the held-out rows; unset: the last ones of `path`, or the part `validation` of a folder of images."""
    task: (
        Literal["language", "chat", "masked-language", "classification", "question-answering", "images"]
        | None
    ) = None
    """Purpose of the rows of a table. `language`: documents, and their next tokens. `chat`: conversations in the form
    of the tokenizer's chat template; the loss asks for the answers alone. `masked-language`: texts of which some tokens
    are hidden, other ones in each epoch. `classification`: texts or pairs of texts, and a class or, with
    `model.classes = 1`, a number. `question-answering`: questions, contexts and answers in the shape of SQuAD.
    `images`: images, and a class. Unset: the first one that the model is made for."""
    columns: dict[str, str] = Field(default={})
    """Columns of a table by what is in them: `text` for `language` and `masked-language`, `messages` for `chat`,
    `text`, `label` and perhaps `pair` for `classification`, `question`, `context` and `answers` for
    `question-answering`, `image` and `label` for `images`. One that is left out has that name."""
    mask_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that `masked-language` asks for."""
    overlap: NonNegative | None = None
    """Tokens that two windows of a long context share, in `question-answering`; unset: a third of `model.context`."""
    augment: AugmentConfig | None = None
    """`[data.augment]`: random changes of images; unset: none."""
    labels: tuple[str, ...] | None = None
    """Names of the classes in a table, in the order of their numbers; unset: those of the model, or labels are
    numbers; in a folder of images the names of its folders, sorted."""
    pack: bool = False
    """Fill each sample of `language` and `chat` with whole documents, or conversations, that do not see each other;
    `false`: each begins a sample of its own, and the rest is padding."""
    too_long: Literal["error", "cut", "drop"] = "error"
    """Fate of a row of a table with more tokens than `model.context`. Documents of `language` go on in further rows
    unless `pack` is on, contexts of `question-answering` in further windows; there it is about the question, which is
    never cut."""
    sha256: str | None = None
    """sha256 of the text's tokens, or of images and the versions of what decodes them; unset: computed when the job is
    submitted. Every rank, and a resumed job, refuses another text, but accepts a copy of the same text at another
    path."""
    field: str = "text"
    """Key of the text in each line of a `jsonl` file."""
    tokenizer: str | None = None
    """`bytes`, or the path of a Hugging Face `tokenizer.json` or of its folder (needs the extra `freshet[tokenizers]`);
    unset: the one in `model.path`, else `bytes`."""
    shuffle: Shuffle | None = None
    """Order of the samples in an epoch, part of the trajectory. `permutation` sorts an array of them all, 8 bytes per
    sample on each rank that reads; `feistel` computes each place by itself and takes none. Unset: `permutation` for
    fewer than 10 million samples."""
    buckets: Positive = 1
    """Fixed parts of the samples: replica r draws from part r modulo `buckets` alone, each part shuffled by itself. A
    divisor of `pipeline.replicas`; part of the trajectory."""
    validation_fraction: Fraction = 0.05
    """Share of the samples that is held out, from the end."""
    validation_batches: Positive | None = None
    """Most steps' worth of held-out samples, of `replicas x microbatches x microbatch_size` each, in one validation,
    however the batch grows; unset: all of them. Each is taken once."""
    cache: str | None = None
    """Folder of the memory-mapped tokens; unset: `data/` in the job's output folder."""
    arguments: Arguments = Field(default={})
    """Keyword arguments for a source given by import path."""


class CheckpointConfig(Section):
    """`[checkpoint]`: what survives on disk."""

    every_steps: NonNegative = 0
    """Steps between checkpoints, which are written in the background; 0: only at the end and on request."""
    keep: Positive = 2
    """Number of checkpoints to keep; older ones are deleted once a newer one is complete."""
    keep_best: Annotated[str, AfterValidator(_known_metric)] | None = None
    """Metric of validations, or `loss`: a checkpoint is written after each validation that is the best so far, and the
    best one is kept beside the `keep` newest. Unset: none is."""


class PipelineConfig(Section):
    """`[pipeline]`: how the model and the batch are cut."""

    ranks: Positive | Auto = 1
    """All ranks: the ranks of one pipeline times `pipelines`, which is `replicas` if unset. `auto`: as many of the
    cluster's as make the shortest step."""
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
    pipelines: Positive | None = None
    """Pipelines that run at the start, at most `replicas`; unset: one per replica. With fewer, each executes several
    replicas one after the other, with the same bits; more run once layers are frozen (`freeze.pack`) and ranks are
    free."""
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

    @property
    def pipeline_count(self) -> int:
        """Pipelines that run at the start."""
        return self.pipelines or self.replicas

    def recomputed(self, layers: int) -> tuple[int, ...]:
        """The layers that are recomputed, of a model with `layers` layers."""
        if isinstance(self.recompute, bool):
            return recomputable(layers) if self.recompute else ()
        return tuple(sorted(set(self.recompute)))


CHECK_EVERY = 10
"""Steps between stability checks by default."""


class FreezeConfig(Section):
    """`[freeze]`: which weight gradients are skipped, and when."""

    method: Literal[
        "none",
        "timelyfreeze",
        "apf",
        "autofreeze",
        "timelyfreeze+apf",
        "timelyfreeze+autofreeze",
        "pipetransformer",
        "prefix",
        "timelyfreeze+pipetransformer",
        "timelyfreeze+prefix",
        "auto",
    ] = "none"
    """`timelyfreeze` computes how much each action freezes; `apf` and `autofreeze` choose parameters and
    layers that are stable; `timelyfreeze+apf` and `timelyfreeze+autofreeze` spend what the first computes on what the
    second chooses. `pipetransformer` freezes more and more layers from the input up, as their gradients become small;
    `prefix` as many as `prefix` or `schedule` say. Frozen layers from the input up, those of `autofreeze` too, have no
    backward pass at all; with `timelyfreeze+pipetransformer` and `timelyfreeze+prefix`, the layers above freeze as
    `timelyfreeze` computes, again whenever more layers are frozen as a whole. `auto` begins as
    `timelyfreeze`; after monitoring, and now and again from then on, the job takes that or a `prefix`, whichever is
    predicted to come to a given accuracy sooner."""
    r_max: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = "auto"
    """TimelyFreeze: largest mean freeze ratio of a stage. `auto`: each layer freezes as much as makes the time to a
    given accuracy least, by the times and the gradients of the monitored steps, which may be nothing."""
    least_update: Annotated[float, Field(gt=0, le=1)] = 0.5
    """`r_max = "auto"`: least share of a step's progress that is to be left."""
    warm_up: NonNegative | None = None
    """Last step without freezing, T_w; unset: `optimizer.warmup_steps`, or a tenth of the job if that is 0.
    Unset phases shrink to fit a short job."""
    monitoring: Positive | None = None
    """Last step of monitoring, T_m: nothing is frozen in its first half, everything in its second. Unset: 10 steps
    after `warm_up`, 4 with `r_max = "auto"`."""
    ramp: Positive | None = None
    """Last step of the ramp, T_f, after which ratios apply in full; unset: a tenth of the job after
    `monitoring`."""
    check_every: Positive | Literal["epoch"] | None = None
    """APF, AutoFreeze and PipeTransformer: steps between checks of what to freeze, from the end of the warm-up on;
    `"epoch"`: as many as an epoch has. Unset: 10 for APF and AutoFreeze, an epoch for PipeTransformer, as in its
    paper."""
    apf_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """APF: a tensor whose score falls below this is frozen, T_APF. The score is the mean of |E| / E_abs over
    its scalars: 1 while all move one way, sqrt((1 - apf_alpha) / (1 + apf_alpha)) when only noise is left,
    which is 0.23 by default. Below that hardly anything is stable; the paper's 0.01 is for single scalars."""
    apf_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """APF: decay of the moving averages of eq. 2, per check."""
    autofreeze_percentile: Annotated[float, Field(ge=0, le=100)] = 80.0
    """AutoFreeze: layers whose score is in this lowest percentile may freeze, P_Auto."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 1 / 3
    """PipeTransformer: the largest share of the layers still trained that one check freezes (eq. 1)."""
    rule: Literal["paper", "authors"] = "paper"
    """PipeTransformer: which layers a check may freeze, within the bound of `alpha`. `paper`: those before the one with
    the smallest gradient (eq. 1); `authors`, as their published code does: those before the first whose gradient still
    changes more from check to check than 70 % of the layers' do."""
    prefix: NonNegative | None = None
    """`method = "prefix"` or `"timelyfreeze+prefix"`: layers to freeze, from the input up, from the first step on. The
    last layer is never frozen."""
    schedule: tuple[tuple[Positive, NonNegative], ...] = ()
    """In place of `prefix`: [step, layers] pairs in order of steps; from that step on, so many layers are frozen. Fewer
    than before thaws the others."""
    thaw: Literal["never", "plateau", "rate"] = "never"
    """When all layers frozen from the input up are trained again, to the end: `plateau`, once a validation is no better
    than the best before it; `rate`, once the learning rate has fallen to a tenth."""
    pack: Literal["planner", "paper", "off"] = "planner"
    """Layout of the pipelines once their first layers are frozen as a whole; changes no bit. `planner`: once another
    one is predicted to save more time than the change costs, the layers move to fewer ranks, and those that this frees
    run more pipelines, up to `pipeline.replicas`. `paper`: PipeTransformer's Algorithm 1 cuts, and the ranks of a
    pipeline are halved while its memory allows. `off`: the layout stays. All but `off` measure the model first."""
    frozen_cost: Annotated[float, Field(ge=0, le=1)] = 1 / 6
    """`pack = "paper"` and `batch = "scale"`: cost of a frozen layer over that of a trained one, the paper's lambda."""
    batch: Literal["keep", "scale"] = "keep"
    """Samples of a step as layers are frozen as a whole; part of the trajectory. `keep`: as many as before, however
    many pipelines run. `scale`, as in PipeTransformer: once the layers together cost half as much, a step has twice as
    many replicas, which as many pipelines can execute, then four times. A frozen layer costs `frozen_cost`. The job
    takes the samples that its steps would have taken with the first batch, in fewer steps; the batch never shrinks
    again. `optimizer.warmup_steps`, the schedule of the learning rate and PipeTransformer's `check_every` count in
    steps of the first batch, all other numbers of steps in steps."""
    lr: LearningRate = "constant"
    """`batch = "scale"`: factor on the learning rate. `linear`: how many times as large the batch is; `sqrt`: the root
    of that."""
    frozen_mode: Literal["train", "eval"] = "train"
    """Mode of the frozen layers from the input up: `train` keeps their dropout and has batch norms go on following the
    batches, `eval` has them compute as in a validation."""
    cache: Annotated[str, Field(pattern="^(auto|off|.*/.*)$")] = "auto"
    """Where what frozen layers make of samples is kept for the next epochs, from the input up; changes no bit.
    `auto`: in shared memory of the node, then on disk in the job's folder, if reading them takes less time than
    computing them; a folder, as a path with a slash: there, likewise; `off`: nowhere."""
    cache_bytes: NonNegative | None = None
    """`cache = "auto"`: the most that this takes of a node's shared memory; unset: a quarter of what would be
    free without it."""
    cache_disk_bytes: NonNegative | None = None
    """The most that this takes on disk; unset: a tenth of what would be free without it."""

    @property
    def check_steps(self) -> int:
        """Steps between checks, once settled; an unset number is that of APF and AutoFreeze."""
        assert self.check_every != "epoch", "an epoch's steps are settled with the spec"
        return self.check_every or CHECK_EVERY

    @property
    def by_prefix(self) -> bool:
        """Whether layers are frozen as a whole, from the input up, and have no backward pass then."""
        return prefix_rule(self.method) is not None

    @property
    def lasts(self) -> bool:
        """Whether a layer that is frozen as a whole stays so to the end of the job."""
        layers, rule = [frozen for _, frozen in self.schedule], prefix_rule(self.method)
        rises = rule in ("pipetransformer", "autofreeze") or (rule == "prefix" and layers == sorted(layers))
        return self.thaw == "never" and rises

    @property
    def timely(self) -> bool:
        """Whether ratios come from the freeze program."""
        return has_program(self.method)

    @property
    def used(self) -> frozenset[str]:
        """The keys that affect what `method` freezes; all other keys have no effect."""
        if self.method == "none":
            return frozenset({"method"})
        keys = {"method", "warm_up"}
        if self.timely:
            keys |= {"r_max", "monitoring", "ramp"} | ({"least_update"} if self.r_max == "auto" else set())
        if self.method.endswith("apf"):
            keys |= {"check_every", "apf_threshold", "apf_alpha"}
        if self.method.endswith("autofreeze"):
            keys |= {"check_every", "autofreeze_percentile"}
        if prefix_rule(self.method) == "pipetransformer":
            keys |= {"check_every", "alpha", "rule"}
        if prefix_rule(self.method) == "prefix":
            keys = {"prefix", "schedule"} | (keys if self.timely else {"method"})
        if self.by_prefix or self.method == "auto":
            keys |= {"frozen_mode", "thaw", "batch"}
            keys |= {"lr", "frozen_cost"} if self.batch == "scale" else set()
        return frozenset(keys)

    @property
    def phases(self) -> Phases | None:
        """TimelyFreeze's phases, once resolved; None for methods without phases."""
        if not self.timely:
            return None
        warm_up, monitoring, ramp = self.warm_up, self.monitoring, self.ramp
        assert warm_up is not None, "the phases are settled with the spec"
        assert monitoring is not None
        assert ramp is not None
        return Phases(warm_up=warm_up, monitoring=monitoring, ramp=ramp)


class EmulatedConfig(Section):
    """`[cluster.emulated]`: modelled times of an emulated device, one number for all layers or one per layer."""

    forward_s: float | tuple[float, ...] = 0.01
    """Forward pass of one layer and microbatch; that of the first and the last layer includes reading the data."""
    input_grad_s: float | tuple[float, ...] = 0.01
    """Input gradient of one layer and microbatch."""
    weight_grad_s: float | tuple[float, ...] = 0.01
    """Weight gradient of one layer and microbatch."""
    profile: str | None = None
    """JSON file with the lists `forward_s`, `input_grad_s`, `weight_grad_s`; replaces the numbers above."""


class ElasticConfig(Section):
    """`[elastic]`: how the job handles ranks that fail, join, or receive notice to leave."""

    redundancy: Literal["peer", "auto", "checkpoint", "none"] | None = None
    """`peer` keeps copies of every layer on other ranks, on other nodes if there are any: a lost rank costs the step in
    flight, or with `copy_every` some more. `checkpoint` goes back to the newest checkpoint. `none` ends the job. `auto`
    takes what is predicted to make the shortest step among `peer`, `peer` with a `copy_every`, and `checkpoint`, each
    if a lost rank then undoes at most `undone_steps` steps; `freshet plan` shows what each costs. Unset: `peer` with
    more than one rank, else `checkpoint`."""
    copy_every: Positive = 1
    """Steps from one copy that `peer` takes to the next. 1: owners send their gradients in each step, and copies are as
    new as the layers. More: the whole state is copied to host memory every so many steps and fetched by other ranks
    while training goes on; a lost rank then sends the job back to the newest copy that all ranks have, at most
    2 x `copy_every` - 1 steps, unless copying takes longer than `copy_every` steps, which the log says. Steps that are
    run again have the same bits. Where links are slow, a state in several steps is less to send than gradients in
    each."""
    undone_steps: NonNegative = 0
    """The most committed steps that a lost rank may undo, for `redundancy = "auto"`. 0: none."""
    copies: Annotated[int, Field(ge=1, le=3)] = 1
    """Copies of every layer, 1 to 3, that `peer` keeps beside the layer itself, each on another node, in other zones
    as far as there are (`ray.io/availability-zone`, a label of Ray's nodes): any so many nodes may go at one instant,
    and no committed step is lost, or with `copy_every` those since the newest copy. 2 copies need 3 nodes, 3 copies 4.
    Where replicas are on several nodes, they count as copies of each other."""
    copies_in: Literal["auto", "device", "host"] = "auto"
    """Where a rank keeps copies that are as new as the layers. `device`: on its device, updated after each commit.
    `host`: in host memory, a state and the gradients since, which the device applies when the copy is needed, and every
    `refresh_every` steps for a new state. `auto`: `host` for GPUs, else `device`."""
    refresh_every: Positive = 4
    """Steps after which a copy in host memory gets a new state, and so the most gradients that it keeps. More: less to
    copy between host and device. Less: less host memory, 4 bytes per parameter and step beside 12 for the state."""
    spares: NonNegative = 0
    """Idle ranks without layers, ready to replace a lost one."""
    min_ranks: Positive = 1
    """With fewer ranks the job pauses until capacity returns."""
    grow: bool = True
    """Add ranks, up to `pipeline.ranks`, when the cluster has room for them and it pays."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A rank that does not answer for this long is killed. So is a rank that computes a single action for
    this long and for ten times as long as a usual step; the first step of a generation has
    `cluster.timeout_s`. Time in which the rank had no processor, or its whole host was silent, does not count, up to
    four times as long or `cluster.timeout_s`."""
    wait_s: NonNegativeSeconds = 600.0
    """Seconds that a job with too few ranks waits for capacity before it ends. It first writes a checkpoint of
    what they hold."""
    attempts: Positive = 3
    """The job ends after this many failures without a new committed step in between, whichever rank raised,
    died or hung."""
    migration: Literal["live", "deferred", "stop"] = "live"
    """Migration of layers between ranks: `live` while training continues, with the same bits; `deferred` as in
    DynPipe (different bits); `stop` between two steps."""
    notice_file: str | None = None
    """A file on each node that announces by appearing that the node is leaving; for drills. It may hold the
    seconds left. `{node}` in its path stands for the node's id in the cluster."""
    notices: tuple[Literal["ray", "sigterm", "aws", "gcp", "azure"], ...] = ("ray", "sigterm")
    """Sources of notices: Ray's drains, SIGTERM to a rank, the metadata services of clouds (one rank of each
    node watches them)."""
    salvage: Literal["none", "weights"] = "none"
    """Recovery when a rank leaves and only the weights of its layers, or shards of them, were fetched, not yet their
    moments. `none`: all layers go back to the newest checkpoint. `weights`: these layers, or shards, continue with that
    checkpoint's moments: the steps since it are kept, but the bits differ. All weights are then sent before any
    moments. Where replicas share states out and compute in 32 bits, it also helps if a rank dies while a step is
    computed, once weights have been gathered: siblings have its weights. Not for models whose layers share
    parameters."""
    allow_faults: bool = False
    """Allow `freshet fault` to inject faults into the job."""

    def copies_on_host(self, kind: str) -> bool:
        """Whether ranks on devices of that kind keep copies in host memory."""
        return self.copies_in == "host" or (self.copies_in == "auto" and kind == "cuda")

    @property
    def peer_copies(self) -> int:
        """Copies of each layer beside itself, once `redundancy` is settled: 0 where it is not `peer`."""
        return self.copies if self.redundancy == "peer" else 0


class AdaptConfig(Section):
    """`[adapt]`: how the job answers ranks that become slower or faster, or have less memory."""

    policy: Literal["forest", "measured", "epoch", "off"] = "off"
    """`measured`: each rank's slowdown is measured in every step; another plan is taken up where it pays, and layers
    move while training goes on. `forest`: likewise, and the machine's interference model says how much other layers
    would be slowed down there. `epoch`: measured likewise, but the plan changes only at the ends of passes over the
    data, and training stops for it (PipeDream's way, to compare). `off`: plans change only when ranks fail, join or
    leave, or on request, and every device counts as the profile's median one in every later plan."""
    epoch_steps: Positive | None = None
    """Steps from one change of plan to the next with `epoch`. Unset: one pass over the training samples."""
    memory_reserve: Fraction = 0.05
    """Share of a device's memory that is to stay free, unless `policy` is `off`. A rank that suddenly has less left
    gives back what it caches, holds its next microbatch up for 0.3 s at most, and its layers move to other ranks. 0:
    only a failed allocation is answered, as it always is."""
    record: bool = False
    """Whether the planner writes down everything that it is told and answers, to `planner.jsonl.gz` beside the event
    log, 1 GiB at most: `freshet adapt replay` repeats its decisions from it."""


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


class WorkerConfig(Section):
    """The sections of a job that its ranks use; the same value goes to every rank. `orchestrator/spec/job_spec.py` adds
    the others."""

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

    @property
    def device(self) -> DeviceKind:
        """The kind of device that a rank computes on, once the spec is settled."""
        assert self.cluster.device != "auto", "the device is settled by the cluster"
        return self.cluster.device

    @property
    def per_rank(self) -> Mapping[str, float]:
        """Resources that each rank reserves, once the spec is settled."""
        assert self.cluster.resources_per_rank is not None, "the resources are settled by the cluster"
        return self.cluster.resources_per_rank

    @property
    def goals(self) -> Goals:
        """Goals of the job that its validations decide."""
        job = self.job
        return Goals.of(stop_at=job.stop_at, patience=job.patience, keep_best=self.checkpoint.keep_best)

    @property
    def microbatches(self) -> int:
        """Microbatches per replica in one step, M, once the spec is settled."""
        assert self.pipeline.microbatches != "auto", "the microbatches are settled by the plan"
        return self.pipeline.microbatches

    def course(self, further: tuple[Leg, ...] = ()) -> Course:
        """The course of the job's batch, once the spec is settled.

        Args:
            further: legs after the one that the spec says.
        """
        pipeline = self.pipeline
        return Course.of(pipeline.replicas, self.microbatches, pipeline.microbatch_size, further)
