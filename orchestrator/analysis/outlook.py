"""How many updates a plan needs to converge, by the samples in a run's log: DynPipe's T(S) x W(S).

Shown beside a plan, never what it is chosen by: the engine's schedules are synchronous, whose T does not depend on it,
and no engine here runs an asynchronous one yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.events.log import read_log
from orchestrator.history.job_view import fold
from planner.plan import PlanError
from planner.search.convergence import Convergence, ConvergenceError
from planner.search.end_to_end import EndToEnd
from planner.search.search import Choice
from workers.protocol import JobError

MOST_SHARED = 8_192
"""Layers times devices for which Algorithm 1 takes no more than seconds."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What Theorem 1 makes of a plan."""

    convergence: Convergence
    steps: int
    """T of the plan's own schedule."""
    samples_per_update: int
    """Of a step, and of an update of the asynchronous pipeline: both train on so many."""
    wall_clock_s: float
    """Of so many predicted steps, with nothing frozen: the theorem knows no freezing."""
    asynchronous: EndToEnd | None
    """The pipeline with the least T(S) x W(S) if it did not drain before an update; its updates have a step's samples,
    and so a step's second moment, and its memory holds the stashed weights. Theorem 1 takes stage i to be S - i updates
    behind, which many microbatches per update stay below: T(S) is high rather than low."""
    why_not: str = ""
    """Why there is none."""


def convergence_of(log: Path, *, lr: float, target: float | None) -> Convergence:
    """What the event log of a run says about a job with learning rate `lr`.

    Args:
        target: the mean squared gradient norm that counts as converged.

    Raises:
        JobError: the log cannot be read or holds no samples, or Theorem 1 does not hold for its samples.
    """
    if target is None:
        raise JobError(f"--estimates {log} needs --target-error, the mean squared gradient norm to reach")
    try:
        run = fold(read_log(log))
    except OSError as error:
        raise JobError(f"--estimates {log}: cannot read it: {error.strerror or error}") from error
    except ValueError as error:
        raise JobError(f"--estimates: {error}") from error
    found, first = run.curvature.estimates(), run.steps.get(1)
    if found is None or first is None:
        raise JobError(
            f"--estimates {log} holds no samples of a job from its first step on: train some steps with"
            " --set job.curvature_every=1"
        )
    try:
        return Convergence(
            loss=first.loss,
            learning_rate=lr,
            smoothness=found.smoothness,
            second_moment=found.second_moment,
            target=target,
        )
    except ConvergenceError as error:
        raise JobError(f"--estimates {log}, --target-error {target}: {error}") from error


def outlook(choice: Choice, convergence: Convergence) -> Outlook:
    """What `convergence` makes of `choice`, whose schedule is synchronous."""
    steps = convergence.updates(choice.schedule.stages, synchronous=True)
    asynchronous, why_not = None, ""
    profile = choice.prediction.profile
    if len(profile.model.layers) * len(profile.cluster.devices) > MOST_SHARED:
        why_not = "not looked for, as it would take long"
    else:
        try:
            asynchronous = choice.end_to_end(convergence, synchronous=False)
        except (PlanError, ConvergenceError) as error:
            why_not = str(error)
    return Outlook(
        convergence=convergence,
        steps=steps,
        samples_per_update=choice.plan.replicas * choice.plan.microbatches * profile.model.microbatch_size,
        wall_clock_s=steps * choice.prediction.step_s,
        asynchronous=asynchronous,
        why_not=why_not,
    )
