"""Newest output of a job's ranks, from the job's folder. The same for live jobs and past runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from dashboard.api.examples import example
from dashboard.api.models import StrictModel
from dashboard.api.sources import JobSource, Live, Past
from dashboard.service.problems import ProblemAnswer, documented
from orchestrator.client.rank_logs import output_end, ranks_with_output
from orchestrator.history.job_view import JobView

router = APIRouter(tags=["history"])
ERRORS = documented(401, 403, 404, 422, 503)

MOST_BYTES = 2**18
ELSEWHERE = (
    "each rank writes it on its own node: look there, or put job.output on a file system that all nodes see"
)

Rank = Annotated[int, Path(ge=0, le=10**6, description="The rank's number.")]
Bytes = Annotated[int, Query(alias="bytes", ge=1, le=MOST_BYTES, description="Most bytes to answer.")]


class Output(
    StrictModel,
    json_schema_extra=example(
        {"rank": 1, "ranks": [0, 1], "text": "--- rank 1, pid 4001\nhello\n", "cut": False}
    ),
):
    """The newest output of a rank."""

    rank: int
    ranks: list[int]
    """The ranks whose output is visible here."""
    text: str
    """The rank's stdout and stderr, without escape sequences for terminals."""
    cut: bool
    """Whether there is more before it."""


def output_of(folder: str, rank: int, most_bytes: int) -> Output:
    """The newest output of `rank` of the job in `folder`. Reads a file.

    Raises:
        ProblemAnswer: there is none that is visible here.
    """
    found = output_end(folder, rank, most_bytes) if folder else None
    if found is None:
        there = ", ".join(map(str, ranks_with_output(folder))) if folder else ""
        raise ProblemAnswer(
            404,
            f"there is no output of rank {rank} here",
            action=f"Ranks whose output is here: {there}." if there else f"None is here: {ELSEWHERE}.",
        )
    return Output(rank=rank, ranks=list(ranks_with_output(folder)), text=found.text, cut=found.cut)


async def _answer(source: JobSource, rank: int, most_bytes: int) -> Output:
    def made(view: JobView) -> Output:
        return output_of(source.folder(view), rank, most_bytes)

    return await source.read(made)


@router.get("/jobs/{job}/output/{rank}", responses=ERRORS)
async def job_output(live: Live, rank: Rank, most_bytes: Bytes = 2**16) -> Output:
    """The newest output of a rank: what its process wrote to stdout and stderr."""
    return await _answer(live, rank, most_bytes)


@router.get("/runs/{run}/output/{rank}", responses=ERRORS)
async def run_output(past: Past, rank: Rank, most_bytes: Bytes = 2**16) -> Output:
    """The same of a past run."""
    return await _answer(past, rank, most_bytes)
