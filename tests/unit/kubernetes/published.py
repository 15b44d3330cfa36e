# SPDX-License-Identifier: Apache-2.0
"""The published schemas of PyTorchJob and JobSet, kept in published.json. As a program, write that file again.

Their source are the models that Kubeflow publishes on PyPI, which are generated from the definitions in Kubernetes and
in the operators, both Apache-2.0, copyright of The Kubeflow Authors and The Kubernetes Authors:

- kubeflow-training 1.9.4: PyTorchJob, v1 of kubeflow.org;
- kubeflow-trainer-api 2.3.0: JobSet, v1alpha2 of jobset.x-k8s.io, and the pods of both.

Taken out are descriptions, titles, defaults, `null` as a value, what is inside metrics and states of a PyTorchJob, and
definitions that neither kind refers to; quantities are numbers or texts, as in a manifest. Added is that unknown fields
are refused, which a cluster drops. `python -m tests.unit.kubernetes.published` needs both packages.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("published.json")
_WORDS = ("description", "title", "default")
_JOBSET = "JobsetV1alpha2JobSet"
_PYTORCHJOB = "KubeflowOrgV1PyTorchJob"
_PYTHON_TYPES = {"str": "string", "int": "integer", "bool": "boolean", "float": "number", "object": "object"}
_NAMES = {
    "V1PodTemplateSpec": "IoK8sApiCoreV1PodTemplateSpec",
    "V1ObjectMeta": "IoK8sApimachineryPkgApisMetaV1ObjectMeta",
    "V1LabelSelector": "IoK8sApimachineryPkgApisMetaV1LabelSelector",
    "Quantity": "IoK8sApimachineryPkgApiResourceQuantity",
}
"""Models of the Kubernetes client by their names in kubeflow-trainer-api."""
_EITHER = {"anyOf": [{"type": "integer"}, {"type": "string"}]}


def read_schema(kind: str) -> dict[str, Any]:
    """Return the schema of "PyTorchJob" or "JobSet"."""
    definitions = json.loads(PATH.read_text())["$defs"]
    name = {"PyTorchJob": _PYTORCHJOB, "JobSet": _JOBSET}[kind]
    return {"$ref": f"#/$defs/{name}", "$defs": definitions}


def _trim(schema: Any) -> Any:
    """`schema` without words, defaults and null, and closed to unknown fields."""
    if isinstance(schema, list):
        return [_trim(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema:
        kept = [_trim(each) for each in schema["anyOf"] if each != {"type": "null"}]
        return kept[0] if len(kept) == 1 else {"anyOf": kept}
    trimmed = {name: _trim(value) for name, value in schema.items() if name not in (*_WORDS, "properties")}
    if "properties" in schema:
        trimmed["properties"] = {name: _trim(value) for name, value in schema["properties"].items()}
        trimmed["additionalProperties"] = False
    return trimmed


def _of_python_type(text: str) -> dict[str, Any]:
    """The schema of a type as the models of kubeflow-training name it, such as "dict(str, V1Volume)"."""
    if found := re.fullmatch(r"dict\(str, (.+)\)", text):
        return {"type": "object", "additionalProperties": _of_python_type(found[1])}
    if found := re.fullmatch(r"list\[(.+)\]", text):
        return {"type": "array", "items": _of_python_type(found[1])}
    if text in _PYTHON_TYPES:
        return {"type": _PYTHON_TYPES[text]}
    return {"$ref": f"#/$defs/{_NAMES.get(text, text)}"}


def _of_model(model: Any) -> dict[str, Any]:
    """The schema of a model of kubeflow-training: its fields' types, and those that may not be None."""
    names = model.attribute_map
    required = re.findall(r"Invalid value for `(\w+)`, must not be `None`", inspect.getsource(model))
    return {
        "type": "object",
        "properties": {
            names[field]: _of_python_type(text) for field, text in model.openapi_types.items() if field != "status"
        },
        "required": sorted({names[field] for field in required}),
        "additionalProperties": False,
    }


def _references(schema: Any) -> list[str]:
    return re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema))


def main() -> None:
    """Write published.json from the two packages."""
    jobset = import_module("kubeflow_trainer_api.models.jobset_v1alpha2_job_set").JobsetV1alpha2JobSet
    found = jobset.model_json_schema(by_alias=True)
    every = {_JOBSET: _trim({k: v for k, v in found.items() if k != "$defs"}), **_trim(found["$defs"])}
    models = import_module("kubeflow.training.models")
    for name, model in vars(models).items():
        if name.startswith("KubeflowOrgV1") and hasattr(model, "openapi_types"):
            every[name] = _of_model(model)
    every |= {name: _EITHER for name in every if name.endswith(("ResourceQuantity", "IntstrIntOrString"))}
    every["K8sIoApiAutoscalingV2MetricSpec"] = {"type": "object"}  # of an elasticPolicy; ddpilot renders none
    kept: dict[str, Any] = {}
    todo = [_JOBSET, _PYTORCHJOB]
    while todo:
        name = todo.pop()
        if name in kept or name not in every:
            continue
        kept[name] = every[name]
        todo += _references(kept[name])
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name], sort_keys=True)}" for name in sorted(kept))
    comment = (
        "From kubeflow-training 1.9.4 and kubeflow-trainer-api 2.3.0 on PyPI (Apache-2.0), changed: see published.py"
    )
    PATH.write_text(f'{{"$comment": {json.dumps(comment)},\n"$defs": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
