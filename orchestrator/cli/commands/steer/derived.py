"""Commands of the table on the command line: `freshet pause` and all others that need nothing but their fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError

from orchestrator.cli.options import Address, Id, Job, Json, Wait
from orchestrator.commands.command import Argument, Flag, JobCommand, metadata, refused_fields
from planner.wording import some_of
from workers.protocol.errors import JobError


def derived(kind: type[JobCommand]) -> Callable[..., None]:
    """The function of a command, with the signature that Typer reads."""
    fields = kind.own_fields()

    def run(
        *, job: str, wait: bool, id: str | None, as_json: bool, address: str | None, **given: Any
    ) -> None:
        from orchestrator.cli.steering import sender, steer

        if kind.some and all(given[name] is None for name in kind.some):
            raise JobError(f"{kind.question} Give {some_of([_flag(name) for name in kind.some])}")
        try:
            command = kind(id=id, by=sender(), **given)
        except ValidationError as error:
            raise JobError(refused_fields(error)) from error
        typer.echo(steer(address, job, command, wait=wait, as_json=as_json))

    taken: dict[str, tuple[Any, Any]] = {"job": (Job, inspect.Parameter.empty)}
    for name, info in fields.items():
        argument, flag = metadata(info, Argument), metadata(info, Flag)
        if argument is not None:
            shown: Any = typer.Argument(help=info.description, metavar=argument.metavar)
        else:
            shown = typer.Option(flag.name if flag is not None else _flag(name), help=info.description)
        default = inspect.Parameter.empty if info.is_required() else info.default
        # A number or a word is text to Typer, and the command reads it.
        either = str in {type(each) for part in get_args(info.annotation) for each in get_args(part)}
        taken[name] = (Annotated[str | None if either else info.annotation, shown], default)
    taken |= {
        "wait": (Wait, kind.waits),
        "id": (Id, None),
        "as_json": (Json, False),
        "address": (Address, None),
    }
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, (annotation, default) in taken.items()
    ]
    run.__name__, run.__doc__, run.__annotations__ = kind.name, kind.__doc__, {}
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
