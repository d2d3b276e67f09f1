"""Templates of pages and pictures: Jinja2, which escapes every value, and the files that pages embed."""

from __future__ import annotations

from functools import cache
from importlib import resources

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


@cache
def environment(*packages: str) -> Environment:
    """The templates of `packages`; for each name, the first package that has it wins.

    Args:
        packages: dotted names, each with a folder `templates`.
    """
    found = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return found


@cache
def static(package: str, name: str) -> str:
    """The text of the file `name` in the folder `static` of `package`."""
    return resources.files(package).joinpath("static", name).read_text(encoding="utf-8")
