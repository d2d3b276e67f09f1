"""Runs `freshet schedule`: simulates a schedule; prints its numbers and picture, or writes CSV or SVG."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orchestrator.pictures.spans import seconds_text
from orchestrator.pictures.timeline_svg import svg as draw
from orchestrator.pictures.timeline_text import legend, terminal
from planner.ir import Schedule
from planner.schedule import table_format
from planner.schedule.registry import build
from planner.schedule.table_format import CSV_PREFIX
from planner.simulation.simulate import Costs, Simulation, simulate
from planner.wording import counted


def schedule(
    name: str,
    ranks: int | None,
    microbatches: int | None,
    chunks: int | None,
    passes_s: tuple[float, float, float],
    communication_s: float,
    *,
    as_json: bool,
    csv: Path | None,
    svg: Path | None,
) -> None:
    """Show a schedule.

    Args:
        passes_s: seconds of a forward, an input gradient and a weight gradient, per stage and microbatch.
        csv: where to write the table.
        svg: where to write the picture.

    Raises:
        ValueError: there is no such schedule, or an option makes no sense.
        OSError: a file cannot be read or written.
    """
    simulation = simulate(_load(name, ranks, microbatches, chunks), _costs(*passes_s, communication_s))
    if csv is not None:
        csv.write_text(table_format.dump(simulation.schedule), encoding="utf-8")
    if svg is not None:
        svg.write_text(draw(simulation.timeline, _title(simulation)), encoding="utf-8")
    if as_json:
        print(json.dumps(_summary(simulation)))
    else:
        _show(simulation)


def _load(name: str, ranks: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    if name.startswith(CSV_PREFIX):
        if chunks is not None:
            raise ValueError(
                "--chunks does not go with csv:PATH: the table says which rank holds which stages"
            )
        path = Path(name.removeprefix(CSV_PREFIX))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(
                f"{path} is not UTF-8 text: expected a CSV table of tokens such as 2F0"
            ) from None
        return table_format.parse(text, name, ranks=ranks, microbatches=microbatches)
    if ranks is None or microbatches is None:
        missing = " and ".join(
            option
            for option, value in (("--ranks", ranks), ("--microbatches", microbatches))
            if value is None
        )
        raise ValueError(f"{name} needs {missing}, such as --ranks 4 --microbatches 8")
    return build(name, ranks, microbatches, chunks)


def _costs(f: float, i: float, w: float, comm: float) -> Costs:
    for option, seconds in (("--f", f), ("--i", i), ("--w", w), ("--comm", comm)):
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"{option} {seconds}: must be a number of seconds, 0 or more")
    if f + i + w == 0:
        raise ValueError("--f, --i and --w are all 0: at least one action must take time")
    return Costs.uniform(forward_s=f, input_grad_s=i, weight_grad_s=w, communication_s=comm)


def _title(simulation: Simulation) -> str:
    shown = simulation.schedule
    bubble = sum(simulation.bubble) / shown.ranks
    return (
        f"{shown.name}: {counted(shown.stages, 'stage')} on {counted(shown.ranks, 'rank')},"
        f" {counted(shown.microbatches, 'microbatch', 'microbatches')},"
        f" makespan {seconds_text(simulation.makespan_s)}, bubble {bubble:.1%}"
    )


def _summary(simulation: Simulation) -> dict[str, object]:
    shown = simulation.schedule
    return {
        "schedule": shown.name,
        "ranks": shown.ranks,
        "stages": shown.stages,
        "microbatches": shown.microbatches,
        "stage_ranks": [shown.rank_of_stage[stage] for stage in range(shown.stages)],
        "makespan_s": simulation.makespan_s,
        "bubble": list(simulation.bubble),
        "in_flight": list(simulation.in_flight),
        "in_flight_input_grad": list(simulation.in_flight_input_grad),
        "timeline": [
            [{"action": str(span.action), "start_s": span.start_s, "end_s": span.end_s} for span in spans]
            for spans in simulation.timeline
        ],
    }


def _show(simulation: Simulation) -> None:
    shown = simulation.schedule
    console = Console(highlight=False)
    console.print(_title(simulation), markup=False)
    table = Table("rank", "stages", "busy", "bubble", "in flight to W", "in flight to I", box=None)
    for rank in range(shown.ranks):
        table.add_row(
            str(rank),
            " ".join(map(str, shown.stages_of_rank(rank))),
            seconds_text(simulation.busy_s[rank], simulation.makespan_s),
            f"{simulation.bubble[rank]:.1%}",
            str(simulation.in_flight[rank]),
            str(simulation.in_flight_input_grad[rank]),
        )
    console.print(table)
    console.print(terminal(simulation.timeline, console.width), no_wrap=True)
    console.print(legend(simulation.timeline))
