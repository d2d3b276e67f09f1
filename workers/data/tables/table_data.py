"""`table`: the rows of a table as training data, for a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from workers.config import DataConfig
from workers.data.dataset import Batch, OpenData
from workers.data.split import held_out
from workers.data.tables.files import Rows, files_of, find_tables, read_rows
from workers.data.tables.stored_rows import StoredRows, open_rows
from workers.data.tasks.registry import TASKS
from workers.data.tasks.task import EncodedRow, Setting, Task
from workers.data.tokenizer import BYTES, load_tokenizer
from workers.models.families.family import TextModel
from workers.protocol.errors import JobError
from workers.reproducibility import rng


class TaskRows:
    """Samples are rows; those for validation are of a table of their own, or the last ones."""

    def __init__(
        self, task: Task, rows: StoredRows, validation: StoredRows | None, validation_fraction: float
    ) -> None:
        """Raises:
        JobError: too few rows to hold any out.
        """
        self._task, self._rows = task, rows
        self.train_samples = len(rows)
        self._held_out, self._first, self.validation_samples = validation or rows, 0, len(validation or ())
        if validation is None:
            self.validation_samples = held_out(len(rows), validation_fraction)
            self.train_samples = self._first = len(rows) - self.validation_samples

    def train(self, indices: list[int], draws: list[int] | None = None) -> Batch:
        draws = [rng.key(0, "sample", index) for index in indices] if draws is None else draws
        return self._task.batch([self._rows[index] for index in indices], draws)

    def validation(self, indices: list[int]) -> Batch:
        rows = [self._held_out[self._first + index] for index in indices]
        return self._task.batch(rows, [rng.key(0, "held out", index) for index in indices])


def open_table(config: DataConfig, model: TextModel, folder: Path) -> OpenData:
    """The table that `config` names, for a task of `model`.

    Args:
        folder: of the cached rows.

    Raises:
        JobError: the task is not one of the model's; the tokenizer or a file is missing or wrong; a row is not what the
            task takes.
    """
    name = _task_name(config, model)
    tokenizer = load_tokenizer(config.tokenizer or BYTES)
    setting = Setting(
        tokenizer=tokenizer,
        length=model.context,
        too_long=config.too_long,
        classes=model.class_count,
        labels=_labels(config, model),
        mask_fraction=config.mask_fraction,
    )
    task = TASKS[name](setting)
    columns = _columns(config, task)

    def opened(path: str | tuple[str, ...] | None, key: str) -> StoredRows:
        tables = find_tables(path, key)
        stats = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(tables)
        ]
        determined_by = [
            *(name, columns, tokenizer.identity, setting.length, setting.too_long),
            *(setting.classes, dict(setting.labels), stats),
        ]
        return open_rows(lambda: _rows(task, tables, columns), determined_by, tokenizer.vocabulary, folder)

    rows = opened(config.path, "data.path")
    held = opened(config.validation_path, "data.validation_path") if config.validation_path else None
    digests = [each.sha256 for each in (rows, held) if each is not None]
    sha256 = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    if config.sha256 not in (None, sha256):
        raise JobError(
            f"the rows of data.path have the sha256 {sha256}, not data.sha256 = {config.sha256!r}: the table, the task"
            " or the tokenizer has changed, or it is another one"
        )
    return OpenData(
        dataset=TaskRows(task, rows, held, config.validation_fraction),
        tokenizer=tokenizer,
        vocabulary=tokenizer.vocabulary,
        tokens_per_sample=model.context,
        sha256=sha256,
    )


def _task_name(config: DataConfig, model: TextModel) -> str:
    """Raises JobError where the model is not made for the task."""
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


def _labels(config: DataConfig, model: TextModel) -> Mapping[str, int]:
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


def _columns(config: DataConfig, task: Task) -> dict[str, str]:
    """Role -> column, of those that are given and those with the name of a role.

    Raises:
        JobError: the task has no such role.
    """
    known = (*task.roles, *task.optional)
    if unknown := [role for role in config.columns if role not in known]:
        raise JobError(f"data.columns has {', '.join(unknown)}: this task has columns for {', '.join(known)}")
    return {role: role for role in task.roles} | config.columns


def _rows(task: Task, tables: tuple[Path, ...], columns: dict[str, str]) -> Iterator[EncodedRow]:
    for table in tables:
        first = 1
        for found in read_rows(table):
            _check_columns(found, columns, table)
            there = {role: role for role in task.optional if role in found} | columns
            of_roles = {role: found[column] for role, column in there.items()}
            yield from task.rows(of_roles, str(table), first)
            first += len(next(iter(of_roles.values())))


def _check_columns(found: Rows, columns: dict[str, str], table: Path) -> None:
    for role, column in columns.items():
        if column not in found:
            raise JobError(
                f"{table} has no column {column!r}, it has {', '.join(found)}: name the one with the {role},"
                f' data.columns = {{ {role} = "..." }}'
            )
