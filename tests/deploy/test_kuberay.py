"""The file for Kubernetes is what KubeRay's published definition of a RayService takes (see `trim_crd`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError, validate

from mars_ray.serve.ray.app import DRAIN_SECONDS
from tests.deploy.trim_crd import KUBERAY

SCHEMA = json.loads((Path(__file__).parent / "rayservice.json").read_text())


@pytest.fixture
def service() -> Any:
    return next(yaml.safe_load_all(KUBERAY.read_text()))


def test_the_file_is_what_the_definition_takes(service: Any) -> None:
    validate(service, SCHEMA)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("spec.upgradeStrategies", {}),
        ("spec.upgradeStrategy.type", 1),
        ("spec.rayClusterDeletionDelaySeconds", "150 s"),
        ("spec.rayClusterConfig.authOptions.mode", "tokens"),
        ("spec.rayClusterConfig.headGroupSpec.template.spec.container", []),
    ],
)
def test_what_the_definition_lacks_is_refused(service: Any, place: str, value: Any) -> None:
    *path, name = place.split(".")
    fields = service
    for each in path:
        fields = fields[each]
    fields[name] = value
    with pytest.raises(ValidationError):
        validate(service, SCHEMA)


def test_a_new_cluster_answers_before_the_old_one_goes_and_that_one_may_finish(service: Any) -> None:
    assert service["spec"]["upgradeStrategy"] == {"type": "NewCluster"}  # the definition takes any string
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > DRAIN_SECONDS


def test_no_pod_runs_with_more_rights_than_it_needs(service: Any) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    workers = [each["template"]["spec"] for each in cluster["workerGroupSpecs"]]
    for pod in [cluster["headGroupSpec"]["template"]["spec"], *workers]:
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert (rights["allowPrivilegeEscalation"], rights["capabilities"]) == (False, {"drop": ["ALL"]})
    assert not any(each["automountServiceAccountToken"] for each in workers)


def test_only_an_operator_of_a_named_namespace_gets_to_ray_s_ports() -> None:
    _, policy = yaml.safe_load_all(KUBERAY.read_text())
    callers, _, operator = policy["spec"]["ingress"]
    assert callers == {"ports": [{"port": 8000}]}
    assert operator["from"][0]["namespaceSelector"]["matchLabels"]
