"""The Kubernetes manifests: fields exist and have their types, names agree, pods are locked down and leave in time."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
from deployment import DEPLOY, document, kubernetes, pod_templates
from jsonschema import ValidationError, validate
from kuberay_schema import SCHEMAS
from kubernetes_validate import validate as validate_kubernetes

VERSION = "1.33"
"""Of Kubernetes: the schemas of its API are in the package kubernetes-validate."""
TEMPLATES = dict(pod_templates())
SPOT_LABELS = {
    "eks.amazonaws.com/capacityType",
    "karpenter.sh/capacity-type",
    "cloud.google.com/gke-spot",
    "kubernetes.azure.com/scalesetpriority",
}


def check(found: dict[str, Any]) -> None:
    """Raises: a field is unknown, missing, or of another type."""
    if schema := SCHEMAS.get(found["kind"]):
        validate(found, schema)
    else:
        validate_kubernetes(found, VERSION, strict=True)


def check_template(template: dict[str, Any]) -> None:
    """A pod template is checked as the pod that becomes of it."""
    metadata = {"name": "any"} | template.get("metadata", {})
    validate_kubernetes(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]},
        VERSION,
        strict=True,
    )


@pytest.mark.parametrize(
    "found", kubernetes(), ids=lambda found: f"{found['kind']}-{found['metadata']['name']}"
)
def test_every_field_is_known_and_has_its_type(found: dict[str, Any]) -> None:
    check(found)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_field_of_a_pod_is_known_and_has_its_type(name: str) -> None:
    check_template(TEMPLATES[name])


def test_slips_are_caught() -> None:
    cluster = deepcopy(document("kubernetes/raycluster.yaml"))
    cluster["spec"]["workerGroupSpecs"][0]["maxReplica"] = 3
    with pytest.raises(ValidationError, match="maxReplica"):
        check(cluster)
    cluster = deepcopy(document("kubernetes/raycluster.yaml"))
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    with pytest.raises(ValidationError, match="0 is not of type 'string'"):
        check(cluster)
    template = deepcopy(TEMPLATES["spot"])
    template["spec"]["terminationGracePeriod"] = 25
    with pytest.raises(ValidationError, match="terminationGracePeriod"):
        check_template(template)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pod_can_gain_no_privileges_and_has_bounds(name: str) -> None:
    pod = TEMPLATES[name]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() == container["resources"]["limits"].keys()
        writable = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/tmp", "/home/freshet"} <= writable
        assert {mount["name"] for mount in container["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}


@pytest.mark.parametrize("name", ["head", "spot", "service"])
def test_what_runs_on_is_probed(name: str) -> None:
    (container,) = TEMPLATES[name]["spec"]["containers"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()


def test_workers_want_spot_nodes_of_any_cloud_and_the_head_none() -> None:
    def terms(name: str) -> list[dict[str, Any]]:
        affinity = TEMPLATES[name]["spec"]["affinity"]["nodeAffinity"]
        return affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]

    any_of = [term["matchExpressions"] for term in terms("spot")]
    assert all(len(expressions) == 1 and expressions[0]["operator"] == "In" for expressions in any_of)
    (none_of,) = [term["matchExpressions"] for term in terms("head")]
    assert all(expression["operator"] == "NotIn" for expression in none_of)

    def wanted(expressions: list[dict[str, Any]]) -> dict[str, list[str]]:
        return {expression["key"]: expression["values"] for expression in expressions}

    spot = wanted([expression for expressions in any_of for expression in expressions])
    assert spot == wanted(none_of)
    assert spot.keys() == SPOT_LABELS
    assert "tolerations" not in TEMPLATES["head"]["spec"]


def test_workers_leave_before_they_are_killed() -> None:
    pod = TEMPLATES["spot"]["spec"]
    program, leave_s = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "freshet-leave"
    assert int(leave_s) + 5 == pod["terminationGracePeriodSeconds"]


def test_budgets_select_the_pods_and_let_one_worker_go() -> None:
    """Kubernetes takes only minAvailable for pods whose owner has no scale subresource."""
    cluster = document("kubernetes/raycluster.yaml")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    budgets = {
        found["metadata"]["name"]: found["spec"]
        for found in kubernetes()
        if found["kind"] == "PodDisruptionBudget"
    }
    assert budgets["freshet-head"]["minAvailable"] == 1
    assert budgets["freshet-workers"]["minAvailable"] == group["replicas"] - 1
    for name, node_type in (("freshet-head", "head"), ("freshet-workers", "worker")):
        labels = budgets[name]["selector"]["matchLabels"]
        assert labels == {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": node_type}


def test_names_agree() -> None:
    found = kubernetes()
    cluster = document("kubernetes/raycluster.yaml")
    job = document("kubernetes/rayjob.yaml")
    name = cluster["metadata"]["name"]
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": name}
    assert "backoffLimit" not in job["spec"], (
        "KubeRay takes no retries on a cluster that is not the job's own"
    )
    assert f"--address={name}-head-svc:6379" in TEMPLATES["service"]["spec"]["containers"][0]["args"][0]
    claims = {one["metadata"]["name"] for one in found if one["kind"] == "PersistentVolumeClaim"}
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for template in TEMPLATES.values()
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == claims
    (service,) = [one for one in found if one["kind"] == "Service"]
    labels = TEMPLATES["service"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["type"] == "ClusterIP"
    images = {c["image"] for template in TEMPLATES.values() for c in template["spec"]["containers"]}
    assert len(images) == 1


def test_the_service_answers_to_its_name_in_the_cluster() -> None:
    """It listens on every address, and so has no name of its own."""
    (service,) = [one for one in kubernetes() if one["kind"] == "Service"]
    (container,) = TEMPLATES["service"]["spec"]["containers"]
    names = re.findall(r"--host-name (\S+)", container["args"][0])
    name = service["metadata"]["name"]
    ends = ("", ".$NAMESPACE", ".$NAMESPACE.svc", ".$NAMESPACE.svc.cluster.local")
    assert names == [f"{name}{end}" for end in ends]
    environment = {variable["name"]: variable for variable in container["env"]}
    assert environment["NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"


def test_the_network_policy_covers_every_pod() -> None:
    (policy,) = [one for one in kubernetes() if one["kind"] == "NetworkPolicy"]
    for template in TEMPLATES.values():
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_token_comes_from_a_secret_that_no_file_holds() -> None:
    secret = document("kubernetes/raycluster.yaml")["spec"]["authOptions"]
    assert secret == {"mode": "token", "secretName": "freshet-ray-token"}
    for name in ("service", "submitter"):
        (container,) = TEMPLATES[name]["spec"]["containers"]
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        reference = environment["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": secret["secretName"], "key": "auth_token"}
    assert not [one for one in kubernetes() if one["kind"] == "Secret"]


def test_kustomize_takes_every_manifest_but_the_job() -> None:
    listed = set(document("kubernetes/kustomization.yaml")["resources"])
    there = {file.name for file in (DEPLOY / "kubernetes").glob("*.yaml")}
    assert there - listed == {"kustomization.yaml", "rayjob.yaml"}
    assert listed <= there
    (image,) = document("kubernetes/kustomization.yaml")["images"]
    assert re.match(re.escape(image["name"]) + ":", TEMPLATES["head"]["spec"]["containers"][0]["image"])
