"""Settles a job: its plan is kept from the earlier run, made from a profile, or given by the spec."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.placement import capacity, shortage
from orchestrator.history.folder import PROFILE, JobFolder
from orchestrator.prepare.interference_model import interference_model
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import check_profile, first_plan, ranks_to_profile, unmeasured_plan
from orchestrator.prepare.profile_cache import cache_folder
from orchestrator.prepare.profiling import key_of, obtain, parsed, read
from orchestrator.prepare.resumption import still_right
from orchestrator.prepare.settling import Settled, on_cluster, with_plan
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO, needs_profile
from planner.profile import Profile
from workers.protocol.errors import JobError


def settle(
    spec: Spec,
    found: ModelOutline,
    folder: JobFolder,
    *,
    resume: bool,
    profile_file: Path | None,
    say: Callable[[str], None],
) -> Settled:
    """Settle a spec on the cluster that this process is connected to.

    Args:
        spec: settled by its model.
        profile_file: plan with it, whatever the run had before.
        say: receives a line if something is measured.

    Raises:
        JobError: the model cannot be profiled or cut as asked, or a cluster of our own has no room.
    """
    import ray

    spec = on_cluster(spec, ray.cluster_resources())
    epoch, _ = folder.incarnations()
    profile, alternatives = None, ()
    newest = folder.newest_plan() if resume and profile_file is None else None
    chooses = spec.elastic.redundancy == AUTO  # by what the job allows now, and links may have changed
    if newest is not None and still_right(newest, spec, len(found.layers)) and not chooses:
        plan, profile = newest, _kept(spec, found, folder)
        if profile is None and spec.adapt.policy != "off":
            profile = _obtained(spec, found, profile_file, say)
    elif profile_file is not None or needs_profile(spec):
        known = _kept(spec, found, folder) if resume and profile_file is None else None
        profile = known or _obtained(spec, found, profile_file, say)
        choice = first_plan(spec, profile)
        plan, alternatives = choice.plan, choice.alternatives
    else:
        plan = unmeasured_plan(spec, found)
    settled = with_plan(spec, found, plan, epoch=epoch + 1, profile=profile, alternatives=alternatives)
    if spec.adapt.policy == "forest":
        settled = replace(settled, forest=_forest(spec, say))
    if spec.cluster.address == "local":
        # No node will join a cluster of our own: there is no point in waiting.
        _check_room(settled)
    return settled


def _forest(spec: Spec, say: Callable[[str], None]) -> bytes | None:
    """The interference model of this machine, made now if there is none."""
    model, why = interference_model(spec.cluster.device, say=say)
    if model is None:
        say(f"{why}; the planner goes by measured slowdowns")
    return None if model is None else model.to_bytes()


def _obtained(
    spec: Spec, found: ModelOutline, profile_file: Path | None, say: Callable[[str], None]
) -> Profile:
    """The profile from the file or the cache, or measured now."""
    room = capacity(cluster.nodes(), spec.cluster.resources_per_rank or {})
    ranks = ranks_to_profile(spec, len(found.layers), room)
    return obtain(spec, found, ranks=ranks, profile_file=profile_file, say=say)


def _kept(spec: Spec, found: ModelOutline, folder: JobFolder) -> Profile | None:
    """The profile that the run's plan is based on, or another of this job's, if there is one: a resumed job does not
    wait for a measurement."""
    before, now = folder.marker(), spec.cluster.model_dump(mode="json")
    same_device = before is not None and all(
        before.spec.get("cluster", {}).get(key) == now[key] for key in ("device", "emulated")
    )
    if same_device and (text := folder.profile()) is not None:
        with suppress(JobError):
            profile = parsed(text, found, where=PROFILE)
            check_profile(spec, profile)
            return profile
    if not needs_profile(spec):
        return None
    ranks = spec.pipeline.ranks
    assert ranks != AUTO, "a run's plan says how many"
    with suppress(JobError):
        return read(cache_folder(os.environ) / f"{key_of(spec, ranks)}.json", found)
    return None


def _check_room(settled: Settled) -> None:
    lacking = shortage(cluster.nodes(), settled.plan.world_size, settled.spec.per_rank)
    if lacking is not None:
        raise JobError(
            f"{lacking}; lower pipeline.ranks or cluster.resources_per_rank, or join a larger cluster"
            " with cluster.address"
        )
