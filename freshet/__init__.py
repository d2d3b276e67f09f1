"""Freshet for Python users: jobs, clients, and what models and data are made of. Each name is loaded at its first use.

Not here: How any of it works; `orchestrator/`, `workers/` and `planner/` are free to change.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.client.asking import joined
    from orchestrator.client.blocking_client import BlockingJobClient as Client
    from orchestrator.client.errors import PlanChanged
    from orchestrator.client.job_client import JobClient as AsyncClient
    from orchestrator.client.jobs import Missed
    from orchestrator.client.opening import opened
    from orchestrator.client.rest_client import RestJobClient as RestClient
    from orchestrator.spec.job_spec import Spec
    from orchestrator.spec.job_spec import load as load_spec
    from orchestrator.trainer import PipelineTrainer as Trainer
    from workers.data.dataset import Batch, Dataset, OpenData
    from workers.metrics.measure import Measure
    from workers.models.definition import LayerBuilder, ModelDefinition, ParameterRef
    from workers.protocol.errors import JobError
    from workers.protocol.reports import StepReport

__all__ = [
    "AsyncClient",
    "Batch",
    "Client",
    "Dataset",
    "JobError",
    "LayerBuilder",
    "Measure",
    "Missed",
    "ModelDefinition",
    "OpenData",
    "ParameterRef",
    "PlanChanged",
    "RestClient",
    "Spec",
    "StepReport",
    "Trainer",
    "joined",
    "load_spec",
    "opened",
]

_PLACES = {
    "AsyncClient": "orchestrator.client.job_client:JobClient",
    "Batch": "workers.data.dataset:Batch",
    "Client": "orchestrator.client.blocking_client:BlockingJobClient",
    "Dataset": "workers.data.dataset:Dataset",
    "JobError": "workers.protocol.errors:JobError",
    "LayerBuilder": "workers.models.definition:LayerBuilder",
    "Measure": "workers.metrics.measure:Measure",
    "Missed": "orchestrator.client.jobs:Missed",
    "ModelDefinition": "workers.models.definition:ModelDefinition",
    "OpenData": "workers.data.dataset:OpenData",
    "ParameterRef": "workers.models.definition:ParameterRef",
    "PlanChanged": "orchestrator.client.errors:PlanChanged",
    "RestClient": "orchestrator.client.rest_client:RestJobClient",
    "Spec": "orchestrator.spec.job_spec:Spec",
    "StepReport": "workers.protocol.reports:StepReport",
    "Trainer": "orchestrator.trainer:PipelineTrainer",
    "joined": "orchestrator.client.asking:joined",
    "load_spec": "orchestrator.spec.job_spec:load",
    "opened": "orchestrator.client.opening:opened",
}
"""Name here -> the module that has it, and its name there."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"freshet has no {name}: it has {', '.join(__all__)}")
    module, _, there = _PLACES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), there)
    return value


def __dir__() -> list[str]:
    return __all__
