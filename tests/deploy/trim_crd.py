"""Make `rayservice.json`: what KubeRay's definition of a RayService says of the fields that our file has.

    git clone https://github.com/ray-project/kuberay && cd kuberay
    git show v1.5.1:helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml > crd.yaml
    python tests/deploy/trim_crd.py crd.yaml v1.5.1 > tests/deploy/rayservice.json

The whole definition has 17,000 lines, most of them Kubernetes' own description of pods. What Kubernetes drops without a
word, a name that the definition does not have, is refused here.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

KUBERAY = Path(__file__).parents[2] / "serve_configs" / "kuberay.yaml"
KEPT = ("type", "enum", "required", "minimum", "maximum", "pattern", "minLength", "maxLength", "maxItems")
SOURCE = (
    "From https://github.com/ray-project/kuberay, {version}, helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml, "
    "Apache License 2.0. Trimmed by tests/deploy/trim_crd.py to the fields that serve_configs/kuberay.yaml has."
)


def trimmed(schema: dict[str, Any], found: list[Any]) -> dict[str, Any]:
    """Return a Kubernetes schema as a JSON schema, without the fields that none of the values in `found` has."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = {name: schema[name] for name in KEPT if name in schema}
    if "items" in schema:
        kept["items"] = trimmed(schema["items"], [each for value in found for each in value])
    if "additionalProperties" in schema:
        values = [each for value in found for each in value.values()]
        kept["additionalProperties"] = trimmed(schema["additionalProperties"], values)
    if "properties" in schema:
        kept["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        kept["properties"] = {
            name: trimmed(below, [value[name] for value in found if name in value])
            for name, below in schema["properties"].items()
            if any(name in value for value in found)
        }
    return kept


def main(definition: Path, version: str) -> None:
    """Print the schema."""
    versions = {f"ray.io/{each['name']}": each for each in yaml.safe_load(definition.read_text())["spec"]["versions"]}
    service, *_ = yaml.safe_load_all(KUBERAY.read_text())
    schema = trimmed(versions[service["apiVersion"]]["schema"]["openAPIV3Schema"], [service])
    print(json.dumps({"$comment": SOURCE.format(version=version)} | schema, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
