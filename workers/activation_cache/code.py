"""Digest of the Python code that makes activations: a job that goes on with other code finds nothing that was kept."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn


def code_of(module: nn.Module) -> bytes:
    """Digest of the files that define the classes of `module` and of the modules in it."""
    return _digest({_file_of(type(part)) for part in module.modules()})


def code_of_source(source: str) -> str:
    """Digest, in hexadecimal, of the file of a data source `package.module:function`; empty for a built-in one."""
    name, colon, _ = source.partition(":")
    return _digest({_file_of(sys.modules[name])}).hex() if colon and name in sys.modules else ""


def _file_of(of: Any) -> str:
    """The source file of a class or a module, or its name: it may have been made without one."""
    try:
        return inspect.getsourcefile(of) or repr(of)
    except (TypeError, OSError):
        return repr(of)


def _digest(files: Iterable[str]) -> bytes:
    return hashlib.sha256(b"".join(map(_content, sorted(files)))).digest()


@cache
def _content(file: str) -> bytes:
    """Digest of a file, as it is when this process first asks: about when it was imported."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).digest()
    except (OSError, ValueError):
        return hashlib.sha256(file.encode()).digest()
