"""The map in docs/architecture.md matches the tree: it shows every room, and all that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
MAP = ARCHITECTURE.split("```mermaid\n")[1].split("```")[0]
PACKAGES = ("planner", "workers", "orchestrator", "dashboard")
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name not in ("spec.md", "profile.md")
]


def rooms_of(package: str) -> set[str]:
    """The sub-packages of `package`, as dotted names."""
    return {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in (ROOT / package).rglob("__init__.py")
        if init.parent != ROOT / package
    }


def drawn() -> dict[str, str]:
    """For each node of the map, the dotted name of its room."""
    return {
        node: f"{package}.{label.replace('/', '.')}"
        for package, body in re.findall(r'subgraph (\w+)\["[^"]*"\]\n(.*?)\n  end', MAP, re.DOTALL)
        for node, label in re.findall(r"^\s*(\w+)\[([\w/]+)\]$", body, re.MULTILINE)
    }


def arrows() -> list[tuple[str, str]]:
    """The map's arrows, as dotted names of rooms or packages."""
    named = drawn() | {package: package for package in PACKAGES}
    return [
        (named[source], named[target]) for source, target in re.findall(r"^\s*(\w+) --> (\w+)$", MAP, re.M)
    ]


def imports(source: str, target: str) -> bool:
    """Whether a module of `source`, apart from its sub-rooms, imports one of `target`."""
    folder = ROOT / source.replace(".", "/")
    files = folder.rglob("*.py") if source in PACKAGES else folder.glob("*.py")
    names = {name for file in files for name in imported(file)}
    if within(source, target):  # a room's imports of itself are not imports of the room around it
        names = {name for name in names if not within(name, source)}
    return any(within(name, target) for name in names)


def within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


@cache  # each file is asked for once for every level of rooms
def imported(file: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_on_the_map_and_none_that_does_not_exist(package: str) -> None:
    assert {room for room in drawn().values() if room.startswith(package + ".")} == rooms_of(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_sentence_of_a_room_is_the_first_of_its_docstring(package: str) -> None:
    section = ARCHITECTURE.split(f"### {package}/")[1].split("\n#")[0]
    said = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", section, re.MULTILINE))
    written = {}
    for room in rooms_of(package):
        folder = room.replace(".", "/")
        docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
        assert "Not here: " in docstring, f"{folder}/__init__.py does not say what is not in it"
        written[folder.removeprefix(package + "/")] = docstring.split("\n\n")[0].replace("\n", " ")
    assert said == written


def test_arrows_agree_with_the_imports_and_never_run_both_ways() -> None:
    assert len(arrows()) > 20
    for source, target in arrows():
        assert imports(source, target), f"{source} does not import {target}"
        assert not imports(target, source), f"{target} imports {source}, against the arrow"


def modules_of(package: str) -> dict[str, Path]:
    """The modules of `package` but for doors, by dotted name."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts): file
        for file in (ROOT / package).rglob("*.py")
        if file.name != "__init__.py"
    }


def closing_imports(arrows: dict[str, dict[str, list[str]]]) -> list[str]:
    """The imports that tie rooms into a circle.

    Args:
        arrows: by importing and imported room, the imports.
    """
    reached = {name: set(targets) for name, targets in arrows.items()}
    for _ in arrows:
        for name, beyond in reached.items():
            reached[name] = beyond.union(*(reached.get(other, set()) for other in beyond))
    return [
        f"{source} imports {target}: {', '.join(lines)}"
        for source, targets in arrows.items()
        for target, lines in targets.items()
        if source in reached.get(target, set())
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_rooms_import_each_other_in_a_circle(package: str) -> None:
    """Rooms are the folders and modules that lie side by side, at every level."""
    modules = modules_of(package)
    for around in (package, *sorted(rooms_of(package))):
        arrows: dict[str, dict[str, list[str]]] = {}
        depth = around.count(".") + 2
        for name, file in modules.items():
            for other in {found for found in imported(file) if found in modules}:
                source, target = (".".join(each.split(".")[:depth]) for each in (name, other))
                if within(name, around) and within(other, around) and source != target:
                    arrows.setdefault(source, {}).setdefault(target, []).append(f"{name} -> {other}")
        assert closing_imports(arrows) == []


def test_a_circle_of_rooms_is_told_with_the_imports_that_close_it() -> None:
    arrows = {"a": {"b": ["a.x -> b"], "c": ["a -> c"]}, "b": {"d": ["b -> d"]}, "d": {"a": ["d -> a.x"]}}
    assert closing_imports(arrows) == [
        "a imports b: a.x -> b",
        "b imports d: b -> d",
        "d imports a: d -> a.x",
    ]


def test_package_doors_import_nothing() -> None:
    for package in PACKAGES:
        for door in (ROOT / package).rglob("__init__.py"):
            assert not list(imported(door)), door


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_links_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    files = set(
        re.findall(
            r"`((?:planner|workers|orchestrator|dashboard|deploy|tests|benchmarks|examples|docs)/[\w./-]+)`",
            text,
        )
    )
    assert not [name for name in files if not (ROOT / name).exists()]
    links = {link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link}
    assert not [link for link in links if link and not (page.parent / link).exists()]
