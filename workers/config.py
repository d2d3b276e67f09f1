"""The sections of a job spec that the ranks use. No torch here, so that any process can read a spec.

`orchestrator/spec/job_spec.py` composes them and turns validation errors into readable sentences.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from planner.freezing import Phases
from workers.models.model_config import AnyModel, Model
from workers.section import Arguments, Fraction, NonNegative, NonNegativeSeconds, Positive, Section
from workers.state.optimizer_config import OptimizerConfig


class ModelConfig:
    """`[model]` in Python: `ModelConfig(family=..., layers=4)` is a section of that family, checked."""

    def __new__(cls, **settings: Any) -> Any:
        return TypeAdapter[AnyModel](Model).validate_python(settings)


class DataConfig(Section):
    """`[data]`: where samples come from."""

    source: str = "python-docs"
    """`python-docs`, `text`, `jsonl`, `digits`, or `package.module:function` that returns a dataset."""
    path: str | tuple[str, ...] | None = None
    """Files or folders for `text` and `jsonl`."""
    sha256: str | None = None
    """sha256 of the text's tokens; unset: computed when the job is submitted. Every rank, and a resumed job,
    refuses another text, but accepts a copy of the same text at another path."""
    field: str = "text"
    """Key of the text in each line of a `jsonl` file."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json` (needs the extra `freshet[tokenizers]`)."""
    validation_fraction: Fraction = 0.05
    """Share of the samples that is held out, from the end."""
    validation_batches: Positive = 4
    """Most windows of `replicas x microbatches x microbatch_size` samples per validation; fewer if the
    held-out part is smaller."""
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


class FreezeConfig(Section):
    """`[freeze]`: which weight gradients are skipped, and when."""

    method: Literal[
        "none", "timelyfreeze", "apf", "autofreeze", "timelyfreeze+apf", "timelyfreeze+autofreeze"
    ] = "none"
    """`timelyfreeze` computes how much each action freezes; `apf` and `autofreeze` choose parameters and
    layers that have settled; with a `+`, the first determines how much and the second which."""
    r_max: Annotated[float, Field(ge=0, le=1)] = 0.8
    """TimelyFreeze: largest mean freeze ratio of a stage."""
    warm_up: NonNegative | None = None
    """Last step without freezing, T_w; unset: `optimizer.warmup_steps`, or a tenth of the job if that is 0.
    Unset phases shrink to fit a short job."""
    monitoring: Positive | None = None
    """Last step of monitoring, T_m: nothing is frozen in its first half, everything in its second. Unset: 10
    steps after `warm_up`."""
    ramp: Positive | None = None
    """Last step of the ramp, T_f, after which ratios apply in full; unset: a tenth of the job after
    `monitoring`."""
    check_every: Positive = 10
    """APF and AutoFreeze: steps between stability checks."""
    apf_threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    """APF: a tensor whose score falls below this is frozen, T_APF. The score is the mean of |E| / E_abs over
    its scalars: 1 while all move one way, sqrt((1 - apf_alpha) / (1 + apf_alpha)) when only noise is left,
    which is 0.23 by default. Below that hardly anything settles; the paper's 0.01 is for single scalars."""
    apf_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """APF: decay of the moving averages of eq. 2, per check."""
    autofreeze_percentile: Annotated[float, Field(ge=0, le=100)] = 80.0
    """AutoFreeze: layers whose score is in this lowest percentile may freeze, P_Auto."""

    @property
    def timely(self) -> bool:
        """Whether ratios come from the freeze program."""
        return self.method.startswith("timelyfreeze")

    @property
    def used(self) -> frozenset[str]:
        """The keys that affect what `method` freezes; all other keys have no effect."""
        if self.method == "none":
            return frozenset({"method"})
        keys = {"method", "warm_up"}
        if self.timely:
            keys |= {"r_max", "monitoring", "ramp"}
        if self.method.endswith("apf"):
            keys |= {"check_every", "apf_threshold", "apf_alpha"}
        if self.method.endswith("autofreeze"):
            keys |= {"check_every", "autofreeze_percentile"}
        return frozenset(keys)

    @property
    def phases(self) -> Phases | None:
        """TimelyFreeze's phases, once resolved; None for methods without phases."""
        if not self.timely:
            return None
        warm_up, monitoring, ramp = self.warm_up, self.monitoring, self.ramp
        assert warm_up is not None, "the phases are settled when a spec is resolved"
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


Precision = Literal["float32", "bfloat16", "bfloat16-autocast", "float16"]
DeviceKind = Literal["cpu", "cuda", "emulated"]


class WorkerConfig(Section):
    """The part of the resolved spec that a rank needs; the same value goes to every rank."""

    job: str
    """The job's name."""
    seed: NonNegative
    """Key of every random draw."""
    steps: NonNegative
    """Optimizer steps of the entire job."""
    precision: Precision
    """`workers/state/precision.py` says what each means."""
    threads: Positive
    """Torch threads per rank."""
    compile: bool = False
    """Whether layers are compiled."""
    validate_every: NonNegative
    """Steps between validations; 0: only after the last step."""
    timeline_every: NonNegative = 0
    """Steps between the timelines that every rank reports; 0: only the last step's."""
    curvature_every: NonNegative = 0
    """Steps between samples of how the gradient changes with the weights; 0: none."""
    sample_tokens: NonNegative = 0
    """Tokens to sample after the last step (language models)."""
    output: str
    """The job's folder, or a URI that every node reaches."""
    device: DeviceKind
    """The kind of device that the rank computes on."""
    pin_cores: bool = False
    """Whether the rank's thread is bound to one core."""
    microbatch_size: Positive
    """Samples in a microbatch."""
    microbatches: Positive
    """Microbatches per replica in one step, M."""
    replicas: Positive
    """Logical replicas, R: global microbatch = replica * M + microbatch."""
    model: Model
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    emulated: EmulatedConfig
    freeze: FreezeConfig = FreezeConfig()
    adapt: AdaptConfig = AdaptConfig()
    elastic: ElasticConfig = ElasticConfig()
