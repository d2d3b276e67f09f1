"""Takes over settings from the folder of a resumed run: everything that was searched or set by default.

The microbatches are part of the trajectory and the phases of freezing decide what is logged, so neither may change in a
resumed run; the plan is kept because there is no reason to measure again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.spec.job_spec import Spec
from orchestrator.spec.rules import searched
from planner.plan import Plan
from workers.config import FreezeConfig


def adopt(spec: Spec, before: Mapping[str, Any]) -> Spec:
    """`spec`, with open settings filled in from the resolved spec `before` of the earlier run."""
    pipeline, freeze = before.get("pipeline", {}), before.get("freeze", {})
    left_open = [key for key in searched(spec.pipeline) if key in pipeline]
    chunks_too = "schedule" in left_open and spec.pipeline.chunks is None
    given = spec.freeze.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    run = spec.logging.run or before.get("logging", {}).get("run")
    same_method = freeze.get("method") == spec.freeze.method
    return spec.model_copy(
        update={
            "pipeline": spec.pipeline.model_copy(
                update={key: pipeline[key] for key in (*left_open, *(("chunks",) if chunks_too else ()))}
            ),
            "logging": spec.logging.model_copy(update={"run": run}),
            "model": spec.model.model_copy(update=_weights_of(spec, before.get("model", {}))),
            "freeze": _with(spec.freeze, {key: each for key, each in freeze.items() if key not in given})
            if same_method
            else spec.freeze,
        }
    )


def _with(freeze: FreezeConfig, before: Mapping[str, Any]) -> FreezeConfig:
    """`freeze` with the keys of `before`, as JSON values, that there still are."""
    known = {key: each for key, each in before.items() if key in FreezeConfig.model_fields}
    return FreezeConfig.model_validate({**freeze.model_dump(mode="json"), **known})


def _weights_of(spec: Spec, before: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint of another run with which the job began, where the spec names that run, which may have a newer one
    by now."""
    path, sha256 = before.get("weights"), before.get("weights_sha256")
    named = spec.model.weights
    if named is None or path is None or spec.model.weights_sha256 is not None:
        return {}
    return {"weights": path, "weights_sha256": sha256} if path.startswith(f"{named.rstrip('/')}/") else {}


def still_right(plan: Plan, spec: Spec, layers: int) -> bool:
    """Whether `plan`, the run's newest, matches the spec, is for as many layers, and is known to fit the memory
    limit."""
    pipeline, limit = spec.pipeline, spec.cluster.memory_per_rank_bytes
    counts = plan.layers_per_stage
    as_asked = (
        plan.partition == pipeline.partition
        if isinstance(pipeline.partition, str)
        else counts == pipeline.partition
    )
    peak = plan.predicted_peak_memory_bytes
    return (
        not searched(pipeline)
        and as_asked
        and (plan.world_size, plan.replicas) == (pipeline.ranks, pipeline.replicas)
        and plan.pipeline_count == pipeline.pipeline_count
        and plan.shard == pipeline.shard
        and not plan.shares  # they were for the speeds of then
        and not (spec.freeze.by_prefix and spec.freeze.pack != "off")  # it was for the layers frozen by then
        and not plan.frozen
        and (plan.schedule, plan.microbatches) == (pipeline.schedule, pipeline.microbatches)
        and pipeline.chunks in (None, plan.chunks)
        and plan.layers[-1][1] == layers
        and plan.recompute == pipeline.recomputed(layers)
        and (limit is None or (peak is not None and peak <= limit))
    )
