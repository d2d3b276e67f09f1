"""Fields and facts that families of models have in common. No torch before a model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from workers.models.image_preparation import ImagePreparation, usual_preparation
from workers.models.lora_config import Lora
from workers.protocol.errors import JobError
from workers.protocol.section import Fraction, Positive, Section, Units

if TYPE_CHECKING:
    from torch import Tensor, nn

    from workers.models.definition import ModelDefinition


class ModelFamily(Section):
    """A family: its fields in `[model]`, the data that it reads, and its layers."""

    reads: ClassVar[Literal["tokens", "images"] | None] = None
    """Input of the first layer; None: anything."""
    cost_keys: ClassVar[tuple[str, ...]] = ()
    """Fields that layer costs depend on and that the layers' parameter counts do not tell."""
    has_library: ClassVar[bool] = False
    """Whether another library defines its models, and reads what `write_folder` writes."""
    slow_imports: ClassVar[tuple[str, ...]] = ()
    """Modules that its layers import and that take seconds: a process that forks ranks imports them first."""

    family: Any
    """The name of each, as a literal."""
    weights: str | None = None
    """Safetensors file to start from, as `freshet export` writes it, or the folder of another run, for its newest
    checkpoint, or of one of its checkpoints, on a file system that every node sees; unset: random weights. A resumed
    job continues from its checkpoint instead, and may name a copy of the file elsewhere."""
    weights_sha256: str | None = None
    """sha256 of that file, or of the checkpoint's manifest; unset: computed when the job is submitted. Other content is
    refused."""
    fixed: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Parameters that the job does not train: patterns of LAYER.PARAMETER, such as `["embed.*", "*.bias"]`. They have
    neither gradients nor moments; unset: all are trained but those whose builder sets `requires_grad = False`."""

    lora: Lora | None = None
    """Train adapters instead (LoRA, needs the extra `freshet[lora]`): `{ rank = 8, alpha = 16, dropout = 0.0, targets =
    ["q_proj", "v_proj"], train = ["head.*"] }`. All other parameters stay, but those that `train` names by patterns as
    in `fixed`. Unset: none."""

    @property
    def user_code(self) -> str | None:
        """Import path of a function of the user's that makes the layers."""
        return None

    @property
    def own_tokenizer(self) -> str | None:
        """The folder of the tokenizer that belongs to it."""
        return None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of tables that it can be trained for, the usual one first."""
        return ()

    @property
    def class_count(self) -> int:
        """Number of classes that it tells apart; 1: it predicts a number; 0: it does neither."""
        return 0

    @property
    def class_numbers(self) -> Mapping[str, int]:
        """Name of a class -> its number, where classes have names."""
        return {}

    def image_preparation(self) -> ImagePreparation | None:
        """The preparation of images for it; None: it does not take images, or says nothing of them.

        Raises:
            JobError: it says something that is not done here.
        """
        return None

    def located(self, absolute: Callable[[str], str]) -> Self:
        """This section with the files that it names where ranks find them, which run in another folder than the user.

        Args:
            absolute: makes a path absolute.

        Raises:
            JobError: a file that tells of the model is missing or broken.
        """
        return self.model_copy(update={"weights": self.weights and absolute(self.weights)})

    def without_files(self) -> Self:
        """This section with values drawn in place of those in files: for layers whose values come from elsewhere."""
        return self.model_copy(update={"weights": None})

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """The layers, not yet built. Imports torch.

        Args:
            vocabulary: the tokenizer's; None where there are no tokens.

        Raises:
            JobError: sizes that do not fit together, or a factory that fails.
        """
        raise NotImplementedError

    def check_layers(self) -> None:
        """Check of the layers what takes computing, once, before ranks start. Imports torch.

        Raises:
            JobError: they are not the model that they should be.
        """

    def with_labels(self, labels: Sequence[str]) -> Self:
        """This section with names of its classes, in the order of their numbers, for a folder that tells them."""
        return self

    def write_folder(
        self, read: Callable[[int], Mapping[str, Tensor]], out: Path, dtype: str | None, *, merge: bool
    ) -> tuple[int, int, tuple[str, ...]]:
        """Write the trained model into a folder as the library does that defines it. Imports torch.

        Args:
            read: number of a layer -> its weights and buffers.
            dtype: of floating-point tensors, such as "bfloat16"; None: as they are trained.
            merge: whether adapters become part of the matrices beside which they lie.

        Returns:
            (number of tensors, their bytes, names of files that were copied from the folder it began with).

        Raises:
            JobError: no other library defines this model, or `out` holds something.
            OSError: it cannot be written.
        """
        raise JobError(
            f"the run's model is {self.family or 'made by a factory'}, which no other library defines: leave out"
            " --format, and one file of weights is written"
        )

    def settled(self, *, vocabulary: int | None, weights: str | None, weights_sha256: str | None) -> Self:
        """This section with what the data and the file of weights determine."""
        return self.model_copy(update={"weights": weights, "weights_sha256": weights_sha256})


class TextModel(ModelFamily):
    """A family that text can be cut for."""

    reads = "tokens"
    context: Positive = 128
    """Tokens per sample, T."""
    vocabulary: Positive | None = None
    """Number of tokens; unset: the tokenizer's (256 for bytes)."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("language", "chat")

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether its layers take several documents in a row, as `workers/models/documents.py` says."""
        return False

    @property
    def positions(self) -> int | None:
        """Most tokens of a sample; None: any number."""
        return None

    def settled(self, *, vocabulary: int | None, weights: str | None, weights_sha256: str | None) -> Self:
        settled = super().settled(vocabulary=vocabulary, weights=weights, weights_sha256=weights_sha256)
        return settled.model_copy(update={"vocabulary": self.vocabulary or vocabulary})


class ImageModel(ModelFamily):
    """A family that classifies square images."""

    reads = "images"
    image_size: Positive = 8
    """Side of the square input images, in pixels."""
    channels: Positive = 1
    """Channels of the input images."""
    classes: Positive = 10
    """Number of classes."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("images",)

    @property
    def class_count(self) -> int:
        return self.classes

    def image_preparation(self) -> ImagePreparation:
        return usual_preparation(self.channels, (self.image_size, self.image_size))


class TransformerSizes(ModelFamily):
    """Sizes of transformers."""

    layers: Positive = 8
    """Transformer blocks. The embedding and the head are two more layers."""
    width: Positive = 128
    """Model width, D."""
    heads: Positive = 4
    """Attention heads; must divide `width`."""
    hidden: Positive | None = None
    """Width of the feed-forward layer; unset: 4 x width."""
    dropout: Fraction = 0.0
    """Dropout probability in embedding, attention output and feed-forward output."""
    units: Units | None = None
    """`"halves"`: attention and feed-forward layer of a block are layers of their own, between which a model can be cut
    too; unset or `"blocks"`: each block is one layer."""

    def gpt2_block(self, *, causal: bool = True) -> Callable[[], nn.Module]:
        """The builder of blocks after GPT-2."""
        from workers.models.modules.transformer import Block

        return partial(
            Block,
            width=self.width,
            heads=self.heads,
            hidden=self.hidden or 4 * self.width,
            dropout=self.dropout,
            causal=causal,
            layers=self.layers,
        )

    def stacked(
        self,
        embed: Callable[[], nn.Module],
        block: Callable[[], nn.Module],
        head: Callable[[], nn.Module],
        *,
        tied: bool = False,
        language: bool = False,
    ) -> ModelDefinition:
        """The layers `embed`, `block0`, ..., `head`, trained for cross-entropy.

        Args:
            tied: whether embedding and head are one matrix.
            language: as in `ModelDefinition`.

        Raises:
            JobError: the heads do not divide the width.
        """
        from workers.metrics.measures import OfClasses, OfTokens
        from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef
        from workers.models.loss import mean_cross_entropy
        from workers.models.modules.transformer import halves_of

        if self.width % self.heads:
            raise JobError(
                f"model.width = {self.width} is not divisible by model.heads = {self.heads}:"
                f" choose a width of {multiples(self.width, self.heads)}, or another number of heads"
            )
        blocks = (LayerBuilder(f"block{index}", block) for index in range(self.layers))
        if self.units == "halves":
            blocks = (half for each in blocks for half in halves_of(each))
        layers = (LayerBuilder("embed", embed), *blocks, LayerBuilder("head", head))
        tie = (ParameterRef("embed", "token.weight"), ParameterRef("head", "projection.weight"))
        measure = OfTokens() if language else OfClasses()
        return ModelDefinition(layers, mean_cross_entropy, (tie,) if tied else (), language, measure)


class LanguageModel(TextModel, TransformerSizes):
    """A transformer that predicts the next token."""

    cost_keys = ("family", "heads", "context", "dropout")
    tied_embeddings: bool = False
    """Share the token embedding with the head."""

    @property
    def keeps_documents_apart(self) -> bool:
        return True

    def tokens(self, vocabulary: int | None) -> int:
        """The number of tokens: `vocabulary` unless the spec names one.

        Raises:
            JobError: neither does.
        """
        tokens = self.vocabulary or vocabulary
        if tokens is None:
            raise JobError(
                f"model.family = {self.family!r} needs a vocabulary and the data has no tokens:"
                " set model.vocabulary, or choose a text source such as python-docs"
            )
        return tokens


def multiples(number: int, divisor: int) -> str:
    """The nearest multiples of `divisor` on both sides of `number`, in words."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
