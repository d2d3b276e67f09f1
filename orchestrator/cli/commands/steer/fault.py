"""`freshet fault`: injects faults into a running job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.options import Address, Id, Job, Json
from workers.fault_injection.kinds import FaultKind, FaultPhase
from workers.protocol.errors import JobError

if TYPE_CHECKING:
    from workers.fault_injection.drill import Drill


def fault(
    job: Job,
    kind: Annotated[FaultKind, typer.Argument(help="What to do, see above.")],
    rank: Annotated[
        int | None,
        typer.Option(help="Number of the rank that gets the fault; freshet status lists a job's ranks."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="In this step, or the first later one that has the phase.")
    ] = None,
    phase: Annotated[
        FaultPhase | None, typer.Option(help="At this place of the step; unset: at its first one.")
    ] = None,
    after: Annotated[float, typer.Option(help="No sooner than so many seconds from now.")] = 0.0,
    times: Annotated[int, typer.Option(help="How often; fill-disk: for how many writes.")] = 1,
    seconds: Annotated[float | None, typer.Option(help="stop, fill-disk: how long it lasts.")] = None,
    factor: Annotated[
        float | None, typer.Option(help="slow: how many times as long every action takes.")
    ] = None,
    bytes_per_s: Annotated[
        float | None, typer.Option(help="throttle-link: what the rank may send to each other rank.")
    ] = None,
    limit_bytes: Annotated[int | None, typer.Option(help="oom: what the rank's tensors may take.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="slow, throttle-link, oom: for how many steps; unset: to the end.")
    ] = None,
    node: Annotated[
        str | None, typer.Option(help="drain: a node, by its id, the beginning of its id, or its host.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="drain: seconds until it is gone.", show_default="30")
    ] = None,
    id: Id = None,
    as_json: Json = False,
    address: Address = None,
) -> None:
    """Inject a fault into a running job, to see how the job takes it. The job must allow it:
    elastic.allow_faults = true.

    KIND is one of

    kill: SIGKILL to the rank's process.

    stop: SIGSTOP, and SIGCONT after --seconds.

    slow: every action takes --factor times as long, for --steps steps.

    drop-link: the rank's connections to all others are severed; its process lives.

    throttle-link: the rank sends to each other rank at --bytes-per-s at most, for --steps steps.

    oom: the rank's tensors may take --limit-bytes, for --steps steps; allocations beyond that fail.

    fill-disk: the rank's writes of checkpoints fail as on a full disk, --times of them or for --seconds.

    corrupt-checkpoint: one bit of the newest checkpoint changes. A job that has none yet says so.

    raise: an exception, as if a layer had raised it.

    nan: the rank's gradients of one step hold a NaN.

    drain: --rank, or all ranks on --node, get notice that they have --deadline seconds. --rank is killed then.

    blind: the rank loses the records of a commit that others have.

    Without --step and --phase the fault happens at once, or at the next place that fits. For example:

    freshet fault my-job kill --rank 2 --step 40 --phase backward

    freshet fault my-job slow --rank 1 --factor 2 --steps 10

    freshet fault my-job drain --node 10.0.0.7 --deadline 60
    """
    from orchestrator.cli.steering import sender, steer
    from orchestrator.commands.fault import InjectFault

    asked = drill_of(
        kind=kind,
        rank=rank,
        node=node,
        deadline=deadline,
        step=step,
        phase=phase,
        after=after,
        times=times,
        seconds=seconds,
        factor=factor,
        bytes_per_s=bytes_per_s,
        limit_bytes=limit_bytes,
        steps=steps,
    )
    command = InjectFault(drill=asked.to_json(), id=id, by=sender())
    typer.echo(steer(address, job, command, wait=False, as_json=as_json))


def drill_of(
    *,
    kind: FaultKind,
    rank: int | None,
    node: str | None,
    deadline: float | None,
    after: float,
    **fields: Any,
) -> Drill:
    """The drill that the options describe; `fields` are those of a `Fault` by its own names.

    Raises:
        JobError: they do not go together.
    """
    from workers.fault_injection.drill import Drill

    fault = {"kind": kind, "after_s": after, **fields}
    if kind is not FaultKind.DRAIN:
        if node is not None or deadline is not None:
            raise JobError(f"{kind} takes no --node and no --deadline: only drain does")
        return Drill.from_json({"rank": rank, "fault": fault})
    left_s = 30.0 if deadline is None else deadline
    if node is None:
        return Drill.from_json({"rank": rank, "fault": {**fault, "seconds": left_s}})
    if fields["step"] is not None or fields["phase"] is not None or after:
        raise JobError("a node is drained at once: leave --step, --phase and --after out, or drain a --rank")
    return Drill.from_json({"rank": rank, "node": node, "deadline_s": left_s})
