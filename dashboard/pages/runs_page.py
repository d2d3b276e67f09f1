"""Past runs: all of them, searched and sorted, and some beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import Query, Response

from dashboard.api.models import Summary
from dashboard.api.runs import ListedRun, list_of
from dashboard.pages.head import tone_of
from dashboard.pages.shown import page_router
from dashboard.pages.sparkline import sparkline
from dashboard.pages.templating import page
from dashboard.service.problems import ProblemAnswer
from dashboard.service.services import From, Parts
from orchestrator.report.comparison import AXES, comparison

router = page_router()

MOST_COMPARED = 6

Sort = Literal[
    "run",
    "state",
    "date",
    "duration",
    "model",
    "step",
    "loss",
    "best",
    "target",
    "throughput",
    "samples",
    "epochs",
    "compute",
    "effective",
]
Axis = Literal["step", "tokens", "time"]
SORTS: Mapping[str, tuple[str, Callable[[Summary], Any]]] = {
    "run": ("Run", lambda each: each.job),
    "state": ("State", lambda each: each.state),
    "date": ("Started", lambda each: each.started_s),
    "duration": ("Took", lambda each: each.duration_s),
    "model": ("Model", lambda each: each.model),
    "step": ("Steps", lambda each: each.step),
    "loss": ("Loss", lambda each: each.loss),
    "best": ("Best validation", lambda each: each.best),
    "target": ("Time to target", lambda each: each.time_to_target_s),
    "throughput": ("Throughput", lambda each: each.tokens_per_s),
    "samples": ("Samples/h", lambda each: each.samples_per_hour),
    "epochs": ("Epochs", lambda each: each.epochs),
    "compute": ("Compute", lambda each: each.flops_per_s),
    "effective": ("Effective time", lambda each: each.effective_time_ratio),
}
"""Column -> its heading, and what it is sorted by; None comes last."""
NUMBERS = tuple(key for key in SORTS if key not in ("run", "state", "date", "model"))


@dataclass(frozen=True)
class Heading:
    """The heading of a column that the list is sorted by when it is pressed."""

    name: str
    text: str
    href: str
    sorted: str
    """Value of `aria-sort`: `ascending`, `descending`; empty: another column sorts the list."""
    number: bool


def chosen_runs(runs: list[ListedRun], search: str, sort: str, *, down: bool) -> list[ListedRun]:
    """The `runs` with all words of `search` in their name, folder, model or state, sorted; unreadable ones last."""
    words = search.lower().split()

    def text(run: ListedRun) -> str:
        summary = run.summary
        more = f"{summary.job} {summary.model} {summary.state}" if summary else run.problem
        return f"{run.run} {run.folder} {more}".lower()

    found = sorted((run for run in runs if all(word in text(run) for word in words)), key=lambda run: run.run)
    value = SORTS[sort][1]
    known = [run for run in found if run.summary and (sort == "run" or value(run.summary) is not None)]
    rest = [run for run in found if run.summary and run not in known]
    known.sort(key=lambda run: run.run if sort == "run" else value(run.summary), reverse=down)  # type: ignore[arg-type]
    return [*known, *rest, *(run for run in found if not run.summary)]


def _headings(search: str, sort: str, *, down: bool) -> list[Heading]:
    found = []
    for name, (text, _) in SORTS.items():
        now = name == sort
        # Numbers and dates begin with the largest.
        turned = not down if now else name in (*NUMBERS, "date")
        query = {"sort": name, "down": int(turned), **({"search": search} if search else {})}
        way = ("descending" if down else "ascending") if now else ""
        found.append(Heading(name, text, f"/runs?{urlencode(query)}", way, name in NUMBERS))
    return found


@router.get("/runs")
async def runs(
    parts: Parts,
    caller: From,
    search: Annotated[str, Query(max_length=200)] = "",
    sort: Sort = "date",
    down: bool = True,
) -> Response:
    """Past runs in the folders that the service was started with."""

    def made() -> Response:
        found = list_of(parts.past)
        rows = [
            (run, tone_of(run.summary.state), sparkline(run.summary.losses))
            if run.summary
            else (run, "bad", None)
            for run in chosen_runs(found.runs, search, sort, down=down)
        ]
        return page(
            "runs.html.j2",
            runs=rows,
            all=len(found.runs),
            headings=_headings(search, sort, down=down),
            search=search,
            sort=sort,
            down=down,
            left_out=found.left_out,
            folders=parts.settings.runs,
            caller=caller,
        )

    return await parts.threads.read_files(made)


@router.get("/compare")
async def compare(
    parts: Parts,
    caller: From,
    run: Annotated[list[str] | None, Query(description="A run; once for each.")] = None,
    axis: Axis = "step",
) -> Response:
    """Runs beside each other."""
    names = list(dict.fromkeys(run or ()))
    if not 2 <= len(names) <= MOST_COMPARED:
        raise ProblemAnswer(
            422,
            f"{len(names)} runs are chosen, and 2 to {MOST_COMPARED} can be compared",
            action="Choose some of the list of past runs.",
        )

    def made() -> object:
        return comparison([(name, parts.past.view(parts.past.find(name))) for name in names], axis)

    query = urlencode([("run", name) for name in names])
    return page(
        "compare.html.j2",
        compared=await parts.threads.read_files(made),
        names=names,
        axes=[(name, words, f"/compare?{query}&axis={name}") for name, words in AXES.items()],
        axis=axis,
        caller=caller,
    )
