"""The reference of the job spec as markdown, made from the sections themselves.

`docs/spec.md` is the output of `python -m orchestrator.spec.reference`; a test keeps the two equal.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from orchestrator.spec.errors import subsections
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
    inner = {name: subsections(section, name) for name in section.model_fields}
    if path:
        yield f"\n## [{'.'.join(path)}]\n\n{_summary(section)}\n\n"
        yield from _table({name: field for name, field in section.model_fields.items() if not inner[name]})
    for name, found in inner.items():
        if len(found) > 1:
            yield from _union(name, section.model_fields[name].description or "", list(found.values()))
        else:
            for each in found.values():
                yield from _sections(each, (*path, name))


def _union(name: str, summary: str, families: list[type[BaseModel]]) -> Iterator[str]:
    """The keys of all families in one table, then those of each."""
    first, *others = (family.model_fields for family in families)
    common = {key: field for key, field in first.items() if all(key in each for each in others)}
    del common["family"]
    yield f"\n## [{name}]\n\n{summary}\n\n"
    yield from _table(common)
    for family in families:
        own = family.model_fields
        yield f"\n### [{name}] with {_chosen(family)}\n\n{_summary(family)}\n\n"
        yield from _table({key: field for key, field in own.items() if key not in {*common, "family"}})


def _chosen(family: type[BaseModel]) -> str:
    names = get_args(family.model_fields["family"].annotation)
    return f'`family = "{names[0]}"`' if names else "`factory`"


def _table(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield "| key | type | default | meaning |\n|---|---|---|---|\n"
    for name, field in fields.items():
        meaning = _cell(field.description or "")
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |\n"


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
