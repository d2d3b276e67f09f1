"""The reference of the job spec as markdown, made from the sections themselves.

`docs/spec.md` is the output of `python -m orchestrator.spec.reference`; a test keeps the two equal.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.spec.job_spec import Spec

_INTRODUCTION = """# The job spec

A job is one TOML file, `freshet train job.toml`, or the same object in Python, `orchestrator.spec.job_spec.Spec`.
Only `job.name` must be given. Any key can be set on the command line, `--set model.width=256`: the value is
read as TOML, a bare word as a string. TOML has no null: write `"null"` to turn off what may be null.

An unknown key is an error. Values that are `auto` or unset are settled before the first step and written to
`job.json` in the output folder.

This file is the output of `python -m orchestrator.spec.reference`.
"""


def reference() -> str:
    """The whole reference."""
    return _INTRODUCTION + "".join(_sections(Spec, ()))


def _sections(section: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    fields = {
        name: field for name, field in section.model_fields.items() if not _is_section(field.annotation)
    }
    if path:
        yield f"\n## [{'.'.join(path)}]\n\n{_summary(section)}\n\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|\n"
        for name, field in fields.items():
            meaning = _cell(field.description or "")
            yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |\n"
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            section_type: Any = field.annotation
            yield from _sections(section_type, (*path, name))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _summary(section: type[BaseModel]) -> str:
    """The first line of the section's docstring, without the name it opens with."""
    text = (section.__doc__ or "").strip().split("\n")[0].split(": ", 1)[-1]
    return text[:1].upper() + text[1:]


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(argument) for argument in arguments))
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "table"
    if origin is not None and arguments:  # Annotated: the constraint is in the meaning
        return _type(arguments[0])
    names = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "`null`"}
    return names.get(annotation, "any")


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "unset"
    return f"`{json.dumps(field.default)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
