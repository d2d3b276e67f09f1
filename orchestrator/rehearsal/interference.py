"""A job trained while one of its ranks is slowed down again and again: real ranks by a real neighbour on their core,
emulated ones, whose times are modelled, by an injected fault.

What is made of the event logs afterwards is in `analysis/interference_time.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from orchestrator.client.following import JobResult, Observer
from orchestrator.events.types import Record
from orchestrator.history.folder import JobFolder
from orchestrator.rehearsal.disturbing import (
    FACTORS,
    ComingNeighbour,
    Disturber,
    InjectedSlowdown,
    Interference,
    TimeLimit,
    visits_of,
)
from orchestrator.rehearsal.machine_watch import MachineWatch
from orchestrator.rehearsal.rehearsal import given_steps
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO
from planner.wording import counted
from workers.fault_injection.drill import Drill
from workers.fault_injection.fault import Fault
from workers.interference import neighbours
from workers.process.cores import core_of
from workers.protocol.errors import JobError

Say = Callable[[str], None]
Play = Callable[[Spec, Observer], JobResult]
"""Trains a job to its end, and passes its events on."""
Arm = Callable[[int, Fault], object]
"""Arms a fault on the rank of this number."""


def interference(
    spec: Spec, level: str, kind: str | None, rank: int | None, every: int | None
) -> Interference:
    """Disturbance planned for the job of `spec`, which `disturbable` made.

    Args:
        kind: None: `compute`.
        rank: None: 1.
        every: see `visits_of`.

    Raises:
        JobError: there is no such neighbour or rank, or no time for it.
    """
    if level not in FACTORS:
        raise JobError(f"--interference {level}: expected {' or '.join(FACTORS)}")
    if kind is not None and spec.cluster.device == "emulated":
        raise JobError(
            f"--kind {kind}: no neighbour disturbs emulated devices, whose times are modelled; an injected fault slows"
            " one down instead: leave --kind out"
        )
    if kind is not None and kind not in neighbours.KINDS:
        raise JobError(f"--kind {kind}: expected {', '.join(neighbours.KINDS)}")
    ranks = spec.pipeline.ranks
    assert ranks != AUTO
    rank = 1 if rank is None else rank
    if rank >= ranks:
        raise JobError(f"--rank {rank}: the job has ranks 0 to {ranks - 1}")
    return Interference(
        level=level, kind=kind or "compute", rank=rank, visits=visits_of(given_steps(spec), every)
    )


def disturbable(spec: Spec, ranks: int | None, cores: int, say: Say) -> Spec:
    """`spec` as a job on this machine in which a neighbour disturbs one rank alone.

    Args:
        ranks: as somebody asked for; None: those of `spec`, or as many as there are cores for real ones.
        cores: of this machine.

    Raises:
        JobError: it has one rank, or computes on GPUs.
    """
    device, pipeline = spec.cluster.device, spec.pipeline
    if device == "cuda":
        raise JobError(
            "cluster.device = 'cuda': a neighbour on a core does not slow a GPU down; rehearse with"
            " --set cluster.device=cpu, or with emulated devices"
        )
    real = device != "emulated"
    if ranks is None:
        ranks = cores if pipeline.ranks == AUTO else pipeline.ranks
        if real and ranks > cores and pipeline.pipeline_count == 1 and isinstance(pipeline.partition, str):
            say(
                f"{counted(cores, 'rank')} instead of {ranks}: each has one of this machine's {cores} cores, so that a"
                " neighbour slows down one of them; --ranks sets another number"
            )
            ranks = cores
    if ranks < 2:
        raise JobError(
            "a job of one rank has nowhere to move its layers: set --ranks to 2 or more"
            + (f" (this machine has {counted(cores, 'core')})" if real else "")
        )
    if spec.cluster.address != "local":
        say(
            f"on this machine alone, where the neighbour comes: cluster.address = {spec.cluster.address!r} does not"
            " count"
        )
    if real and not spec.cluster.pin_cores:
        say(
            "each rank is bound to one core, as with cluster.pin_cores = true: the neighbour takes one of them"
        )
    cluster = {"address": "local"}
    if real:
        cluster |= {"device": "cpu", "pin_cores": True}
    return spec.model_copy(
        update={
            "pipeline": pipeline.model_copy(update={"ranks": ranks}),
            "cluster": spec.cluster.model_copy(update=cluster),
            "elastic": spec.elastic.model_copy(update={"allow_faults": True}),
            # Neither is a part of the steps that are compared.
            "job": spec.job.model_copy(update={"validate_every": 0, "sample_tokens": 0}),
        }
    )


def disturber(spec: Spec, plan: Interference, arm: Arm, say: Say) -> Disturber:
    """Disturber of the job of `spec`, which `disturbable` made."""
    if spec.cluster.device == "emulated":
        return InjectedSlowdown(plan, arm, say)
    core = core_of(plan.rank)
    words = f"a {plan.level} neighbour ({plan.kind}) on core {core}"
    return ComingNeighbour(plan, partial(neighbours.beside, plan.kind, plan.level, (core,)), words, say)


def train_disturbed(
    spec: Spec,
    plan: Interference,
    play: Play,
    *,
    arm: Arm,
    observe: Observer,
    say: Say,
    stop: Callable[[], object] | None = None,
    limit_s: float = math.inf,
) -> JobResult:
    """Train the job of `spec` while it is disturbed, and write into its log when it was, and what else ran on this
    machine. No neighbour stays behind.

    Args:
        stop: stops the job after the step in flight.
        limit_s: from the job's first step on; then it is stopped.

    Raises:
        JobError: something that the user can mend, or the neighbour did not come.
        KeyboardInterrupt: a signal came before the job was running.
    """
    disturbs = disturber(spec, plan, arm, say)
    limit = TimeLimit(limit_s, stop, say) if stop is not None else None
    watch = MachineWatch(say)

    def fold(record: Record) -> None:
        disturbs.observe(record)
        if limit is not None:
            limit.observe(record)
        observe(record)

    try:
        done = play(spec, fold)
    finally:
        others = watch.close()
        disturbs.close()
        if limit is not None:
            limit.close()
    if disturbs.trouble:
        raise JobError(f"the job was not disturbed as asked: {disturbs.trouble}")
    over = limit is not None and limit.over
    event = replace(disturbs.disturbed(), others=others, out_of_time=over)
    try:
        JobFolder(done.spec.job.folder).add(Record(time_s=time.time(), event=event))
    except OSError as error:
        raise JobError(
            f"rehearsed, but cannot write {done.events_path}: {error.strerror or error}"
        ) from error
    return done


def drill_of(rank: int, fault: Fault) -> dict[str, object]:
    """The drill that arms `fault` on `rank`, as JSON values."""
    return Drill(rank=rank, fault=fault).to_json()
