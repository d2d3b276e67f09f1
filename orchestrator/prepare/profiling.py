"""Obtains a job's profile: from a file, from the cache, or by a measurement with the ranks themselves.

A measurement on this machine runs in its own processes, without Ray; on a cluster, in actors that reserve the same
resources as the job's ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from orchestrator.cluster import connection as cluster
from orchestrator.cluster.placement import Node, capacity
from orchestrator.prepare.model_outline import ModelOutline
from orchestrator.prepare.planning import ranks_to_profile
from orchestrator.prepare.profile_cache import cache_folder, doubts, forget_stale, noise, stale
from orchestrator.prepare.settling import on_cluster
from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import AUTO
from planner.profile import SCHEMA, Profile, ProfileError
from planner.wording import counted
from workers.config import AdaptConfig, ElasticConfig, FreezeConfig, WorkerConfig
from workers.profiling.measured import combine
from workers.protocol.errors import JobError

MEASUREMENT = 6
"""Version of what is measured and how; a new version invalidates old profiles."""


def obtain(
    spec: Spec,
    found: ModelOutline,
    *,
    ranks: int,
    profile_file: Path | None = None,
    afresh: bool = False,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """The profile of `spec` on `ranks` ranks: from `profile_file`, from the cache, or measured now.

    Args:
        spec: settled. Unless its address is `local`, this process is connected to its cluster.
        ranks: ranks of all pipelines.
        profile_file: a profile from elsewhere; accepted if it is of this model, whatever it was measured on.
            `planning.first_plan` checks that it was made with the job's settings.
        afresh: measure even if the cache has one.
        cache: the cache's folder; None: see `cache_folder`.
        say: receives phases in words.

    Raises:
        JobError: the file is no profile, or another model's; the ranks cannot be started, or the model does not work.
    """
    if profile_file is not None:
        return trusted(read(profile_file, found), say)
    key = key_of(spec, ranks)
    folder = cache or cache_folder(os.environ)
    path = folder / f"{key}.json"
    kept: Profile | None = None
    if not afresh:
        with suppress(JobError):  # missing, or no longer usable
            kept = read(path, found)
    wrong = stale(folder, kept) if kept is not None else None
    if kept is not None and wrong is None:
        return trusted(kept, say)
    why = f", as the last profile does not hold: {wrong}" if wrong is not None else ""
    say(f"profiling {counted(len(found.layers), 'layer')} on {counted(ranks, 'rank')}{why}")
    profile = _measure(spec, ranks)
    profile = replace(profile, key=key, source=_source(profile, ranks), measured_s=time.time())
    if kept is not None and noise(kept) is None and (disturbed := noise(profile)) is not None:
        say(
            f"the profile of before stays, until a quieter start measures again: {disturbed} in this measurement"
        )
        return kept
    with suppress(OSError):  # a cache that cannot be written costs the next run a few seconds
        write(profile, path)
        forget_stale(folder, key)
    return trusted(profile, say)


def trusted(profile: Profile, say: Callable[[str], None]) -> Profile:
    """`profile`, once it is said what speaks against it."""
    for text in doubts(profile, time.time()):
        say(text)
    return profile


def profile_of(
    spec: Spec, found: ModelOutline, *, afresh: bool = False, say: Callable[[str], None]
) -> tuple[Spec, Profile]:
    """Settle a spec by its cluster, and profile it there. Connects to the cluster unless that is this machine.

    Args:
        spec: settled by its model.
        afresh: measure even if the cache has a profile.
        say: receives phases in words.

    Raises:
        JobError: there is no such cluster, or the job cannot be measured.
    """
    address = spec.cluster.address
    if address == "local":
        return _profile_on((_this_machine(),), spec, found, afresh, say)
    with cluster.connected(address, cpus=0):
        return _profile_on(cluster.nodes(), spec, found, afresh, say)


def read(path: Path, found: ModelOutline) -> Profile:
    """The profile in `path`.

    Raises:
        JobError: it cannot be read, is no profile, or is another model's.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(f"cannot read the profile {path}: {reason}; make one with freshet profile") from error
    return parsed(text, found, where=str(path))


def parsed(text: str, found: ModelOutline, *, where: str) -> Profile:
    """The profile in `text`, the content of the file `where`.

    Raises:
        JobError: it is no profile, or another model's.
    """
    try:
        profile = Profile.from_json(text, where=where)
    except ProfileError as error:
        raise JobError(str(error)) from error
    _check_model(profile, found, where)
    return profile


def write(profile: Profile, path: Path) -> None:
    """Write `profile` as JSON, atomically: a reader sees the old or the new file.

    Raises:
        OSError: the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
        file.write(profile.to_json() + "\n")
    os.replace(file.name, path)


def key_of(spec: Spec, ranks: int) -> str:
    """Hash (hex) of everything that a measurement of the settled `spec` depends on."""
    local = spec.cluster.address == "local"
    depends = {
        "schema": [SCHEMA, MEASUREMENT],
        "model": spec.model.model_dump(mode="json", exclude={"weights", "weights_sha256"}),
        "code": [_code_of(spec.model.user_code), _code_of(spec.data.source)],
        "data": spec.data.model_dump(mode="json", exclude={"cache", "sha256", "validation_batches"}),
        "optimizer": [spec.optimizer.name, spec.optimizer.momentum != 0, spec.optimizer.amsgrad],
        "microbatch_size": spec.pipeline.microbatch_size,
        "precision": spec.job.precision,
        "threads": spec.job.threads,
        "device": spec.cluster.device,
        "emulated": spec.cluster.emulated.model_dump(mode="json")
        if spec.cluster.device == "emulated"
        else None,
        "ranks": ranks,
        "torch": version("torch"),
        "where": _here(spec.cluster.device) if local else _nodes(),
        "per_rank": None if local else spec.cluster.resources_per_rank,
    }
    if spec.cluster.pin_cores:
        depends["pinned"] = True
    if spec.job.compile:
        depends["compiled"] = True
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]


def machine_key(cpu: str, cpus: int, gpus: Sequence[tuple[str, int]]) -> list[Any]:
    """Identity of a machine in a key.

    Args:
        gpus: name and memory in bytes of each GPU that the ranks may use.
    """
    return [cpu, cpus, *(list(gpu) for gpu in gpus)]


def _here(device: str) -> list[Any]:
    """The properties of this machine that the costs on its `device` depend on."""
    from workers.devices.machine import cpu_name, visible_gpus

    return machine_key(cpu_name(), os.cpu_count() or 1, visible_gpus() if device == "cuda" else ())


def _code_of(import_path: str | None) -> str | None:
    """Digest of the file of `module:function`; None if there is none."""
    if import_path is None or ":" not in import_path:
        return None
    with suppress(ImportError, ValueError, OSError):
        found = find_spec(import_path.partition(":")[0])
        if found is not None and found.origin is not None:
            return hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()
    return None


def _nodes() -> list[list[object]]:
    return [[node.host, dict(node.total)] for node in sorted(cluster.nodes(), key=lambda node: node.host)]


def _profile_on(
    nodes: Sequence[Node], spec: Spec, found: ModelOutline, afresh: bool, say: Callable[[str], None]
) -> tuple[Spec, Profile]:
    names = {name for node in nodes for name in node.total}
    totals = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in names}
    spec = on_cluster(spec, totals)
    room = capacity(nodes, spec.cluster.resources_per_rank or {})
    ranks = ranks_to_profile(spec, len(found.layers), room)
    return spec, obtain(spec, found, ranks=ranks, afresh=afresh, say=say)


def _this_machine() -> Node:
    """This machine as the one node that a local cluster would have."""
    import torch

    total = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
    return Node(id="", host="localhost", total=total, available=total)


def _check_model(profile: Profile, found: ModelOutline, where: str) -> None:
    """Raises:
    JobError: `profile` is of another model.
    """
    layers = profile.model.layers
    way_out = "profile this job with freshet profile, or use the spec that the profile was made with"
    if len(layers) != len(found.layers):
        raise JobError(
            f"{where} is another model's profile: it has {counted(len(layers), 'layer')}, the model has"
            f" {len(found.layers)}; {way_out}"
        )
    for number, (layer, name, parameters) in enumerate(
        zip(layers, found.layers, found.parameters, strict=True)
    ):
        if (layer.name, layer.parameters) != (name, parameters):
            raise JobError(
                f"{where} is another model's profile: its layer {number} is {layer.name} with {layer.parameters}"
                f" parameters, the model's is {name} with {parameters}; {way_out}"
            )


def _measure(spec: Spec, ranks: int) -> Profile:
    config = measuring_config(spec)
    if spec.cluster.address == "local":
        return _measure_here(config, ranks, spec.cluster.timeout_s)
    from orchestrator.prepare.measuring import measure_on_cluster

    per_rank = spec.cluster.resources_per_rank
    assert per_rank is not None, "the spec must be settled"
    measured = measure_on_cluster(config, ranks, per_rank, spec.cluster.wait_s, spec.cluster.timeout_s)
    return combine(measured, config)


def _measure_here(config: WorkerConfig, ranks: int, timeout_s: float) -> Profile:
    """Measure in a separate process: the ranks' processes would import this one's main module again."""
    from workers.launch.profile import ProfileRequest

    with tempfile.TemporaryDirectory(prefix="freshet-profile-") as folder:
        request, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        request.write_text(ProfileRequest(config=config, ranks=ranks, timeout_s=timeout_s).to_json())
        measuring = subprocess.Popen(
            [sys.executable, "-m", "workers.launch.profile", str(request), str(answer)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(cluster.import_paths())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = measuring.communicate()
        except BaseException:
            measuring.send_signal(signal.SIGINT)  # the process ends its ranks
            measuring.wait()
            raise
        if not answer.exists():
            last = errors.strip().rpartition("\n")[2]
            raise JobError(f"the job could not be profiled: {last or f'exit code {measuring.returncode}'}")
        text = answer.read_text()
    if measuring.returncode:
        raise JobError(json.loads(text)["error"])
    return Profile.from_json(text)


def measuring_config(spec: Spec) -> WorkerConfig:
    """The sections that the measuring ranks use. They follow no plan, so it leaves out the planner's choices."""
    microbatches = 1 if spec.pipeline.microbatches == AUTO else spec.pipeline.microbatches
    pipeline = spec.pipeline.model_copy(
        update={"replicas": 1, "pipelines": None, "microbatches": microbatches}
    )
    job = spec.job.model_copy(update={"validate_every": 0, "sample_tokens": 0, "curvature_every": 0})
    left_out = {"freeze": FreezeConfig(), "adapt": AdaptConfig(), "elastic": ElasticConfig()}
    return spec.for_ranks.model_copy(update={"job": job, "pipeline": pipeline, **left_out})


def _source(profile: Profile, ranks: int) -> str:
    devices = profile.cluster.devices
    machines = len({device.machine for device in devices})
    day = datetime.now(UTC).date()
    times = "times as cluster.emulated gives them, " if devices[0].kind == "emulated" else ""
    return (
        f"{times}measured on {day} by {counted(ranks, 'rank')} on {counted(machines, 'machine')}"
        f" ({devices[0].name})"
    )
