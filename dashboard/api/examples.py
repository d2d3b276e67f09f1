"""Examples of answers in the OpenAPI document, of those that would not fit beside their models."""

from __future__ import annotations

import json
from typing import Any

from planner.codec import json_values
from planner.plan import Plan
from planner.search.alternatives import Alternative

Example = dict[str, Any]


def example(value: object) -> Example:
    """The `json_schema_extra` of a model with this example."""
    return {"examples": [value]}


def answered(
    value: object, description: str, media_type: str = "application/json"
) -> dict[int | str, Example]:
    """The `responses` of a route whose answer, such as this one, has no model."""
    return {200: {"description": description, "content": {media_type: {"example": value}}}}


SPEC: Example = {
    "job": {"name": "gpt", "steps": 300},
    "model": {"family": "gpt"},
    "pipeline": {"ranks": 4},
}
SUMMARY: Example = {
    "job": "gpt",
    "state": "training",
    "step": 120,
    "last_step": 300,
    "loss": 2.231,
    "losses": [5.282, 3.849, 2.498, 2.231],
    "step_s": 0.103,
    "tokens_per_s": 39384.8,
    "per_s": "tokens/s",
    "samples_per_hour": 1107698.0,
    "flops_per_s": 412000000000.0,
    "mfu": None,
    "epochs": 1.92,
    "validation_loss": 2.304,
    "metrics": {"perplexity": 10.01},
    "watched": "loss",
    "best": 2.304,
    "best_step": 100,
    "time_to_target_s": None,
    "why": "",
    "remaining_s": 18.6,
    "ranks": 4,
    "spares": 1,
    "effective_time_ratio": 0.962,
    "recoveries": 1,
    "recovery_s": 0.41,
    "steps_rerun": 1,
    "plan_version": "1.2",
    "folder": "runs/gpt",
    "trouble": "",
    "started_s": 1763628000.0,
    "ended_s": None,
    "duration_s": 33.5,
    "model": "gpt, 8 blocks, width 128, context 128",
}
PLAN: Example = json_values(
    Plan(
        epoch=1,
        version=2,
        reason="planned by dynpipe: a step is predicted to take 98 ms",
        layers=((0, 3), (3, 5), (5, 6), (6, 8)),
        stage_ranks=(0, 1, 2, 3),
        schedule="1f1b",
        chunks=1,
        microbatches=8,
        replicas=1,
        partition="dynpipe",
        predicted_step_s=0.098,
        predicted_bubble=0.27,
        predicted_peak_memory_bytes=9_400_000,
    )
)
ALTERNATIVE: Example = json_values(
    Alternative(
        name="parameter",
        schedule="1f1b",
        ranks=4,
        microbatches=8,
        layers=((0, 2), (2, 4), (4, 6), (6, 8)),
        predicted_step_s=0.109,
        why_not="slower",
    )
)
PLAN_ANSWER: Example = {
    "version": "1.2",
    "time_s": 1763628012.3,
    "reason": PLAN["reason"],
    "plan": PLAN,
    "alternatives": [ALTERNATIVE],
}
PROPOSAL: Example = {
    "partition": [3, 2, 1, 2],
    "current_partition": [2, 2, 2, 2],
    "version": "1.1",
    "problem": None,
    "moved_layers": [2, 4, 5],
    "predicted_step_s": 0.098,
    "current_predicted_step_s": 0.109,
    "peak_memory_bytes": [9400000, 8100000, 6900000, 7200000],
    "memory_limit_bytes": [12000000, 12000000, 12000000, 12000000],
    "candidates": [ALTERNATIVE],
}
CHECKPOINT: Example = {
    "step": 50,
    "path": "runs/gpt/checkpoints/step-00000050-g1",
    "bytes": 25382912,
    "seconds": 0.21,
    "error": None,
}
EVENTS: Example = {
    "events": [
        {
            "time_s": 1763628005.2,
            "event": "RankStarted",
            "kind": "rank_started",
            "rank": 0,
            "node": "5f0c",
            "host": "10.0.0.4",
            "machine": "8d1b",
            "pid": 4000,
            "zone": "",
        },
        {
            "time_s": 1763628012.3,
            "event": "CheckpointReport",
            "kind": "checkpoint",
            **CHECKPOINT,
        },
    ],
    "missed": 0,
    "next": 2,
    "over": False,
}
STREAM = (
    "id: 1-971\nevent: record\n"
    'data: {"time_s": 1763628033.4, "event": "Warned", "kind": "warned", "text": "the disk is nearly full"}\n\n'
)
JOBS_STREAM = (
    f"event: summary\ndata: {json.dumps(SUMMARY)}\n\n"
    'event: gone\ndata: {"job": "old"}\n\n'
    'event: trouble\ndata: {"trouble": "the cluster does not answer"}\n\n'
)
TELEMETRY: Example = {
    "step": [199, 200],
    "loss": [1.805, 1.727],
    "grad_norm": [0.48, 0.642],
    "step_s": [0.0958, 0.098],
    "tokens_per_s": [42751.8, 41792.2],
    "bubble": [0.282, 0.3],
    "validation": {"175": 1.906, "200": 1.873},
    "metrics": {"perplexity": {"175": 6.726, "200": 6.508}},
}
CHECKPOINTS: Example = {"checkpoints": [CHECKPOINT]}
TIMELINE: Example = {
    "step": 200,
    "source": "measured",
    "step_s": 0.12,
    "title": "1f1b, 8 microbatches of 4 samples",
    "spans": [
        {"rank": 0, "action": "0F0", "start_s": 0.001, "end_s": 0.0051},
        {"rank": 1, "action": "1F0", "start_s": 0.0055, "end_s": 0.0098},
    ],
    "steps": [150, 200],
}
TRACE: Example = {
    "displayTimeUnit": "ms",
    "traceEvents": [{"name": "0F0", "ph": "X", "pid": 0, "tid": 0, "ts": 1000.0, "dur": 4100.0}],
}
PROFILE: Example = {
    "schema": 2,
    "model": {
        "layers": [{"name": "embedding", "forward_s": 0.0004, "input_grad_s": 0.0, "weight_grad_s": 0.0003}]
    },
    "cluster": {
        "devices": [{"kind": "cuda", "name": "NVIDIA H100", "memory_bytes": 80000000000, "slowdown": 1.0}]
    },
}
"""Abridged."""
VIEW: list[Example] = [
    {"job": "gpt", "state": "training", "epoch": 1, "step": 120, "runs": 1, "events": 971, "plan": PLAN}
]
"""Abridged."""
CLUSTER: Example = {
    "address": "10.0.0.1:6379",
    "nodes": [
        {
            "id": "5f0c9d2e",
            "host": "10.0.0.4",
            "head": False,
            "alive": True,
            "total": {"CPU": 8.0, "memory": 32000000000.0},
            "available": {"CPU": 6.0, "memory": 30000000000.0},
            "users": [{"job": "gpt", "ranks": [0, 1], "leaving": True, "deadline_s": 1763628060.0}],
            "drained_by": [],
            "draining": True,
            "deadline_s": 1763628060.0,
        }
    ],
    "preemptions": [
        {
            "time_s": 1763628030.0,
            "job": "gpt",
            "noticed": True,
            "text": "ranks 0, 1 on 10.0.0.4 must leave (ray, 30 s left)",
        }
    ],
}
MEASURED: Example = {
    "devices": [
        {
            "job": "gpt",
            "rank": 0,
            "node": "10.0.0.4",
            "kind": "cuda",
            "name": "NVIDIA H100",
            "memory_bytes": 80000000000,
            "slowdown": 1.0,
        }
    ],
    "links": [
        {
            "job": "gpt",
            "source": 0,
            "source_node": "10.0.0.4",
            "target": 1,
            "target_node": "10.0.0.5",
            "latency_s": 2e-05,
            "bytes_per_s": 12000000000.0,
        }
    ],
}
METRICS = '# HELP freshet_step Steps committed.\n# TYPE freshet_step gauge\nfreshet_step{job="gpt"} 120.0\n'
