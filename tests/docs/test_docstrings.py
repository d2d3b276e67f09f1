"""Docstrings begin with what they name: a noun, or a verb in the indicative."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("planner", "workers", "orchestrator", "dashboard", "freshet")
HEADLESS = re.compile(
    r"((In|By|At|Into|For|On|With|Before) (which|what|how)|Of|What|How|That|Those|These|So|As|Which|Whose|Whom)\b"
)


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each string that stands by itself."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("package", PACKAGES)
def test_a_docstring_begins_with_a_noun_or_a_verb(package: str) -> None:
    headless = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for line, text in docstrings(file)
        if HEADLESS.match(text)
    ]
    assert not headless
