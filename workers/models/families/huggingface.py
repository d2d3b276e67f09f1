"""`huggingface`: a model that Hugging Face's transformers defines, by its folder or by a name in the local cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from workers.models.families.family import TextModel
from workers.models.huggingface.processor import FILE as PROCESSOR
from workers.models.huggingface.processor import preparation_of, read_processor
from workers.models.image_preparation import ImagePreparation
from workers.protocol.errors import JobError
from workers.protocol.section import Arguments, Positive, Units

if TYPE_CHECKING:
    from torch import Tensor

    from workers.models.definition import ModelDefinition

CONFIG, ADAPTER = "config.json", "adapter_config.json"
USUAL_CLASSES = 2
"""Classes of a model of transformers whose config.json says nothing of them."""
_OF_IMAGES = "ForImageClassification"
"""End of the names of classes that classify images."""
_TASKS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": ("language", "chat"),
    "LMHeadModel": ("language", "chat"),
    "ForMaskedLM": ("masked-language",),
    "ForSequenceClassification": ("classification",),
    "ForQuestionAnswering": ("question-answering",),
    _OF_IMAGES: ("images",),
}
"""End of a class's name -> tasks of tables that it is made for."""
_USUAL_CHANNELS, _USUAL_SIDE = 3, 224
"""Channels and side of images where config.json says nothing of them."""
_OF_ONE_SIZE = ("ViTForImageClassification",)
"""Classes that take images of the size in config.json alone."""
_REFUSED: Mapping[str, str] = {
    "auto_map": "code of its own, which is not run here: save it as a class of transformers",
    "quantization_config": "quantized weights, which are not trained here: save it in float32 or bfloat16",
    "vision_config": "a vision and a language model in one, which is not cut here: write a factory (model.factory)",
    "audio_config": "an audio and a language model in one, which is not cut here: write a factory (model.factory)",
    "text_config": "several models in one, which are not cut here: save the one for text alone, or write a factory"
    " (model.factory)",
}
"""Field of a config.json that tells of what cannot be trained here -> in words, with the way out."""


class HuggingFaceConfig(TextModel):
    """`huggingface`: a model that transformers defines, and its weights."""

    reads = None
    cost_keys = ("family", "architecture", "config", "processor", "context")
    has_library = True
    slow_imports = ("transformers.modeling_utils", "transformers.masking_utils")
    family: Literal["huggingface"]
    """This family."""
    path: str | None = None
    """Folder that `save_pretrained` wrote, on a file system that every node sees, or the name of a model in the local
    cache of Hugging Face. Nothing is downloaded."""
    pretrained: bool = True
    """Begin with the weights in `path`; what it lacks, such as a new head, is drawn. `false`: draw all of them."""
    architecture: str | None = None
    """Class of transformers, such as `BertForSequenceClassification`; unset: the one that the folder names."""
    classes: Positive | None = None
    """Number of classes of a new head; unset: the folder's. 1: a regression."""
    units: Units | None = None
    """`"halves"`: attention and feed-forward layer of a block are layers of their own, in models where one tensor alone
    lies between them; unset or `"blocks"`: each block is one layer."""
    config: Arguments | None = None
    """Fields of the model's config.json; unset: read from `path`."""
    processor: Arguments | None = None
    """Fields of the model's preprocessor_config.json, which say how images are prepared; unset: read from `path`.
    Without such a file images are scaled to the model's size, and their pixels to -1 to 1."""

    @property
    def tasks(self) -> tuple[str, ...]:
        return next((tasks for end, tasks in _TASKS.items() if (self.architecture or "").endswith(end)), ())

    @property
    def keeps_documents_apart(self) -> bool:
        return "language" in self.tasks

    @property
    def class_count(self) -> int:
        if not {"classification", "images"} & {*self.tasks}:
            return 0
        config = self.config or {}
        return config.get("num_labels") or len(config.get("id2label") or ()) or USUAL_CLASSES

    @property
    def class_numbers(self) -> Mapping[str, int]:
        return (self.config or {}).get("label2id") or {}

    def image_preparation(self) -> ImagePreparation | None:
        if "images" not in self.tasks:
            return None
        config = self.config or {}
        side = config.get("image_size") or _USUAL_SIDE
        size = (side, side) if isinstance(side, int) else tuple(side)
        found = preparation_of(self.processor, config.get("num_channels") or _USUAL_CHANNELS, size)
        if self.architecture in _OF_ONE_SIZE and found.size != size:
            given, asked = (" x ".join(map(str, each)) for each in (found.size, size))
            raise JobError(
                f"{PROCESSOR} makes images of {given} pixels, and the model takes {asked}: change the size there, or"
                " set model.processor"
            )
        return found

    @property
    def positions(self) -> int | None:
        return (self.config or {}).get("max_position_embeddings")

    @property
    def own_tokenizer(self) -> str | None:
        return self.path if self.path is not None and (Path(self.path) / "tokenizer.json").is_file() else None

    def located(self, absolute: Callable[[str], str]) -> Self:
        """This section with the absolute path of the folder, and what its config.json says.

        Raises:
            JobError: there is no such folder, or its model cannot be trained here.
        """
        located = super().located(absolute)
        folder = None if located.path is None else _folder(located.path, absolute)
        config, processor = located.config, located.processor
        if config is None:
            if folder is None:
                raise JobError(
                    'model.family = "huggingface" needs model.path: the folder of a model, or its name'
                )
            config = _read(folder)
            processor = processor or read_processor(folder)
        _check(config)
        names = config.get("architectures") or [None]
        name = located.architecture or names[0]
        if name is None:
            raise JobError(f"{CONFIG} of model.path = {self.path!r} names no class: set model.architecture")
        if located.classes is not None:
            labels = {"num_labels": located.classes}
            config = {k: v for k, v in config.items() if k not in ("id2label", "label2id")} | labels
        changes: dict[str, Any] = {
            "path": None if folder is None else str(folder),
            "architecture": name,
            "config": config,
            "processor": processor if name.endswith(_OF_IMAGES) else None,
            "vocabulary": config.get("vocab_size"),
        }
        if changes["vocabulary"] is None:
            changes.pop("vocabulary")
        return located.model_copy(update=changes)

    def without_files(self) -> Self:
        return super().without_files().model_copy(update={"pretrained": False})

    def definition(self, vocabulary: int | None) -> ModelDefinition:
        """Its layers, as its architecture's file in `workers/models/huggingface/architectures/` cuts it, or the rule
        for models without one.

        Raises:
            JobError: as `located`; the class is unknown here; the data have more tokens, or `context` more positions,
                than the model.
        """
        if self.config is None or self.architecture is None:
            return self.located(lambda path: path).definition(vocabulary)
        from workers.models.huggingface.definition import definition_of, model_of
        from workers.models.huggingface.source import Source

        model = model_of(self.config, self.architecture)
        tokens, positions = (
            getattr(model.config, key, None) for key in ("vocab_size", "max_position_embeddings")
        )
        if vocabulary is not None and tokens is not None and vocabulary > tokens:
            raise JobError(
                f"data.tokenizer has {vocabulary:,} tokens, and the model's embedding {tokens:,}: use the tokenizer"
                " that belongs to the model"
            )
        if model.task == "language" and positions is not None and self.context > positions:
            raise JobError(
                f"model.context = {self.context:,} is more than the {positions:,} positions of the model: lower it"
            )
        source = Source(Path(self.path), model) if self.path is not None and self.pretrained else None
        return definition_of(model, source, self.units or "blocks")

    def check_layers(self) -> None:
        """Compare the layers of a class that no file knows with the whole model, both with two blocks."""
        from workers.models.huggingface.comparison import compare_with_whole
        from workers.models.huggingface.definition import CLASSES, model_of

        assert self.config is not None
        assert self.architecture is not None
        if self.architecture not in CLASSES:
            compare_with_whole(model_of(self.config, self.architecture))

    def with_labels(self, labels: Sequence[str]) -> Self:
        names = {str(number): name for number, name in enumerate(labels)}
        told = {"id2label": names, "label2id": {name: number for number, name in enumerate(labels)}}
        others = {key: value for key, value in (self.config or {}).items() if key != "num_labels"}
        return self.model_copy(update={"config": {**others, **told}})

    def write_folder(
        self, read: Callable[[int], Mapping[str, Tensor]], out: Path, dtype: str | None, *, merge: bool
    ) -> tuple[int, int, tuple[str, ...]]:
        """Write a folder as `save_pretrained` does, with the tokenizer of `path` if that is still there; of a model
        with adapters those, unless they are merged."""
        import torch

        from workers.models.huggingface.adapter import merged, write_adapter
        from workers.models.huggingface.definition import architecture_of, model_of
        from workers.models.huggingface.target import write_folder

        assert self.config is not None
        assert self.architecture is not None
        model = model_of(self.config, self.architecture)
        architecture = architecture_of(model)
        layers = architecture.layers_of(model, self.units or "blocks")
        number_type = None if dtype is None else getattr(torch, dtype)
        if self.lora is not None and not merge:
            return write_adapter(model, layers, read, out, self.lora, base=self.path, dtype=number_type)
        return write_folder(
            model,
            layers,
            architecture.ties(model),
            read if self.lora is None else merged(layers, read, self.lora),
            out,
            source=None if self.path is None else Path(self.path),
            dtype=number_type,
        )


def _folder(path: str, absolute: Callable[[str], str]) -> Path:
    """The folder of a model, by its path or its name in the cache.

    Raises:
        JobError: there is none.
    """
    folder = Path(absolute(path))
    if (folder / CONFIG).is_file():
        return folder
    if (folder / ADAPTER).is_file():
        raise JobError(
            f"model.path = {path!r} holds an adapter ({ADAPTER}), not a model: merge it with peft into the model that"
            " it belongs to, and name the folder of the merged one"
        )
    if folder.is_dir():
        raise JobError(f"model.path = {path!r} has no {CONFIG}: name a folder that save_pretrained wrote")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise JobError(
            f"model.path = {path!r} is no folder, and names are looked up with huggingface_hub: {error}; pip install"
            ' "freshet[huggingface]"'
        ) from error
    try:
        found = try_to_load_from_cache(path, CONFIG)
    except HFValidationError:
        found = None
    if not isinstance(found, str):
        raise JobError(
            f"model.path = {path!r} is neither a folder here nor a model in the local cache of Hugging Face: give the"
            " folder, or fetch it with `hf download` first"
        )
    return Path(found).parent


def _read(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise JobError(f"{folder / CONFIG} cannot be read ({error}): fetch it again") from error
    if not isinstance(config, dict):
        raise JobError(f"{folder / CONFIG} is no JSON object: fetch it again")
    return config


def _check(config: Mapping[str, Any]) -> None:
    """Raises JobError where the model is of a kind that cannot be trained here."""
    for key, what in _REFUSED.items():
        if config.get(key):
            raise JobError(f"the model's {CONFIG} has {key}: it is {what}")
    if config.get("is_encoder_decoder"):
        raise JobError(
            "the model is an encoder with a decoder, which is not cut here: write a factory (model.factory)"
        )
    if experts := next(
        (
            key
            for key, count in config.items()
            if key.endswith("experts") and isinstance(count, int) and count
        ),
        None,
    ):
        raise JobError(
            f"the model has experts ({experts} = {config[experts]}), which are not cut here: write a factory"
            " (model.factory)"
        )
