"""The reference of a profile's JSON as markdown, made from the dataclasses themselves.

`docs/profile.md` is the output of `python -m orchestrator.prepare.profile_reference`; a test keeps the two equal.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from planner.profile import (
    SCHEMA,
    Cluster,
    DeviceProfile,
    LayerProfile,
    Link,
    Matrix,
    ModelProfile,
    Noise,
    Profile,
)

_INTRODUCTION = f"""# The profile

What a job costs, as the planner sees it. `freshet profile SPEC --out FILE` measures it with the job's own ranks, all at
the same time, and writes JSON of schema {SCHEMA}; `--profile FILE` of `freshet plan` and `freshet train` takes one from
elsewhere, if it was made with the same model, microbatch size, precision and `settings`, and, on CPUs, with as many
threads. Seconds end in `_s`, bytes in `_bytes`. Times are for one microbatch: means over the microbatches of a repeat,
medians of these over repeats, and then over ranks. Bytes are counted storages, not resident size.

Measurements are kept in `~/.cache/freshet/profiles` (`freshet/profiles` in `XDG_CACHE_HOME` if that is set, or the
folder that `FRESHET_PROFILES` names), under a hash of what they depend on: model and data, microbatch size, precision,
threads, device, ranks, optimizer, torch, the user's own code, and the machine with its GPUs, or the cluster. `freshet
profile` always measures; everything else takes what is there, and says so if it is old or was measured beside other
work. Where the first steps of a job take another time than predicted, and no slow rank is the reason, such a profile is
marked as stale, and the next start measures again.

This file is the output of `python -m orchestrator.prepare.profile_reference`.
"""

_PARTS: tuple[tuple[str, type], ...] = (
    ("the file", Profile),
    ("model", ModelProfile),
    ("model.layers", LayerProfile),
    ("model.layers.matrices", Matrix),
    ("cluster", Cluster),
    ("cluster.devices", DeviceProfile),
    ("cluster.links", Link),
    ("noise", Noise),
)


def reference() -> str:
    """The whole reference."""
    return _INTRODUCTION + "".join(text for name, kind in _PARTS for text in _part(name, kind))


def _part(name: str, kind: type) -> Iterator[str]:
    yield f"\n## {name}\n\n{_line(inspect.getdoc(kind) or '')}\n\n| field | type | meaning |\n|---|---|---|\n"
    if kind is Profile:
        yield f"| `schema` | int | Version of this form, {SCHEMA}. |\n"
    for field, annotation, meaning in _fields(kind):
        yield f"| `{field}` | {annotation} | {_line(meaning)} |\n"


def _fields(kind: type) -> Iterator[tuple[str, str, str]]:
    """(name, type, docstring) of each field, read from the source: dataclasses keep no docstrings of fields."""
    (definition,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            meaning = ""
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                meaning = str(text.value.value)
            yield field.target.id, _type(ast.unparse(field.annotation)), meaning


def _type(annotation: str) -> str:
    """`annotation` in JSON's terms."""
    listed = re.sub(r"tuple\[(.*), \.\.\.\]", r"list of \1", annotation)
    listed = listed.replace("dict[str, Any]", "table of values")
    return (listed if listed == annotation else _type(listed)).replace(" | None", " or null")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
