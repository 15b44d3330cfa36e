# SPDX-License-Identifier: Apache-2.0
"""What a manifest may contain: JSON schemas of the fields that ddpilot renders. Any other field is refused.

They are narrower than the published ones (published.py): values and names that the operators' webhooks ask for.

Written from the published definitions, which are not copied here, since they have 600 and 800 kB:

- kubeflow.org_pytorchjobs.yaml, in manifests/base/crds of the training operator 1.9.0 (Apache-2.0), and its webhook,
  pkg/webhooks/pytorch/pytorchjob_webhook.go, which asks for a container "pytorch" and one Master;
- jobset.x-k8s.io_jobsets.yaml, in config/components/crd/bases of JobSet 0.12.0 (Apache-2.0), and its webhook,
  pkg/webhooks/jobset_webhook.go, which limits the length of names.

With DDPILOT_CRDS=FOLDER, where these two files lie, test_manifest.py validates against them as well.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TRUE_OR_FALSE: Schema = {"type": "boolean"}
LABEL: Schema = {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
QUANTITY: Schema = {
    "anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T|m)?$"}]
}


def table(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """Schema of a mapping that has no other fields than these."""
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


def items(schema: Schema) -> Schema:
    """Schema of a list that is not empty."""
    return {"type": "array", "items": schema, "minItems": 1}


def values(schema: Schema) -> Schema:
    """Schema of a mapping from any name."""
    return {"type": "object", "additionalProperties": schema, "minProperties": 1}


CONTAINER = table(
    ("name", "image", "command"),
    name={"const": "pytorch"},
    image=TEXT,
    command=items(TEXT),
    workingDir=TEXT,
    env=items(table(("name", "value"), name=TEXT, value=TEXT)),
    resources=table(requests=values(QUANTITY), limits=values(QUANTITY)),
    volumeMounts=items(table(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly=TRUE_OR_FALSE)),
)

VOLUME = {
    **table(
        ("name",),
        name=LABEL,
        emptyDir=table(("medium",), medium={"const": "Memory"}, sizeLimit=QUANTITY),
        persistentVolumeClaim=table(("claimName",), claimName=TEXT),
    ),
    "minProperties": 2,
    "maxProperties": 2,
}

TOLERATION = table(
    key=TEXT,
    operator={"enum": ["Exists", "Equal"]},
    value=TEXT,
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
)

POD = table(
    ("containers",),
    containers={**items(CONTAINER), "maxItems": 1},
    volumes=items(VOLUME),
    restartPolicy={"enum": ["Never"]},
    serviceAccountName=TEXT,
    terminationGracePeriodSeconds=COUNT,
    nodeSelector=values(TEXT),
    tolerations=items(TOLERATION),
)

METADATA = table(("name",), name=LABEL, namespace={**LABEL, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"})


def replicas(num: Schema) -> Schema:
    """Schema of one of the two kinds of nodes of a PyTorchJob."""
    template = table(("spec",), spec=POD)
    policy = {"enum": ["Never", "OnFailure"]}
    return table(("replicas", "restartPolicy", "template"), replicas=num, restartPolicy=policy, template=template)


PYTORCHJOB = table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata=METADATA,
    spec=table(
        ("pytorchReplicaSpecs",),
        nprocPerNode={"type": "string", "pattern": "^[1-9][0-9]*$"},
        runPolicy=table(cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=COUNT),
        pytorchReplicaSpecs=table(("Master",), Master=replicas({"const": 1}), Worker=replicas({**COUNT, "minimum": 1})),
    ),
)

JOB = table(
    ("template",),
    completionMode={"const": "Indexed"},
    parallelism=COUNT,
    completions=COUNT,
    backoffLimit=COUNT,
    template=table(("spec",), spec={**POD, "required": ["containers", "restartPolicy"]}),
)

JOBSET = table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=METADATA,
    spec=table(
        ("replicatedJobs",),
        network=table(enableDNSHostnames=TRUE_OR_FALSE),
        failurePolicy=table(maxRestarts=COUNT),
        replicatedJobs=items(
            table(("name", "template"), name=LABEL, replicas=COUNT, template=table(("spec",), spec=JOB))
        ),
    ),
)

SCHEMAS = {"PyTorchJob": PYTORCHJOB, "JobSet": JOBSET}
