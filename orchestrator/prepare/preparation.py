"""Prepares a job from its spec: the plan is kept from the earlier run, made from a profile, or given by the spec."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.placement import capacity, shortage
from orchestrator.history.folder import PROFILE, JobFolder
from orchestrator.prepare.interference_model import interference_model
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import check_profile, first_plan, ranks_to_profile, replanner_of
from orchestrator.prepare.profile_cache import cache_folder
from orchestrator.prepare.profiling import key_of, obtain, parsed, read
from orchestrator.prepare.resolve import Resolved, resolve
from orchestrator.prepare.resumption import still_right
from orchestrator.prepare.settling import SettledSpec, settle
from orchestrator.spec.checks import AUTO, CheckedSpec, needs_profile
from orchestrator.spec.job_spec import Spec
from planner.profile import Profile
from planner.search.candidate import Alternative
from planner.search.replan import Replanner
from workers.protocol import JobError


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that can be handed to a controller."""

    resolved: Resolved
    profile: Profile | None = None
    """The profile that the plan is based on; None if it needs none, or if a kept plan's is gone."""
    alternatives: tuple[Alternative, ...] = ()
    """The plans that it was chosen from."""
    replanner: Replanner
    """Plans for other numbers of ranks."""
    forest: bytes | None = None
    """The machine's interference model, if the job adapts by one."""


def prepare(
    checked: CheckedSpec,
    found: ModelOutline,
    folder: JobFolder,
    *,
    resume: bool,
    profile_file: Path | None,
    say: Callable[[str], None],
) -> Prepared:
    """Settle a whole spec on the cluster that this process is connected to.

    Args:
        profile_file: plan with it, whatever the run had before.
        say: receives a line if something is measured.

    Raises:
        JobError: the model cannot be profiled or cut as asked, or a cluster of our own has no room.
    """
    import ray

    settled = settle(checked, found, ray.cluster_resources())
    spec = settled.spec
    epoch, _ = folder.incarnations()
    newest = folder.newest_plan() if resume and profile_file is None else None
    chooses = spec.elastic.redundancy == AUTO  # by what the job allows now, and links may have changed
    if newest is not None and still_right(newest, settled) and not chooses:
        known = _kept(settled, folder)
        if known is None and spec.adapt.policy != "off":
            known = _obtained(settled, profile_file, say)
        resolved = resolve(settled, epoch=epoch + 1, plan=newest)
        prepared = Prepared(resolved=resolved, profile=known, replanner=replanner_of(resolved, known))
    elif profile_file is not None or needs_profile(spec):
        known = _kept(settled, folder) if resume and profile_file is None else None
        profile = known or _obtained(settled, profile_file, say)
        choice = first_plan(settled, profile)
        resolved = resolve(settled, epoch=epoch + 1, plan=choice.plan)
        prepared = Prepared(
            resolved=resolved,
            profile=profile,
            alternatives=choice.alternatives,
            replanner=replanner_of(resolved, profile),
        )
    else:
        resolved = resolve(settled, epoch=epoch + 1)
        prepared = Prepared(resolved=resolved, replanner=replanner_of(resolved, None))
    if spec.adapt.policy == "forest":
        prepared = replace(prepared, forest=_forest(spec, say))
    if spec.cluster.address == "local":
        # No node will join a cluster of our own: there is no point in waiting.
        _check_room(prepared.resolved)
    return prepared


def _forest(spec: Spec, say: Callable[[str], None]) -> bytes | None:
    """The interference model of this machine, made now if there is none."""
    model, why = interference_model(spec.cluster.device, say=say)
    if model is None:
        say(f"{why}; the planner goes by measured slowdowns")
    return None if model is None else model.to_bytes()


def _obtained(settled: SettledSpec, profile_file: Path | None, say: Callable[[str], None]) -> Profile:
    """The profile from the file or the cache, or measured now."""
    spec, found = settled.spec, settled.outline
    room = capacity(cluster.nodes(), spec.cluster.resources_per_rank or {})
    ranks = ranks_to_profile(spec, len(found.layers), room)
    return obtain(spec, found, ranks=ranks, profile_file=profile_file, say=say)


def _kept(settled: SettledSpec, folder: JobFolder) -> Profile | None:
    """The profile that the run's plan is based on, or another of this job's, if there is one: a resumed job does not
    wait for a measurement."""
    spec, found = settled.spec, settled.outline
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


def _check_room(resolved: Resolved) -> None:
    lacking = shortage(cluster.nodes(), resolved.plan.world_size, resolved.per_rank)
    if lacking is not None:
        raise JobError(
            f"{lacking}; lower pipeline.ranks or cluster.resources_per_rank, or join a larger cluster"
            " with cluster.address"
        )
