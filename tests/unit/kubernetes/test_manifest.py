# SPDX-License-Identifier: Apache-2.0
"""Manifests, compared with whole files, validated, and read as Kubernetes and the operators read them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpilot.cli.run_command import read_options, split_words
from ddpilot.kubernetes.manifest import render_manifest
from ddpilot.kubernetes.options import KubernetesOptions
from tests.unit.kubernetes.manifests import GOLDEN, IMAGE, OPTIONS, WORDS, render
from tests.unit.kubernetes.published import read_schema
from tests.unit.kubernetes.schemas import SCHEMAS

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

CRDS = os.environ.get("DDPILOT_CRDS", "")


def read(text: str) -> Any:
    """The values of a manifest."""
    return yaml.safe_load(text)


def pods(manifest: Any) -> list[Any]:
    """The spec of each node's pod, by the node's rank."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        job = spec["replicatedJobs"][0]["template"]["spec"]
        return [job["template"]["spec"]] * job["completions"]
    replicas = [
        spec["pytorchReplicaSpecs"][name] for name in ("Master", "Worker") if name in spec["pytorchReplicaSpecs"]
    ]
    return [each["template"]["spec"] for each in replicas for _ in range(each["replicas"])]


def set_by_operator(manifest: Any, node_rank: int) -> dict[str, str]:
    """The variables of a container that are not in the manifest: of envvar.go and master.go, and of indexed jobs."""
    if manifest["kind"] == "JobSet":
        return {"JOB_COMPLETION_INDEX": str(node_rank)}
    num_nodes, nproc = len(pods(manifest)), manifest["spec"]["nprocPerNode"]
    master = {"MASTER_ADDR": f"{manifest['metadata']['name']}-master-0", "MASTER_PORT": "23456"}
    return {
        "PYTHONUNBUFFERED": "1",
        **master,
        **{f"PET_{name}": value for name, value in master.items()},
        "WORLD_SIZE": str(num_nodes * int(nproc)),
        "RANK": str(node_rank),
        "PET_NODE_RANK": str(node_rank),
        "PET_NPROC_PER_NODE": nproc,
        "PET_NNODES": str(num_nodes),
    }


def expand(text: str, environ: Mapping[str, str]) -> str:
    """`text` as a kubelet gives it to the process: $(NAME) and $$ replaced, an unknown $(NAME) left."""
    return re.sub(r"\$(?:(\$)|\(([^)]*)\))", lambda found: "$" if found[1] else environ.get(found[2], found[0]), text)


def command_of(manifest: Any, node_rank: int) -> list[str]:
    """The words that the process of a node gets."""
    environ = set_by_operator(manifest, node_rank)
    return [expand(word, environ) for word in pods(manifest)[node_rank]["containers"][0]["command"]]


def strict(schema: Any) -> Any:
    """A schema of Kubernetes that refuses fields it does not know, which a cluster would drop."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {name: strict(value) for name, value in schema.items()}
    return {"additionalProperties": False, **copy} if isinstance(schema.get("properties"), dict) else copy


@pytest.mark.parametrize("name", OPTIONS)
def test_manifest_is_as_kept(name: str) -> None:
    """If it is meant to differ, `python -m tests.unit.kubernetes.manifests` writes the files again."""
    assert render(name) == (GOLDEN / f"{name}.yaml").read_text()


def test_every_kept_manifest_is_compared() -> None:
    """No file is left of options that are gone."""
    assert {path.stem for path in GOLDEN.iterdir()} == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_manifest_has_only_fields_that_its_kind_has(name: str) -> None:
    """Names, types and required fields are those of schemas.py."""
    manifest = read(render(name))
    assert not list(jsonschema.Draft202012Validator(SCHEMAS[manifest["kind"]]).iter_errors(manifest))


@pytest.mark.parametrize("name", OPTIONS)
def test_manifest_is_valid_by_the_published_schemas(name: str) -> None:
    """Those of the projects' own packages, which know every field of a pod; a field that is misspelled is refused."""
    manifest = read(render(name))
    validator = jsonschema.Draft202012Validator(read_schema(manifest["kind"]))
    validator.validate(manifest)
    container = pods(manifest)[0]["containers"][0]
    container["volumeMount"] = container.get("volumeMounts", [])
    assert not validator.is_valid(manifest)
    del container["volumeMount"]
    container["command"].append(90)
    assert not validator.is_valid(manifest)


@pytest.mark.skipif(not CRDS, reason="DDPILOT_CRDS names no folder with the published definitions (see schemas.py)")
@pytest.mark.parametrize("name", OPTIONS)
def test_manifest_is_valid_by_the_published_definitions(name: str) -> None:
    """The definitions that a cluster installs, which refuse unknown fields here too."""
    manifest = read(render(name))
    group, version = manifest["apiVersion"].split("/")
    crd = read((Path(CRDS) / f"{group}_{manifest['kind'].lower()}s.yaml").read_text())
    schema = next(each for each in crd["spec"]["versions"] if each["name"] == version)["schema"]["openAPIV3Schema"]
    validator = jsonschema.Draft202012Validator(strict(schema))
    validator.validate(manifest)
    pods(manifest)[0]["containers"][0]["volumeMount"] = []
    assert not validator.is_valid(manifest)


@pytest.mark.parametrize("change", ["unknown", "missing", "type"])
def test_schema_refuses_a_wrong_manifest(change: str) -> None:
    """The check above is not empty."""
    manifest = read(render("pytorchjob"))
    container = pods(manifest)[0]["containers"][0]
    if change == "unknown":
        container["volumeMount"] = []
    elif change == "missing":
        del container["image"]
    else:
        container["command"].append(90)
    assert not jsonschema.Draft202012Validator(SCHEMAS["PyTorchJob"]).is_valid(manifest)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_node_gets_its_rank_the_meeting_point_and_the_words_of_the_script(name: str) -> None:
    """The command, with the variables of the operators filled in as a kubelet does it."""
    options, manifest = KubernetesOptions(image=IMAGE, **OPTIONS[name]), read(render(name))
    for node_rank in range(options.nodes):
        command = command_of(manifest, node_rank)
        assert command[-len(WORDS[1]) - 1 :] == [WORDS[0], *WORDS[1]]
        assert f"--nproc-per-node={options.num_ranks_per_node}" in command
        if options.nodes == 1:
            assert "--standalone" in command
            continue
        job = manifest["metadata"]["name"]
        master = f"{job}-node-0-0.{job}" if options.kind == "jobset" else f"{job}-master-0"
        assert {f"--nnodes={options.nodes}", f"--node-rank={node_rank}", f"--master-addr={master}"} <= set(command)


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_ddpilot_run_reads_the_command_of_a_node(kind: Any, nodes: int) -> None:
    """Also with the PET_ variables that the training operator sets for torchrun."""
    options = KubernetesOptions(image=IMAGE, kind=kind, nodes=nodes, nproc_per_node=2, launcher="ddpilot")
    manifest = read(render_manifest(options, *WORDS))
    node_rank = nodes - 1
    command = command_of(manifest, node_rank)
    assert command[:4] == ["python", "-m", "ddpilot", "run"]
    run, _ = read_options(split_words(command[4:]), set_by_operator(manifest, node_rank))
    assert (run.nnodes, run.nproc_per_node, run.node_rank) == ((nodes, nodes), 2, node_rank)
    assert (run.target, run.args) == WORDS
    if nodes > 1:
        wanted = {"pytorchjob": ("train-master-0", 23456), "jobset": ("train-node-0-0.train", 29500)}
        assert (run.master_addr, run.master_port) == wanted[kind]
        assert run.is_static


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_restarts_are_counted_as_the_operator_counts_them(kind: Any) -> None:
    """The training operator adds up the restarts of all containers, and fails the job when it reaches the limit."""
    spec = read(render_manifest(KubernetesOptions(image=IMAGE, kind=kind, nodes=4, max_restarts=3), "train.py"))["spec"]
    if kind == "jobset":
        assert spec["failurePolicy"] == {"maxRestarts": 3}
        return
    assert spec["runPolicy"]["backoffLimit"] == 3 * 4 + 1
    assert {each["restartPolicy"] for each in spec["pytorchReplicaSpecs"].values()} == {"OnFailure"}


@pytest.mark.parametrize(
    ("target", "name"),
    [("pkg/Train_2.py", "train-2"), ("3d.py", "d"), ("_.py", "job"), ("on.py", "on"), (f"{'a' * 90}.py", "a" * 54)],
)
def test_job_is_named_after_the_script(target: str, name: str) -> None:
    """As Kubernetes wants names: short, in lower case, and beginning with a letter."""
    manifest = read(render_manifest(KubernetesOptions(image=IMAGE), target))
    assert manifest["metadata"]["name"] == name


def test_module_is_run_by_name() -> None:
    """As `python -m` does."""
    manifest = read(render_manifest(KubernetesOptions(image=IMAGE), "package.train", ["--epochs", "1"], module=True))
    assert command_of(manifest, 0)[-4:] == ["-m", "package.train", "--epochs", "1"]


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
@settings(max_examples=60, deadline=None, database=None)
def test_any_argument_and_value_arrives_as_it_was_given(text: str) -> None:
    """Through YAML and the variables of Kubernetes."""
    line = re.sub(r"[\n\r]", " ", text)
    options = KubernetesOptions(image=IMAGE, nodes=2, env={"TEXT": line}, extra={"nodeSelector": {"label": text}})
    manifest = read(render_manifest(options, "train.py", [text]))
    assert command_of(manifest, 1)[-1] == text
    pod = pods(manifest)[1]
    assert expand(pod["containers"][0]["env"][0]["value"], {}) == line
    assert pod["nodeSelector"] == {"label": text}


@pytest.mark.parametrize(
    "text", ["no", "NULL", "1e3", "0x1f", "1:30", "a: b", "a:", "- a", "#a", "*a", "~", "", " a", "=", "--- a"]
)
def test_text_that_yaml_would_read_as_something_else_stays_text(text: str) -> None:
    """For readers of YAML 1.1 and 1.2."""
    assert read(render_manifest(KubernetesOptions(image=IMAGE), "train.py", [text])) is not None
    assert command_of(read(render_manifest(KubernetesOptions(image=IMAGE), "train.py", [text])), 0)[-1] == text


def test_page_shows_the_manifest_as_it_is() -> None:
    """docs/how_to/kubernetes.md has the manifest of its first command."""
    page = (Path(__file__).parents[3] / "docs" / "how_to" / "kubernetes.md").read_text()
    shown = re.search(r"```yaml\n(# train.py.*?)```", page, re.DOTALL)
    assert shown is not None
    options = KubernetesOptions(
        image="registry.example.org/train:1", nodes=2, gpus_per_node=4, volumes=("results:/results",)
    )
    assert shown[1] == render_manifest(options, "train.py", ["--epochs", "90"])
