"""`table`: the rows of a table as training data, for a task."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from planner.wording import counted
from workers.config import DataConfig
from workers.data.dataset import Batch, OpenData
from workers.data.mixture import Mixture
from workers.data.split import held_out
from workers.data.tables.files import Rows, TableSource, tables_at
from workers.data.tables.packed_rows import PackedRows, open_packed
from workers.data.tables.stored_rows import RowRange, StoredRows, Stretches, open_rows
from workers.data.tasks.language import NextToken
from workers.data.tasks.registry import TASKS
from workers.data.tasks.task import EncodedRow, HasTargetsAlone, JudgedTogether, Setting, Task
from workers.data.tokenizer import BYTES, load_tokenizer
from workers.metrics.measure import Measure
from workers.models.families.family import ModelFamily, TextModel
from workers.protocol.errors import JobError
from workers.reproducibility import rng


class TaskRows:
    """Samples are rows; those for validation are of a table of their own, or the last ones of each."""

    def __init__(
        self,
        task: Task,
        tables: Sequence[StoredRows],
        validation: StoredRows | None,
        validation_fraction: float,
        weights: tuple[float, ...] | None = None,
        held_out_task: Task | None = None,
        pack: Callable[[RowRange], PackedRows] | None = None,
    ) -> None:
        """A data set.

        Args:
            weights: of the tables, by which training mixes them; None: all rows count alike.
            held_out_task: for validation; None: `task`.
            pack: makes samples of several rows of consecutive ones, for a task that packs; None: each row is a sample.

        Raises:
            JobError: too few rows to hold any out.
        """
        kept = [
            len(rows) if validation is not None else _kept(task, rows, validation_fraction) for rows in tables
        ]
        self._task, self._held_out_task = task, held_out_task or task
        train = [RowRange(rows, 0, count) for rows, count in zip(tables, kept, strict=True)]
        last = [RowRange(rows, count, len(rows)) for rows, count in zip(tables, kept, strict=True)]
        held = last if validation is None else [RowRange(validation, 0, len(validation))]
        self._batch, self._held_out_batch = task.batch, self._held_out_task.batch
        self.packed: list[PackedRows] = []
        """Its samples, where they are of several rows."""
        if pack is None:
            self._train, self._held_out = Stretches(train), Stretches(held)
        else:
            assert isinstance(task, NextToken)
            self._batch = self._held_out_batch = task.packed
            packs = [pack(rows) for rows in train], [pack(rows) for rows in held]
            self._train, self._held_out = (Stretches(each) for each in packs)
            self.packed = [each for part in packs for each in part]
        self.train_samples, self.validation_samples = len(self._train), len(self._held_out)
        self.mixture = None if weights is None else Mixture(self._train.lengths, weights)

    @property
    def draws_anew(self) -> bool:
        """Whether its task makes something else of a training sample in each epoch."""
        return self._task.draws

    @property
    def measure(self) -> Measure | None:
        """Metrics of the task that need the held-out rows."""
        return self._task.measure(self._held_out) if isinstance(self._task, JudgedTogether) else None

    def train(self, indices: list[int], draws: list[int] | None = None) -> Batch:
        draws = [rng.key(0, "sample", index) for index in indices] if draws is None else draws
        return self._batch([self._train[index] for index in indices], draws)

    def train_targets(self, indices: list[int], draws: list[int]) -> Batch:
        """`train` for a rank that needs no inputs, which may be left out."""
        if isinstance(self._task, HasTargetsAlone):
            return Batch((), self._task.targets([self._train[index] for index in indices]))
        return self.train(indices, draws)

    def validation(self, indices: list[int]) -> Batch:
        draws = [rng.key(0, "held out", index) for index in indices]
        return self._held_out_batch([self._held_out[index] for index in indices], draws)


def open_table(
    config: DataConfig, model: TextModel, folder: Path, given: TableSource | None = None
) -> OpenData:
    """The table that `config` names, for a task of `model`.

    Args:
        folder: of the cached rows.
        given: the table, where it is not in files.

    Raises:
        JobError: the task is not one of the model's; the tokenizer or a file is missing or wrong; a row is not what the
            task takes.
    """
    _check_text(config, model)
    name = chosen_task(config, model)
    tokenizer = load_tokenizer(config.tokenizer or BYTES)
    setting = Setting(
        tokenizer=tokenizer,
        length=model.context,
        too_long=config.too_long,
        classes=model.class_count,
        labels=named_classes(config, model),
        mask_fraction=config.mask_fraction,
        overlap=model.context // 3 if config.overlap is None else config.overlap,
        pack=config.pack,
    )
    task = TASKS[name](setting)
    if config.pack:
        _check_packing(name, task, model)
    columns = columns_of_roles(config, task)
    used = {*task.optional, *columns.values()}

    def opened(tables: tuple[TableSource, ...]) -> StoredRows:
        determined_by = [
            *(name, columns, tokenizer.identity, setting.length, setting.too_long, setting.overlap),
            *(setting.classes, dict(setting.labels), [[*table.identify(used)] for table in tables]),
            setting.pack,
        ]
        return open_rows(
            lambda: encoded_rows(task, tables, columns), determined_by, tokenizer.vocabulary, folder
        )

    mixed = [opened(each) for each in mixed_tables(config, tables_at, given)]
    held = (
        opened(tables_at(config.validation_path, "data.validation_path")) if config.validation_path else None
    )
    pack = partial(open_packed, room=model.context, folder=folder) if config.pack else None
    dataset = TaskRows(task, mixed, held, config.validation_fraction, config.weights, pack=pack)
    of_rows = dataset.packed or (*mixed, held)
    return OpenData(
        dataset=dataset,
        tokenizer=tokenizer,
        vocabulary=tokenizer.vocabulary,
        tokens_per_sample=model.context,
        sha256=sha256_of_rows(config, of_rows, "data.path" if given is None else given.name),
        measure=dataset.measure,
    )


def _check_text(config: DataConfig, model: TextModel) -> None:
    """Raises JobError where the data are for images, or rows are longer than the model takes."""
    if config.augment is not None:
        raise JobError("data.augment changes images, and the model reads text: remove it")
    if model.positions is not None and model.context > model.positions:
        raise JobError(
            f"model.context = {model.context:,} is more than the {model.positions:,} positions of the model: lower it"
        )


def _check_packing(name: str, task: Task, model: TextModel) -> None:
    """Raises JobError where the task or the model has no samples of several rows."""
    if not isinstance(task, NextToken):
        raise JobError(
            f'data.pack = true is for documents and conversations, and data.task is "{name}": remove it, and each row'
            " is a sample"
        )
    if not model.keeps_documents_apart:
        raise JobError(
            "data.pack = true needs layers that keep the documents of a sample apart, and those of"
            f" {repr(model.family) if model.family else 'a factory'} are not known to: remove it, or write a source"
            " that packs (package.module:function)"
        )


def sha256_of_rows(
    config: DataConfig,
    tables: Sequence[StoredRows | PackedRows | None],
    name: str = "data.path",
    decoder: str | None = None,
) -> str:
    """The sha256 of all rows, and of what decodes them in training.

    Args:
        name: of the tables, for messages.
        decoder: the libraries, with their versions, that decide the bits of decoded rows.

    Raises:
        JobError: the spec names another one.
    """
    digests = [each.sha256 for each in tables if each is not None]
    if decoder is not None:
        digests.append(hashlib.sha256(decoder.encode()).hexdigest())
    sha256 = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    if config.sha256 not in (None, sha256):
        changed = (
            "the task or the tokenizer" if decoder is None else f"a label or what decodes it ({decoder} here)"
        )
        raise JobError(
            f"the rows of {name} have the sha256 {sha256}, not data.sha256 ="
            f" {config.sha256!r}: the table, {changed} has changed, or it is another one"
        )
    return sha256


def mixed_tables(
    config: DataConfig, find: Callable[..., tuple[TableSource, ...]], given: TableSource | None = None
) -> list[tuple[TableSource, ...]]:
    """The tables by weight: those of each entry of data.path where it has weights, else all of them.

    Args:
        find: finds them, as `tables_at` does.
        given: the table, where it is not in files.

    Raises:
        JobError: the weights do not fit the tables.
    """
    weights, path = config.weights, config.path
    if weights is None:
        return [find(path, "data.path") if given is None else (given,)]
    paths = (path,) if isinstance(path, str) else path or ()
    if len(weights) != len(paths):
        raise JobError(
            f"data.weights has {counted(len(weights), 'number')}, and data.path"
            f" {counted(len(paths), 'entry', 'entries')}: give each file or folder of data.path its weight"
        )
    if config.shuffle == "permutation":
        raise JobError(
            'data.shuffle = "permutation" has no order for tables that are mixed (data.weights): leave data.shuffle out'
        )
    return [find(each, "data.path") for each in paths]


def _kept(task: Task, rows: StoredRows, validation_fraction: float) -> int:
    """Number of the first of `rows` that are trained on; rows that are judged together stay together.

    Raises:
        JobError: too few to hold any out.
    """
    kept = len(rows) - held_out(len(rows), validation_fraction)
    if isinstance(task, JudgedTogether):
        while 0 < kept < len(rows) and not task.begins(rows[kept]):
            kept -= 1
    if not kept:
        raise JobError(
            f"data.validation_fraction = {validation_fraction:g} leaves no row to train on: add data, lower it, or name"
            " tables of held-out rows (data.validation_path)"
        )
    return kept


def chosen_task(config: DataConfig, model: ModelFamily) -> str:
    """The task of the rows.

    Raises:
        JobError: the model is not made for it.
    """
    if not model.tasks:
        raise JobError(
            'data.source = "table" has no task for this model: write a source (package.module:function)'
        )
    if config.task is None:
        return model.tasks[0]
    if config.task not in model.tasks:
        raise JobError(
            f'data.task = "{config.task}" does not fit the model, which is made for {" or ".join(model.tasks)}: choose'
            " one of these, or another model (model.architecture)"
        )
    return config.task


def named_classes(config: DataConfig, model: ModelFamily) -> Mapping[str, int]:
    """Name of a class -> its number.

    Raises:
        JobError: there are more or fewer names than classes.
    """
    if config.labels is None:
        return model.class_numbers
    if len({*config.labels}) != model.class_count:
        raise JobError(
            f"data.labels names {len({*config.labels})} classes, and the model has {model.class_count}: name each once,"
            " or set model.classes"
        )
    return {name: number for number, name in enumerate(config.labels)}


def columns_of_roles(config: DataConfig, task: Task) -> dict[str, str]:
    """Role -> column, those that are given and those with the name of a role.

    Raises:
        JobError: the task has no such role.
    """
    known = (*task.roles, *task.optional)
    if unknown := [role for role in config.columns if role not in known]:
        raise JobError(f"data.columns has {', '.join(unknown)}: this task has columns for {', '.join(known)}")
    return {role: role for role in task.roles} | config.columns


def encoded_rows(
    task: Task, tables: tuple[TableSource, ...], columns: dict[str, str]
) -> Iterator[EncodedRow]:
    """The rows of all `tables`, as `task` makes them.

    Args:
        columns: role -> column.

    Raises:
        JobError: as the tables' `read` and `task`, or a column is missing.
    """
    for table in tables:
        first = 1
        for found in table.read():
            _check_columns(found, columns, table.name)
            there = {role: role for role in task.optional if role in found} | columns
            of_roles = {role: found[column] for role, column in there.items()}
            yield from task.rows(of_roles, table.name, first)
            first += len(next(iter(of_roles.values())))


def _check_columns(found: Rows, columns: dict[str, str], table: str) -> None:
    for role, column in columns.items():
        if column not in found:
            raise JobError(
                f"{table} has no column {column!r}, it has {', '.join(found)}: name the one with the {role},"
                f' data.columns = {{ {role} = "..." }}'
            )
