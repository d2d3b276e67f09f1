"""The fields of KubeRay's own resources, as a JSON schema without its pod templates.

After the Go types `RayClusterSpec` and `RayJobSpec` of github.com/ray-project/kuberay, in
ray-operator/apis/ray/v1/raycluster_types.go and rayjob_types.go, and `authOptions` after "KubeRay CRD API reference",
version 1.6.2. Fields that none of our manifests could want are left out: a manifest that uses one adds it here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT = {"type": "string"}
FLAG = {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD_TEMPLATE = {"type": "object", "required": ["spec"]}
"""Checked by itself, as a Pod."""


def fields(known: Mapping[str, Any], *required: str) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "properties": dict(known),
        "required": list(required),
        "additionalProperties": False,
    }


HEAD_GROUP = fields(
    {
        "template": POD_TEMPLATE,
        "headService": {"type": "object"},
        "enableIngress": FLAG,
        "rayStartParams": TEXTS,
        "serviceType": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    },
    "template",
)
WORKER_GROUP = fields(
    {
        "groupName": TEXT,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "idleTimeoutSeconds": COUNT,
        "numOfHosts": COUNT,
        "rayStartParams": TEXTS,
        "template": POD_TEMPLATE,
        "suspend": FLAG,
    },
    "groupName",
    "template",
    "minReplicas",
    "maxReplicas",
)
RAY_CLUSTER = fields(
    {
        "rayVersion": TEXT,
        "suspend": FLAG,
        "managedBy": TEXT,
        "authOptions": fields({"mode": {"enum": ["token", "disabled"]}, "secretName": TEXT}),
        "enableInTreeAutoscaling": FLAG,
        "headServiceAnnotations": TEXTS,
        "headGroupSpec": HEAD_GROUP,
        "workerGroupSpecs": {"type": "array", "items": WORKER_GROUP},
    },
    "headGroupSpec",
)
RAY_JOB = fields(
    {
        "activeDeadlineSeconds": COUNT,
        "backoffLimit": COUNT,
        "rayClusterSpec": RAY_CLUSTER,
        "clusterSelector": TEXTS,
        "submitterPodTemplate": POD_TEMPLATE,
        "submitterConfig": fields({"backoffLimit": COUNT}),
        "metadata": TEXTS,
        "entrypoint": TEXT,
        "runtimeEnvYAML": TEXT,
        "jobId": TEXT,
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        "entrypointResources": TEXT,
        "entrypointNumCpus": {"type": "number"},
        "entrypointNumGpus": {"type": "number"},
        "ttlSecondsAfterFinished": COUNT,
        "shutdownAfterJobFinishes": FLAG,
        "suspend": FLAG,
    },
    "entrypoint",
)


def resource(kind: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a whole object."""
    known = {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": kind},
        "metadata": fields({"name": TEXT, "namespace": TEXT, "labels": TEXTS, "annotations": TEXTS}, "name"),
        "spec": dict(spec),
    }
    return fields(known, *known)


SCHEMAS = {"RayCluster": resource("RayCluster", RAY_CLUSTER), "RayJob": resource("RayJob", RAY_JOB)}
