"""Commands in shell texts, parsed by the command lines that they are for: Freshet's and Ray's."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator
from typing import Any

import click
import typer

from orchestrator.cli.main import app
from orchestrator.spec.job_spec import Spec, parse_override

with warnings.catch_warnings():  # of Ray Serve, about its own use of pydantic
    warnings.simplefilter("ignore")
    from ray.scripts.scripts import cli as ray_cli

_REFUSALS = tuple(
    kind
    for kind in (*click.UsageError.__mro__, *typer.BadParameter.__mro__)
    if kind.__name__ == "ClickException"
)
"""What click raises, and what the copy of it in typer does."""


class RefusedError(Exception):
    """A command line does not take a command."""


_FRESHET: Any = typer.main.get_command(app)
_WORDS_BEFORE = ("exec", "until", "while", "if", "then", "else", "do", "set -e;")
_ENDS = re.compile(r"&&|\|\||[;|\n]|2?>\s*\S+|2>&1|(?<!&)&(?!&)|[(){}]")


def in_shell(text: str) -> Iterator[list[str]]:
    """The command lines of a shell text that start Freshet or Ray, as words; a variable is a `1`."""
    text = re.sub(r"\\\n\s*", " ", text)
    text = re.sub(r"\$\([^()]*\)|\$\{?[\w?:]+[^}\s]*\}|\$\w+", "1", text)
    for line in re.sub(r"(^|\s)#.*", "", text).split("\n"):
        for part in _ENDS.split(line):
            try:
                words = shlex.split(part)
            except ValueError:
                continue
            while words and (words[0] in _WORDS_BEFORE or re.match(r"\w+=", words[0])):
                words.pop(0)
            if words and is_ours(words):
                yield words


def is_ours(words: list[str]) -> bool:
    """Whether these words start Freshet or Ray, with something to do."""
    name = words[0].rsplit("/", 1)[-1]
    return (name in ("freshet", "ray") and len(words) > 1) or words[1:3] == ["-m", "orchestrator"]


def check(words: list[str]) -> None:
    """Parse a command with the command line that it is for.

    Raises:
        RefusedError: it takes no such command, option or value.
        ValueError: `--set` names a key that no spec has.
    """
    name = words[0].rsplit("/", 1)[-1]
    try:
        if name == "ray":
            _check_ray(words[1:])
        else:
            _check_freshet(words[1:] if name == "freshet" else words[3:])
    except _REFUSALS as error:
        raise RefusedError(f"{' '.join(words)}: {error}") from error


def _check_freshet(words: list[str]) -> None:
    name, *arguments = words
    command = _FRESHET.commands.get(name)
    if command is None:
        raise click.UsageError(f"there is no command freshet {name}")
    context = command.make_context(name, list(arguments))
    for override in context.params.get("overrides") or ():
        (section, *key), value = parse_override(override)
        given: dict[str, dict[str, object]] = {"job": {"name": "any"}}
        given.setdefault(section, {})[key[0]] = value
        Spec.model_validate(given)


def _check_ray(words: list[str]) -> None:
    command: Any = ray_cli
    while isinstance(command, click.Group):
        name, *words = words
        if name not in command.commands:
            raise click.UsageError(f"there is no command ray {name}")
        command = command.commands[name]
    context = command.make_context(command.name, list(words))
    entrypoint = list(context.params.get("entrypoint") or ())
    if entrypoint and is_ours(entrypoint):
        check(entrypoint)
