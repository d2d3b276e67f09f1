"""`freshet export`: writes a run's weights into one file, or a folder as their library has it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def export(
    run: Annotated[str, typer.Argument(help="A job's output folder.")],
    out: Annotated[str, typer.Option(help="What to write: a safetensors file, or with --format a folder.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that holds something else.")] = False,
    format: Annotated[
        str,
        typer.Option(help="safetensors: one file. The model's family: a folder that its library reads."),
    ] = "safetensors",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the numbers in that folder; left out: as they are trained."),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a model with adapters (model.lora): write the whole model.")
    ] = False,
    best: Annotated[
        bool, typer.Option("--best", help="The best checkpoint (checkpoint.keep_best), not the newest.")
    ] = False,
) -> None:
    """Write the weights of a run's newest checkpoint into one safetensors file. An earlier safetensors file is
    replaced; any other file stays, unless --force is given. With --format and the family of a model that another
    library defines, write a folder as that library saves it, with its config and tokenizer; of a model with adapters
    those alone, unless --merge is given."""
    from orchestrator.cli.exporting import ONE_FILE, export_command, export_folder_command

    if format == ONE_FILE:
        lines = export_command(run, out, force=force, dtype=dtype, merge=merge, best=best)
    else:
        lines = export_folder_command(run, out, format=format, dtype=dtype, merge=merge, best=best)
    for line in lines:
        typer.echo(line)
