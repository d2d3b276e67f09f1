"""Notes and reports that ranks leave in the job's folder once the cluster's head is lost: for people how to resume, and
for a resumed job's log what reached no controller. Nothing is unpickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter

from workers.checkpoint.storage import Folder, join, open_folder
from workers.protocol.reports import Report, Rescued, StepReport

FOLDER = "head-lost"
NOTE = "README.txt"
REPORTS = ".jsonl"
"""End of the names of files with reports; there is one for each rank."""
KINDS: dict[str, type[Report]] = {kind.__name__: kind for kind in get_args(Report)}


def leave_note(output: str, rescued: Rescued, address: str) -> None:
    """Write what happened, and how to resume, into the job's folder `output`.

    Args:
        address: of the head.

    Raises:
        OSError: it cannot be written.
    """
    lost, ends = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment)) for moment in (rescued.lost_s, rescued.ends_s)
    )
    wrote = (
        f"wrote a checkpoint of step {rescued.step} since"
        if rescued.error is None
        else f"could not write a checkpoint of step {rescued.step}: {rescued.error}"
    )
    text = (
        f"The head of the Ray cluster, {address}, has not answered since {lost} UTC. Unless it came back, Ray ended all"
        f" processes of this job about {ends} UTC. The ranks {wrote}.\n\n"
        "Go on from the newest checkpoint, on another cluster, with the same spec and this folder as job.output:\n\n"
        "    freshet train SPEC --resume\n\n"
        "The files beside this one hold what the ranks could report to no controller. Leave them here: the resumed job"
        " takes them into its log.\n"
    )
    _folder(output).write(NOTE, text.encode())


def leave_reports(output: str, rank: int, reports: Iterable[tuple[float, Report]]) -> None:
    """Write the reports of `rank` that reached no controller into the job's folder, in place of earlier ones; without
    any, delete its file.

    Args:
        reports: each with the time at which it was made, in seconds since the Unix epoch.

    Raises:
        OSError: they cannot be written.
    """
    lines = [
        json.dumps({"time_s": time_s, "report": type(report).__name__, "fields": asdict(report)})
        for time_s, report in reports
    ]
    name = f"rank-{rank}{REPORTS}"
    if lines:
        _folder(output).write(name, ("\n".join(lines) + "\n").encode())
    else:
        _folder(output).remove(name)


def left_reports(output: str) -> Iterator[tuple[float, Report]]:
    """The reports in the job's folder, with their times; steps in order, whichever ranks report them. A line that is no
    report is left out.

    Raises:
        OSError: a file cannot be read.
    """
    folder = _folder(output)
    found = [
        told
        for name in folder.names()
        if name.endswith(REPORTS)
        for line in folder.read(name).splitlines()
        if (told := _parsed(line)) is not None
    ]
    steps = [(report.step, time_s, report) for time_s, report in found if isinstance(report, StepReport)]
    for _, time_s, report in sorted(steps, key=lambda told: told[0]):
        yield time_s, report
    yield from (told for told in found if not isinstance(told[1], StepReport))


def clear(output: str) -> None:
    """Delete all that was left in the job's folder.

    Raises:
        OSError: the file system refused.
    """
    folder = _folder(output)
    if folder.names():
        folder.delete()


def _folder(output: str) -> Folder:
    return open_folder(join(output, FOLDER))


def _parsed(line: bytes) -> tuple[float, Report] | None:
    try:
        fields: dict[str, Any] = json.loads(line)
        report = _adapter(fields["report"]).validate_python(fields["fields"])
        return float(fields["time_s"]), report
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


@cache
def _adapter(kind: str) -> TypeAdapter[Report]:
    return TypeAdapter(KINDS[kind])
