"""Runs `freshet plan --job`: what another cut of a running job's layers would bring, and applies it if asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from rich.table import Table

from orchestrator.cli.jobs import wide_console
from orchestrator.cli.steering import answer_text, sender
from orchestrator.client.opening import opened
from orchestrator.history.proposal import Proposal
from orchestrator.quantities import percent, seconds, size
from planner.wording import counted
from workers.protocol.errors import JobError


def plan_of_job(
    job: str,
    address: str | None,
    partition: str | None,
    *,
    apply: bool,
    wait: bool,
    as_json: bool,
    show: Callable[[str], None],
) -> None:
    """Show what `partition` would bring `job`; with `apply`, have its ranks take it up if the job's plan is still the
    one that it was compared with.

    Args:
        partition: layers per stage, such as `3,1,2,2`; None: the planner's own best.
        wait: with `apply`, until the layers have moved.

    Raises:
        JobError: it is no partition, nothing answers at `address`, there is no such job, or the partition cannot be
            applied.
        PlanChanged: the job has another plan by now.
    """
    wanted = None if partition is None else parse_partition(partition)
    with opened(address) as client:
        found = client.propose(job, wanted)
        if not as_json:
            _show(found, show)
        if not apply:
            if as_json:
                show(found.to_json().decode())
            return
        if found.problem is not None:
            raise JobError(f"not applied: {found.problem}")
        command = client.apply(job, partition=found.partition, base=found.base, by=sender())
        answered = client.outcome(command) if wait else None
    answer = answer_text(command, answered, as_json=as_json)
    if as_json:
        answer = json.dumps({"proposal": json.loads(found.to_json()), "answer": json.loads(answer)})
    show(answer)


def parse_partition(text: str) -> tuple[int, ...]:
    """The layers per stage in `text`, separated by commas or spaces.

    Raises:
        JobError: they are no numbers from 1 on.
    """
    parts = [part for part in re.split(r"[,\s]+", text.strip("[]() ")) if part]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise JobError(f"--partition {text}: expected the layers per stage, such as 3,1,2,2")
    return tuple(map(int, parts))


def _show(found: Proposal, show: Callable[[str], None]) -> None:
    for line in proposal_lines(found):
        show(line)
    console = wide_console()
    if found.peak_memory_bytes:
        console.print(_memory(found))
    if found.candidates:
        table = Table("the planner compared", "layers per stage", "step", "", box=None)
        for each in found.candidates:
            table.add_row(
                each.name,
                " ".join(str(stop - first) for first, stop in each.layers or ()),
                "" if each.predicted_step_s is None else seconds(each.predicted_step_s),
                each.why_not,
            )
        console.print(table)


def proposal_lines(found: Proposal) -> Iterator[str]:
    """The proposal in words."""
    epoch, version = found.base
    yield f"plan {epoch}.{version}: layers per stage {list(found.current_partition)}"
    if found.problem is not None:
        yield f"{list(found.partition)} cannot be applied: {found.problem}"
        return
    if found.partition == found.current_partition:
        yield "proposed: the same"
        return
    moved = counted(len(found.moved_layers), "layer")
    text = f"proposed: {list(found.partition)}, {moved} ({', '.join(map(str, found.moved_layers))}) to other ranks"
    before, after = found.current_predicted_step_s, found.predicted_step_s
    if before and after:
        change = f"{percent(abs(after / before - 1))} {'longer' if after > before else 'shorter'}"
        text += f"; predicted step: {seconds(before)} -> {seconds(after)}, {change}"
    yield text


def _memory(found: Proposal) -> Table:
    table = Table("place", "peak memory", "of", box=None)
    limits = found.memory_limit_bytes or (0,) * len(found.peak_memory_bytes)
    for place, (peak, limit) in enumerate(zip(found.peak_memory_bytes, limits, strict=True)):
        table.add_row(str(place), size(peak), size(limit) if limit else "")
    return table
