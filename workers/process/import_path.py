"""Calls what a spec names by import path, `package.module:function`, and says in plain words what went wrong.

Knows nothing of what the function is for: models and data sets both come through here.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from workers.process.user_code import what_it_did, where
from workers.protocol.errors import JobError

_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def call_import_path(path: str, arguments: Mapping[str, Any], setting: str) -> Any:
    """Return what the function at `path` returns when called with the keyword `arguments`.

    `setting` is the key of the spec that holds `path`; it opens every message.

    Raises:
        JobError: `path` is not an import path, does not import or is not callable, or the function raised or called
            `sys.exit`.
    """
    function = _function(path, setting)
    try:
        return function(**arguments)
    except JobError:
        raise
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{key} = {value!r}" for key, value in arguments.items()) or "no arguments"
        raise JobError(
            f"{setting} = {path!r}: the function {what_it_did(error)} (it was called with {given}){where(error)}"
        ) from error


def import_path_of(function: Callable[..., Any], setting: str) -> str:
    """Return the import path of `function`, by which other processes find it.

    Args:
        setting: the name that the user passed `function` under; it opens every message.

    Raises:
        JobError: no other process can import `function`.
    """
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None)
    if module is None or name is None:
        raise JobError(
            f"{setting} = {function!r} has no name to import it by: write a function with def in a module"
        )
    if name == "<lambda>" or "." in name:
        raise JobError(
            f"{setting} = {name} of {module} cannot be imported by the ranks: write it with def at the top level of a"
            " module"
        )
    if module == "__main__":
        raise JobError(
            f"{setting} = {name} is defined in the script that starts the job, which the ranks do not import: move it"
            " to a module of its own and import it from there"
        )
    path = f"{module}:{name}"
    if _function(path, setting) is not function:
        raise JobError(
            f"{setting} = {name}: {path} names another function than the one given, and the ranks would call that:"
            " give the function under its own name"
        )
    return path


def _function(path: str, setting: str) -> Callable[..., Any]:
    match = _PATH.fullmatch(path)
    if match is None:
        raise JobError(
            f"{setting} = {path!r} is not an import path: write package.module:function, such as"
            " my_models.nets:build"
        )
    module_name, function_name = match.groups()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(missing + "."):
            raise JobError(
                f"{setting} = {path!r} does not import: there is no module {missing!r};"
                " its folder must be on the Python path (start from that folder, or install the package)"
            ) from error
        raise JobError(
            f"{setting} = {path!r} does not import: {module_name} imports {missing!r}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:
        raise JobError(
            f"{setting} = {path!r} does not import: {module_name} {what_it_did(error)}{where(error)}"
        ) from error
    if not hasattr(module, function_name):
        public = [name for name in vars(module) if not name.startswith("_")]
        close = difflib.get_close_matches(function_name, public, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise JobError(f"{setting} = {path!r} does not import: {module_name} has no {function_name!r}{hint}")
    function = getattr(module, function_name)
    if not callable(function):
        raise JobError(
            f"{setting} = {path!r}: {function_name!r} is not callable, it is of type"
            f" {type(function).__name__}"
        )
    return function
