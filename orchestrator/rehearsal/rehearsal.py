"""A job trained while a trace takes its nodes away and gives new ones: on Ray nodes of this machine, one rank on each.

What is made of the event log afterwards is in `analysis/effective_time.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.analysis.effective_time import EffectiveTime, effective_time
from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.following import JobResult, Observer
from orchestrator.client.running import run
from orchestrator.events import types as events
from orchestrator.events.log import read_log
from orchestrator.events.rehearsed import CopiesSaved, Rehearsed
from orchestrator.events.types import Record
from orchestrator.history.folder import JobFolder
from orchestrator.history.job_view import fold
from orchestrator.rehearsal.copies_saved import copies_saved
from orchestrator.rehearsal.local_nodes import LocalNodes
from orchestrator.rehearsal.trace_player import Script, TracePlayer
from orchestrator.rehearsal.traces import NodeTrace
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO
from planner.schedule.expand import schedule_of
from planner.schedule.table_format import CSV_PREFIX
from planner.search.replan import Replanner
from planner.wording import counted
from workers.protocol.errors import JobError

NODE_START_S = 60.0
"""Time limit for the start of each of the nodes that the job starts with."""


@dataclass(frozen=True, kw_only=True)
class Performance:
    """Inputs of a rehearsal."""

    spec: Spec
    trace: NodeTrace
    source: str
    """Where the trace came from, in words."""
    ranks: int
    """Ranks of the job; it starts with so many, whatever the trace begins with."""
    speedup: float | None = None
    """Seconds of the trace per second; None: so many that it is over before the job is."""
    grace_s: float | None = None
    """Seconds of the trace between notice and end of a node; None: no notice."""
    finish: bool = False
    """Train to the last step once the trace is over, where `speedup` is given; else the job is stopped then."""


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Result of a rehearsal."""

    run: JobResult
    found: EffectiveTime | None
    """None if the job ended before the trace began."""
    cut_short: str | None = None
    """Why the trace was not played to its end, in words: an error of the nodes, upon which the job was stopped."""


def rehearse(
    performance: Performance,
    *,
    observe: Observer,
    say: Callable[[str], None],
    profile: Path | None = None,
) -> Rehearsal:
    """Start the nodes, the job on them, and the trace; nothing is left of the nodes afterwards.

    Args:
        observe: takes every event of the job as it comes.
        say: takes what happens, in words.
        profile: plan with this file instead of measuring.

    Raises:
        JobError: something that the user can mend.
        KeyboardInterrupt: a signal came before the job was running.
    """
    trace, resources = performance.trace, node_resources(performance.spec)
    steps = given_steps(performance.spec)
    start = trace.at_start()
    if not start:
        raise JobError(f"the trace {performance.source} begins without a node: begin the --window later")
    extra = tuple(f"start-{number}" for number in range(performance.ranks - len(start)))
    with LocalNodes() as nodes:
        say(f"starting {counted(len(start) + len(extra), 'Ray node')} on this machine")
        for name in (*start, *extra):
            nodes.add(name, resources)
        nodes.wait_for({*start, *extra}, NODE_START_S * (len(start) + len(extra)))
        spec = on_nodes(performance.spec, nodes.address, performance.ranks, resources)
        script = Script(
            trace=trace,
            source=performance.source,
            speedup=performance.speedup,
            grace_s=performance.grace_s,
            resources=resources,
            extra=extra,
            steps=steps,
        )
        goes_on = performance.finish or performance.speedup is None
        player = TracePlayer(script, nodes, say, lambda: _stop(spec.job.name), goes_on=goes_on)

        def fold(record: Record) -> None:
            player.observe(record)
            observe(record)

        player.start()
        try:
            done = run(spec, resume=False, observe=fold, say=say, profile=profile)
        finally:
            player.end()
        for name, why in nodes.failed().items():
            say(f"node {name} could not be started: {why}")
        rehearsed = player.rehearsed()
    if rehearsed is not None:
        _log(done, replace(rehearsed, copies=_saved(done.events_path, rehearsed, trace)))
    return Rehearsal(run=done, found=measure(done.events_path), cut_short=player.cut_short)


def _saved(log: Path, rehearsed: Rehearsed, trace: NodeTrace) -> tuple[CopiesSaved, ...]:
    """Savings of copies on the whole of `trace`, by the job's first plan and its median step."""
    records = list(read_log(log))
    issued = [record.event.plan for record in records if isinstance(record.event, events.Issued)]
    view = fold([*records, Record(time_s=time.time(), event=rehearsed)])
    found = effective_time(view.recovery, emulated=False)
    if not issued or issued[0].schedule.startswith(CSV_PREFIX) or found is None or not found.step_s:
        return ()
    first, spec = issued[0], Spec.model_validate(view.spec)
    replanner = Replanner(
        first=first,
        schedule=schedule_of(first),
        parameters=(1,) * first.layers[-1][1],
        copies=spec.elastic.copies,
    )
    return copies_saved(
        trace,
        replanner,
        steps_per_s=1 / (found.step_s * rehearsed.speedup),
        every_steps=spec.checkpoint.every_steps,
        first_step=next((each.step for each in view.recovery.commits if each.time_s >= rehearsed.began_s), 0),
    )


def measure(log: Path) -> EffectiveTime | None:
    """Use of the node-seconds of the rehearsal whose event log is `log`; None if none was played.

    Raises:
        OSError: there is no such log.
        ValueError: it is damaged.
    """
    records = list(read_log(log))
    return effective_time(fold(records).recovery, emulated=is_emulated(records))


def is_emulated(records: list[Record]) -> bool:
    """Whether the ranks' computation was modelled."""
    specs = [record.event.spec for record in records if isinstance(record.event, events.Submitted)]
    return bool(specs) and specs[-1].get("cluster", {}).get("device") == "emulated"


def node_resources(spec: Spec) -> Mapping[str, float]:
    """Resources of a rehearsal's node. Each rank takes all of them: one rank lives on a node."""
    return {"CPU": 1.0, "GPU": 1.0} if spec.cluster.device == "cuda" else {"CPU": 1.0}


def on_nodes(spec: Spec, address: str, ranks: int, resources: Mapping[str, float]) -> Spec:
    """`spec` on the cluster at `address`."""
    return spec.model_copy(
        update={
            "pipeline": spec.pipeline.model_copy(update={"ranks": ranks}),
            "cluster": spec.cluster.model_copy(
                update={"address": address, "resources_per_rank": dict(resources)}
            ),
        }
    )


def ranks_of(spec: Spec, ranks: int | None, nodes: int) -> int:
    """Number of ranks for the job on at most `nodes` nodes.

    Raises:
        JobError: more than nodes.
    """
    if ranks is None:
        ranks = nodes
    if ranks > nodes:
        raise JobError(
            f"--ranks {ranks}: the trace has at most {counted(nodes, 'node')} at a time, one rank on each"
        )
    count = spec.pipeline.pipeline_count
    if ranks % count:
        key = "replicas" if spec.pipeline.pipelines is None else "pipelines"
        raise JobError(f"--ranks {ranks} is no multiple of pipeline.{key} = {count}: choose another --nodes")
    return ranks


def given_steps(spec: Spec) -> int:
    """The steps of a job that is to be rehearsed.

    Raises:
        JobError: it says epochs instead.
    """
    if spec.job.epochs is not None:
        raise JobError(
            f"job.epochs = {spec.job.epochs:g}: what is rehearsed goes by steps; say how many, with --set"
            " job.epochs=null --set job.steps=N"
        )
    return spec.job.steps


def nodes_wanted(spec: Spec, nodes: int | None, trace: NodeTrace) -> int:
    """Number of trace slots to keep: `nodes` if given, else the job's number of ranks, at most the trace's slots."""
    if nodes is not None:
        return nodes
    return trace.most if spec.pipeline.ranks == AUTO else min(spec.pipeline.ranks, trace.most)


def _stop(job: str) -> None:
    # It may end by itself just now.
    with suppress(JobError):
        BlockingJobClient().stop(job)


def _log(done: JobResult, rehearsed: Rehearsed) -> None:
    """Add what was done to the nodes to the log of the job, which has ended.

    Raises:
        JobError: the log cannot be written.
    """
    try:
        JobFolder(done.spec.job.folder).add(Record(time_s=time.time(), event=rehearsed))
    except OSError as error:
        raise JobError(
            f"rehearsed, but cannot write {done.events_path}: {error.strerror or error}"
        ) from error
