"""From `[data]` to an open data set: the built-in sources by name, anything else by import path.

Checks what a user can get wrong; imports a source's libraries only when a job uses that source.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from workers.config import DataConfig
from workers.data.corpus import (
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    Corpus,
    JsonLines,
    TextFiles,
    find_files,
    python_docs,
)
from workers.data.dataset import OpenData
from workers.data.digits import open_digits
from workers.data.tables.given_rows import table_of
from workers.data.tables.image_data import open_images
from workers.data.tables.table_data import open_table
from workers.data.token_cache import open_tokens
from workers.data.tokenizer import BYTES, load_tokenizer, tokenizer_identity
from workers.data.user_source import as_open_data
from workers.data.windows import TokenWindows
from workers.models.families.family import TextModel
from workers.models.model_config import AnyModel, families
from workers.process.import_path import call_import_path
from workers.process.torch_modes import check_modes_kept
from workers.protocol.errors import JobError
from workers.reproducibility import rng

_SOURCE = rng.key(0, "source")
"""Key of what a source draws as it is opened, by each process."""
_TEXT_SOURCES = ("python-docs", "text", "jsonl")
_TABLE = "table"
_SOURCES = (*_TEXT_SOURCES, _TABLE, "digits")


def open_dataset(config: DataConfig, model: AnyModel, output: str) -> OpenData:
    """The data that `config` describes, cut to what `model` takes.

    `output` is the job's folder; tokens are cached in its `data/` unless `config.cache` names another.

    Raises:
        JobError: an unknown source, a file that is missing, empty or broken, too little text, sizes that do
            not fit the model, or a source by import path that does not work.
    """
    if ":" in config.source:
        _refuse_path(config)
        return _imported(config, model, output)
    if config.source not in _SOURCES:
        close = difflib.get_close_matches(config.source, _SOURCES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "write one of them, or package.module:function"
        raise JobError(f"data.source = {config.source!r} is not one of {', '.join(_SOURCES)}: {hint}")
    if config.source != _TABLE:
        _refuse_table_keys(config)
    if config.arguments:
        raise JobError(
            f"data.arguments are passed to a source given by import path, and {config.source!r} takes none:"
            " remove them"
        )
    if config.source == "digits":
        _refuse_path(config)
        if model.reads == "tokens":
            raise JobError(
                f"data.source = 'digits' is images, and model.family = {model.family!r} reads tokens:"
                f" set model.family to {families('images')}, or choose a text source such as python-docs"
            )
        return OpenData(dataset=open_digits(model, config.validation_fraction))
    preparation = model.image_preparation()
    if preparation is not None and config.source == _TABLE:
        return open_images(config, model, preparation, _cache_folder(config.cache, output))
    if preparation is not None or not isinstance(model, TextModel):
        raise JobError(
            f"data.source = {config.source!r} is text, and model.family = {model.family!r} reads images:"
            f" set data.source to table or digits, or model.family to {families('tokens')}"
        )
    if config.source == _TABLE:
        return open_table(config, model, _cache_folder(config.cache, output))
    return _text(config, model, output)


def _refuse_table_keys(config: DataConfig) -> None:
    keys = ("task", "columns", "labels", "validation_path", "weights", "overlap", "augment", "pack")
    set_keys = [key for key in keys if getattr(config, key)]
    if set_keys:
        raise JobError(
            f'data.{set_keys[0]} belongs to data.source = "table", and data.source is {config.source!r}: remove it, or'
            " read a table"
        )


def _text(config: DataConfig, model: TextModel, output: str) -> OpenData:
    corpus = _corpus(config)
    named = config.tokenizer or BYTES
    tokenizer = load_tokenizer(named)
    folder = _cache_folder(config.cache, output)
    cached = open_tokens(corpus, tokenizer, tokenizer_identity(named), folder)
    tokens = cached.tokens
    if config.sha256 not in (None, cached.sha256):
        raise JobError(
            f"the tokens of data.path have the sha256 {cached.sha256}, not data.sha256 = {config.sha256!r}: the text"
            " or the tokenizer has changed, or it is another one"
        )
    if model.vocabulary is not None and model.vocabulary < tokenizer.vocabulary:
        largest = int(tokens.max())
        if largest >= model.vocabulary:
            raise JobError(
                f"model.vocabulary = {model.vocabulary}, but the text holds token {largest}: leave"
                f" model.vocabulary unset, or set it to the tokenizer's {tokenizer.vocabulary}"
            )
    return OpenData(
        dataset=TokenWindows(tokens, model.context, config.validation_fraction),
        tokenizer=tokenizer,
        vocabulary=tokenizer.vocabulary,
        tokens_per_sample=model.context,
        sha256=cached.sha256,
    )


def _corpus(config: DataConfig) -> Corpus:
    if config.source == "python-docs":
        _refuse_path(config)
        return python_docs()
    if config.source == "text":
        return TextFiles(find_files(config.path, TEXT_SUFFIXES, config.source))
    return JsonLines(find_files(config.path, JSONL_SUFFIXES, config.source), config.field)


def _refuse_path(config: DataConfig) -> None:
    if config.path is not None:
        raise JobError(
            f"data.path is set, but data.source = {config.source!r} reads no files:"
            " set data.source to text, jsonl or table, or remove data.path"
        )


def _cache_folder(cache: str | None, output: str) -> Path:
    if cache is not None:
        return Path(cache)
    if output.startswith("file://"):
        return Path(output.removeprefix("file://")) / "data"
    if "://" in output:  # nothing can be memory-mapped there
        return Path.home() / ".cache" / "freshet" / "data"
    return Path(output) / "data"


def _imported(config: DataConfig, model: AnyModel, output: str) -> OpenData:
    with rng.keyed(_SOURCE):
        returned = call_import_path(config.source, config.arguments, "data.source")
    check_modes_kept(f"data.source = {config.source!r}")
    origin = f"data.source = {config.source!r}"
    reads_rows = isinstance(model, TextModel) and model.tasks and model.image_preparation() is None
    table = table_of(returned, origin) if reads_rows else None
    if table is not None and isinstance(model, TextModel):
        return open_table(config, model, _cache_folder(config.cache, output), table)
    _refuse_table_keys(config)
    return as_open_data(returned, config.validation_fraction, origin)
