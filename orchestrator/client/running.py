"""Runs a job from its submission to its end, for `freshet train` and `PipelineTrainer.fit`, which show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from orchestrator.client.blocking_client import BlockingJobClient
from orchestrator.client.following import FollowedJob, JobResult, Observer, ended
from orchestrator.client.interrupts import Interrupts
from orchestrator.client.submit import Submission, SubmittedJob
from orchestrator.cluster import connection as cluster
from orchestrator.spec.job_spec import Spec
from workers.protocol.errors import JobError


def run(
    spec: Spec,
    *,
    resume: bool,
    observe: Observer,
    say: Callable[[str], None],
    profile: Path | None = None,
    replay: Path | None = None,
) -> JobResult:
    """Submit a job and follow it to its end. Ctrl-C stops it with a checkpoint, a second one ends it at once.

    Args:
        resume: continue from the newest checkpoint in the job's folder.
        observe: receives every event as it arrives.
        say: receives phases, in words.
        profile: plan with this file instead of measuring.
        replay: freeze as this event log says, without new decisions.

    Raises:
        JobError: something that the user can fix.
        KeyboardInterrupt: a signal came before the job was running.
    """
    submission = Submission(spec, resume=resume, say=say)
    submission.check_size()
    submission.check_opened()
    with (
        Interrupts() as interrupts,
        cluster.connected(submission.spec.cluster.address, cpus=submission.cpus, say=say) as connection,
    ):
        job = _sent(submission, interrupts, profile, replay)
        if job.end is not None:
            return ended(job.spec, job.end, interrupted=False)
        client = BlockingJobClient(connection.address or job.spec.cluster.address)
        try:
            return FollowedJob(client, job.spec, connection, interrupts=interrupts, ours=True).run(
                observe, say
            )
        finally:
            submission.leave(lasts=False)


def detach(
    spec: Spec,
    *,
    resume: bool,
    say: Callable[[str], None],
    profile: Path | None = None,
    replay: Path | None = None,
) -> SubmittedJob:
    """Submit a job to a running cluster and leave it there.

    Raises:
        JobError: something that the user can fix; or the cluster is a local one, which ends with this process.
        KeyboardInterrupt: a signal came before the job was running.
    """
    if spec.cluster.address == "local":
        raise JobError(
            "--detach: a local cluster ends with `freshet train`: start one that stays with `ray start --head`,"
            " and name it with --set cluster.address=auto"
        )
    submission = Submission(spec, resume=resume, say=say)
    submission.check_opened()
    with (
        Interrupts() as interrupts,
        cluster.connected(submission.spec.cluster.address, cpus=submission.cpus, say=say),
    ):
        job = _sent(submission, interrupts, profile, replay)
        submission.leave(lasts=True)
        return job


def _sent(
    submission: Submission, interrupts: Interrupts, profile: Path | None, replay: Path | None
) -> SubmittedJob:
    """The job that `submission` starts, unless a signal comes before."""
    interrupts.check()
    return submission.send(
        profile=profile,
        replay=replay,
        about_to_start=interrupts.hold,
        interrupted=lambda: interrupts.count > 0,
    )
