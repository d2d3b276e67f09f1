"""Updates that a plan needs to converge, from the samples in a run's log: DynPipe's T(S) x W(S).

It is shown beside a plan and never decides: the engine's schedules are synchronous, T is the same for all of them, and
the engine runs no asynchronous one yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestrator.events.log import read_log
from orchestrator.history.job_view import fold
from planner.plan import PlanError
from planner.search.convergence import Convergence, ConvergenceError
from planner.search.end_to_end import EndToEnd
from planner.search.search import ChosenPlan
from workers.protocol.errors import JobError

MOST_SHARED = 8_192
"""Most layers times devices for which Algorithm 1 takes only seconds."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Theorem 1 applied to a plan."""

    convergence: Convergence
    steps: int
    """T of the plan's own schedule."""
    samples_per_update: int
    """Samples of a step, and of an update of the asynchronous pipeline."""
    wall_clock_s: float
    """Duration of `steps` predicted steps, with nothing frozen: the theorem knows no freezing."""
    asynchronous: EndToEnd | None
    """The pipeline with the least T(S) x W(S) if it did not drain before an update. Its updates have a step's samples,
    and so a step's second moment; its memory holds the stashed weights. Theorem 1 assumes that stage i is S - i updates
    behind; with many microbatches per update it is less, so T(S) is an overestimate."""
    why_not: str = ""
    """Why there is no asynchronous pipeline."""


def convergence_of(log: Path, *, lr: float, target: float | None) -> Convergence:
    """Estimate the convergence of a job with learning rate `lr` from the event log of a run.

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


def outlook(choice: ChosenPlan, convergence: Convergence) -> Outlook:
    """Apply `convergence` to `choice`, whose schedule is synchronous."""
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
