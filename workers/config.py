"""The sections of a job spec that the ranks consume. Values only: no torch here, so that any process can read a spec.

Every section is keyword-only, frozen, and refuses unknown keys; `orchestrator/spec.py` composes them and turns
validation errors into sentences for people.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A frozen section of a spec."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ModelConfig(Section):
    """`[model]`: a family with its sizes, or a factory of the user's own."""

    family: Literal["gpt", "llama", "vit"] | None = None
    """Built-in family; exactly one of `family` and `factory` is set."""
    factory: str | None = None
    """`package.module:function` that returns layers and a loss."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `factory`."""
    layers: Positive = 8
    """Transformer blocks. The embedding and the head are layers of their own, beside these."""
    width: Positive = 128
    """Model width, D."""
    heads: Positive = 4
    """Attention heads; must divide `width`."""
    kv_heads: Positive | None = None
    """Key and value heads of `llama` (grouped queries); must divide `heads`. Unset: as many as `heads`."""
    context: Positive = 128
    """Tokens per sample, T."""
    vocabulary: Positive | None = None
    """Token count; unset: what the data's tokenizer has (256 for bytes)."""
    hidden: Positive | None = None
    """Width of the feed-forward layer; unset: 4 x width (`gpt`, `vit`), 8/3 x width rounded up to 32 (`llama`)."""
    dropout: Fraction = 0.0
    """Dropout probability in embedding, attention output and feed-forward output."""
    tied_embeddings: bool = False
    """Share the token embedding with the head (`gpt`, `llama`)."""
    image_size: Positive = 8
    """Side of the square input images, in pixels (`vit`)."""
    patch_size: Positive = 2
    """Side of a patch, in pixels; must divide `image_size` (`vit`)."""
    channels: Positive = 1
    """Channels of the input images (`vit`)."""
    classes: Positive = 10
    """Classes to tell apart (`vit`)."""


class DataConfig(Section):
    """`[data]`: where samples come from."""

    source: str = "python-docs"
    """`python-docs`, `text`, `jsonl`, `digits`, or `package.module:function` that returns a dataset."""
    path: str | tuple[str, ...] | None = None
    """Files or folders for `text` and `jsonl`."""
    field: str = "text"
    """Key of the text in each line of a `jsonl` file."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face `tokenizer.json` (needs the extra `freshet[tokenizers]`)."""
    validation_fraction: Fraction = 0.05
    """Share of the samples that is held out, taken from the end."""
    validation_batches: Positive = 4
    """Windows of `replicas x microbatches x microbatch_size` samples per validation, at most: fewer if the held-out
    part is smaller."""
    cache: str | None = None
    """Folder of the memory-mapped tokens; unset: `data/` in the job's output folder."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for a source given by import path."""


class OptimizerConfig(Section):
    """`[optimizer]`: one implementation of each rule, the same bits everywhere."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate."""
    min_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of `lr` that is left at the last step of the cosine."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay (AdamW); added to the gradient (SGD). Never applied to parameters of fewer than two
    dimensions."""
    no_decay: tuple[str, ...] = ()
    """More parameters without decay: shell patterns over `layer.parameter` names, e.g. `embed.*`."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW: added to the root of the second moment."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD: momentum."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up before the cosine."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; `null` turns clipping off."""


class CheckpointConfig(Section):
    """`[checkpoint]`: what survives on disk."""

    every_steps: NonNegative = 0
    """Steps between checkpoints, written in the background; 0: only at the end and when asked."""
    keep: Positive = 2
    """How many checkpoints stay; older ones are deleted once a newer one is whole."""


class EmulatedConfig(Section):
    """`[cluster.emulated]`: modelled times of an emulated device, one number for all layers or one per layer."""

    forward_s: float | tuple[float, ...] = 0.01
    """Forward pass of one layer and microbatch."""
    input_grad_s: float | tuple[float, ...] = 0.01
    """Input gradient of one layer and microbatch."""
    weight_grad_s: float | tuple[float, ...] = 0.01
    """Weight gradient of one layer and microbatch."""
    profile: str | None = None
    """JSON file with the lists `forward_s`, `input_grad_s`, `weight_grad_s`; takes the place of the numbers above."""


Precision = Literal["float32", "bfloat16"]
DeviceKind = Literal["cpu", "cuda", "emulated"]


class WorkerConfig(Section):
    """Everything a rank needs to know of the resolved spec; the same value goes to every rank."""

    job: str
    """The job's name."""
    seed: NonNegative
    """Key of every random draw."""
    steps: NonNegative
    """Optimizer steps of the whole job."""
    precision: Precision
    """`bfloat16` runs forward and backward under autocast; weights, gradients and updates stay `float32`."""
    threads: Positive
    """Torch threads per rank."""
    validate_every: NonNegative
    """Steps between validations; 0: only after the last step."""
    timeline_every: NonNegative = 0
    """Steps between timelines that every rank reports; 0: only the last step's."""
    sample_tokens: NonNegative = 0
    """Tokens to sample after the last step (language models)."""
    output: str
    """The job's folder, or a URI that every node reaches."""
    device: DeviceKind
    """What the rank computes on."""
    microbatch_size: Positive
    """Samples in a microbatch."""
    microbatches: Positive
    """Microbatches per replica in one step, M."""
    replicas: Positive
    """Logical replicas, R: global microbatch = replica * M + microbatch."""
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    emulated: EmulatedConfig
