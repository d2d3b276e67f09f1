"""The table of commands: each has its line on the command line, its route, its form, its methods and its effect."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import typer.main
from bare_controller import controller_of
from serving import settings_in
from typer.core import TyperGroup

from dashboard.app import create_app
from dashboard.pages.controls import CONTROLS
from orchestrator.cli.main import app
from orchestrator.client.blocking_client import BlockingJobs
from orchestrator.client.jobs import Jobs
from orchestrator.commands.command import JobCommand
from orchestrator.commands.fault import InjectFault
from orchestrator.commands.table import BY_LOG_NAME, COMMANDS, Sends, Steering, parsed
from orchestrator.events.types import Commanded
from workers.protocol.errors import JobError

EXAMPLES: dict[type[JobCommand], JobCommand] = {
    kind: InjectFault(id="1", drill={"node": "ab"})
    if kind is InjectFault
    else kind(
        id="1",
        **{
            name: value
            for example in kind.model_config.get("json_schema_extra", {}).get("examples", ({},))  # type: ignore[union-attr]
            for name, value in example.items()
            if name != "version"
        },
    )
    for kind in COMMANDS
}
"""A value of each command."""


def test_each_file_of_the_room_that_declares_a_command_is_in_the_table() -> None:
    room = Path(__file__).parents[3] / "orchestrator" / "commands"
    declaring = {file.stem for file in room.glob("*.py") if "    name = " in file.read_text()}
    assert declaring == {kind.__module__.rpartition(".")[2] for kind in COMMANDS}
    assert declaring


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The service's routes."""
    return create_app(settings_in(tmp_path_factory.mktemp("service"))).openapi()["paths"]


@pytest.mark.xdist_group("commands")
@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_has_its_line_its_route_its_form_and_its_method(
    kind: type[JobCommand], paths: dict[str, Any]
) -> None:
    command_line = typer.main.get_command(app)
    assert isinstance(command_line, TyperGroup)
    assert kind.name in command_line.commands
    assert "post" in paths[f"/api/v1/jobs/{{job}}/{kind.route or kind.name}"]
    assert [CONTROLS[form.name].command for form in kind.forms] == [kind] * len(kind.forms)
    assert kind.forms or kind is InjectFault, "no page injects faults"
    for client in (Jobs, BlockingJobs):
        rows = [row for name in dir(client) if isinstance(row := getattr(client, name), Sends)]
        assert kind in {row.kind for row in rows}


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_command_comes_back_from_the_log(kind: type[JobCommand]) -> None:
    command = EXAMPLES[kind]
    assert command.log_name in kind.log_names()
    logged = Commanded(id="1", name=command.log_name, arguments=command.arguments(), by="")
    assert parsed(logged) == command


def test_what_is_no_command_is_refused() -> None:
    for name, arguments in (("stay", {}), ("move", {"layers": "3"}), ("pause", {"long": True})):
        with pytest.raises(JobError, match=f"no such command: {name} {{"):
            parsed(Commanded(id="1", name=name, arguments=arguments))


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_controller_has_an_effect_for_each_command(
    kind: type[JobCommand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = EXAMPLES[kind]
    assert {*BY_LOG_NAME.values()} == {*COMMANDS}

    async def ask() -> str:
        async with controller_of(tmp_path, monkeypatch) as (_, controller):
            try:
                return await controller.command("1", command.log_name, command.arguments())
            except JobError as error:
                return str(error)

    assert "has no effect" not in asyncio.run(ask())


class Keeper(Steering):
    """A client that keeps what it is to send."""

    def send(self, job: str, command: JobCommand) -> JobCommand:
        return command


def test_a_client_refuses_values_without_a_name_and_of_the_wrong_type() -> None:
    client = Keeper()
    assert client.move("job", "3-4", 1, base=(1, 2)).base == (1, 2)
    with pytest.raises(TypeError, match="name the others"):
        client.move("job", "3-4", 1, (1, 2))  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="name the others"):
        client.checkpoint("job", "my-id")  # pyright: ignore[reportCallIssue]
    with pytest.raises(JobError, match="scale: ranks: "):
        client.scale("job", ranks="x")  # pyright: ignore[reportArgumentType]
