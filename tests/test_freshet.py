"""The face for Python users: light to import, whole, and what the guides use."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import freshet

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OURS = ("orchestrator", "workers", "planner", "dashboard")


def test_the_import_brings_neither_torch_nor_ray() -> None:
    light = "import freshet, sys; assert not {'torch', 'ray', 'numpy', 'pydantic'} & sys.modules.keys()"
    spec = "import freshet, sys; freshet.Spec; assert not {'torch', 'ray'} & sys.modules.keys()"
    for code in (light, spec):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", freshet.__all__)
def test_every_name_is_there_and_is_what_a_type_checker_takes_it_for(name: str) -> None:
    found = getattr(freshet, name)
    tree = ast.parse((ROOT / "freshet" / "__init__.py").read_text())
    declared = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    module, there = declared[name]
    assert found is getattr(sys.modules[module], there)
    assert name in dir(freshet)


def test_a_name_that_is_not_there_is_said() -> None:
    with pytest.raises(AttributeError, match="freshet has no Trainr: it has AsyncClient, "):
        freshet.Trainr  # noqa: B018


@pytest.mark.parametrize("page", [*GUIDES, *EXAMPLES], ids=lambda path: path.name)
def test_guides_and_examples_use_nothing_else(page: Path) -> None:
    text = page.read_text()
    code = (
        text if page.suffix == ".py" else "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))
    )
    used = set(re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))
    assert not used & {*OURS}
