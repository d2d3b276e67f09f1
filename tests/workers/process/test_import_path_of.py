"""The import path of a function that a user gives from Python."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from workers.process.import_path import call_import_path, import_path_of
from workers.protocol.errors import JobError

MODULE = """
def build(width=3):
    return width

class Family:
    @staticmethod
    def build():
        return 0

double = lambda: 2

def wrapped():
    return 1

original, wrapped = wrapped, build
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "nets_given_from_python.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("nets_given_from_python")


def test_a_function_of_a_module_is_found_again(nets: Any) -> None:
    path = import_path_of(nets.build, "model")
    assert path == "nets_given_from_python:build"
    assert call_import_path(path, {"width": 5}, "model.factory") == 5


def in_the_script() -> int:
    return 0


@pytest.mark.parametrize(
    ("pick", "message"),
    [
        (
            lambda nets: nets.double,
            r"model = <lambda> of nets_given.* cannot be imported by the ranks: write",
        ),
        (lambda nets: nets.Family.build, r"model = Family\.build of nets_given.* cannot be imported"),
        (lambda nets: partial(nets.build, 4), r"model = functools\.partial.* has no name to import it by"),
        (lambda nets: nets.original, r"nets_given_from_python:wrapped names another function"),
    ],
)
def test_what_no_other_process_can_import_is_refused(
    nets: Any, pick: Callable[[Any], Callable[..., Any]], message: str
) -> None:
    with pytest.raises(JobError, match=message):
        import_path_of(pick(nets), "model")


def test_a_local_function_and_one_of_the_script_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> int:
        return 0

    with pytest.raises(JobError, match=r"data = .*local of .* write it with def at the top level"):
        import_path_of(local, "data")
    monkeypatch.setattr(in_the_script, "__module__", "__main__")
    with pytest.raises(JobError, match=r"data = in_the_script is defined in the script .* move it"):
        import_path_of(in_the_script, "data")
