"""The Kubernetes objects of a run file, checked against the API's schemas without a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.errors import ConfigError
from example_trainer.cluster.manifests import PART_LABEL, RUN_LABEL, WAIT, render_manifests
from example_trainer.cluster.run_file import RunFile, read_run_file
from tests.cluster.fake_kubelet import expand
from tests.cluster.fake_kubernetes import validate
from tests.trainer.scripted_vllm import ScriptedVllm

EXAMPLE = Path(__file__).parents[2] / "example_trainer/cluster/examples/kubernetes.yaml"
KUBERNETES = {"image": "registry.example/atropos:1", "namespace": "rl"}


def a_run(**sections: Any) -> RunFile:
    content = {
        "name": "run",
        "engines": [{"kind": "torch", "count": 2}],
        "environments": [{"program": "environments/gsm8k_server.py", "count": 2}],
        "trainer": {"model": "/models/tiny", "steps": 3, "cpus": 2, "memory_gib": 1.5},
        "kubernetes": KUBERNETES,
        **sections,
    }
    return RunFile.model_validate(content)


def objects_of(run: RunFile) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects by kind and name, each checked by the schemas."""
    found = {}
    for name, text in render_manifests(run).items():
        if name != "kustomization.yaml":
            for thing in yaml.safe_load_all(text):
                validate(thing)
                found[thing["kind"], thing["metadata"]["name"]] = thing
    return found


def pod_of(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


VARIANTS: dict[str, dict[str, Any]] = {
    "sqlite": {},
    "redis": {"service": {"store": "redis", "redis_url": "redis://redis:6379/0", "replicas": 3}},
    "tokens": {
        "service": {"token_file": "/etc/tokens/tokens", "tokens": {"trainer": "TRAINER"}},
        "kubernetes": {**KUBERNETES, "token_secret": "tokens"},  # pragma: allowlist secret
    },
    "nodes": {"trainer": {"model": "m", "steps": 3, "gpus": 8, "nodes": 4}},
    "workspaces": {"kubernetes": {**KUBERNETES, "workspaces": True, "volume_claim": "mine"}},
    "urls": {"engines": [{"kind": "url", "urls": ["http://engine:8000"]}]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_objects_of_every_variant_are_valid_and_labelled(variant: str) -> None:
    run = a_run(**VARIANTS[variant])

    objects = objects_of(run)

    assert {thing["metadata"]["labels"][RUN_LABEL] for thing in objects.values()} == {"run"}
    for (kind, _), thing in objects.items():
        if kind in ("Deployment", "StatefulSet", "Job"):
            pod = pod_of(thing)
            assert pod["securityContext"]["runAsNonRoot"] is True
            for container in [*pod["containers"], *pod.get("initContainers", [])]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_example_is_valid() -> None:
    objects = objects_of(read_run_file(EXAMPLE))

    engines = [name for kind, name in objects if kind == "Deployment" and "engine" in name]
    assert len(engines) == 4
    container = pod_of(objects["Deployment", engines[0]])["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_files_are_a_kustomize_base(tmp_path: Path) -> None:
    for name, text in render_manifests(a_run(**VARIANTS["workspaces"])).items():
        (tmp_path / name).write_text(text)

    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert {thing["metadata"]["namespace"] for thing in built} == {"rl"}


def test_service_keeps_its_journal_on_a_volume_of_its_own() -> None:
    service = objects_of(a_run())["StatefulSet", "run-service"]

    mounts = {m["name"]: m["mountPath"] for m in pod_of(service)["containers"][0]["volumeMounts"]}
    assert mounts["journal"] == "/var/lib/atropos/service"
    assert "output" not in mounts
    assert service["spec"]["volumeClaimTemplates"][0]["metadata"]["name"] == "journal"


def test_replicas_of_the_service_share_redis_and_one_name() -> None:
    objects = objects_of(a_run(**VARIANTS["redis"]))

    service = objects["Deployment", "run-service"]
    assert service["spec"]["replicas"] == 3
    assert objects["PodDisruptionBudget", "run-service"]["spec"]["minAvailable"] == 2
    assert "redis://redis:6379/0" in pod_of(service)["containers"][0]["command"]


def test_tokens_are_named_and_never_written() -> None:
    objects = objects_of(a_run(**VARIANTS["tokens"]))

    trainer = pod_of(objects["Job", "run-trainer"])["containers"][0]
    token = next(each for each in trainer["env"] if each["name"] == "ATROPOS_API_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "tokens", "key": "TRAINER"}}
    volumes = pod_of(objects["StatefulSet", "run-service"])["volumes"]
    secret = next(each["secret"] for each in volumes if each["name"] == "tokens")
    assert secret["items"] == [{"key": "tokens", "path": "tokens"}]


def test_trainer_is_a_job_that_ignores_disruptions_and_stops_at_invalid_settings() -> None:
    job = objects_of(a_run(restarts={"attempts": 3}))["Job", "run-trainer"]

    assert job["spec"]["backoffLimit"] == 3
    rules = {rule["action"]: rule for rule in job["spec"]["podFailurePolicy"]["rules"]}
    assert rules["Ignore"]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules["FailJob"]["onExitCodes"]["values"] == [2]
    limits = pod_of(job)["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "2", "memory": "1536Mi"}


def test_nodes_of_the_trainer_find_the_first_by_name() -> None:
    objects = objects_of(a_run(**VARIANTS["nodes"]))

    job, service = objects["Job", "run-trainer"], objects["Service", "run-trainer"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    assert service["spec"]["clusterIP"] == "None"
    assert pod_of(job)["subdomain"] == "run-trainer"
    words = " ".join(pod_of(job)["containers"][0]["command"])
    assert "--rdzv-endpoint=run-trainer-0.run-trainer:29500" in words


def test_parts_reach_each_other_by_the_names_of_services() -> None:
    objects = objects_of(a_run())

    trainer = pod_of(objects["Job", "run-trainer"])
    words = " ".join(trainer["containers"][0]["command"])
    assert "--engine-urls http://run-engine-0:9000 http://run-engine-1:9000" in words
    assert "--atropos-url=http://run-service:8000" in words
    assert trainer["initContainers"][0]["command"][3:] == [
        "http://run-service:8000/health/ready",
        "http://run-engine-0:9000/health",
        "http://run-engine-1:9000/health",
    ]
    for name in ("service", "engine-0", "engine-1"):
        selector = objects["Service", f"run-{name}"]["spec"]["selector"]
        assert selector[PART_LABEL] == name


def test_flags_and_variables_have_the_text_of_the_run_file_in_the_container() -> None:
    prompt = "Write $$x$$, not $(HOME) or $HOME."
    environment = {
        "program": "environments/gsm8k_server.py",
        "flags": {"env.system_prompt": prompt},
        "variables": {"PROMPT": prompt},
    }

    objects = objects_of(a_run(environments=[environment]))

    container = pod_of(objects["Deployment", "run-environment-gsm8k-server"])["containers"][0]
    given = {each["name"]: expand(each["value"], {}) for each in container["env"]}
    words = [expand(word, given) for word in container["command"]]
    assert f"--env.system_prompt={prompt}" in words
    assert given["PROMPT"] == prompt


def test_servers_have_probes_of_their_own_routes() -> None:
    objects = objects_of(a_run())

    service = pod_of(objects["StatefulSet", "run-service"])["containers"][0]
    engine = pod_of(objects["Deployment", "run-engine-0"])["containers"][0]
    assert service["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert service["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert engine["startupProbe"]["httpGet"]["path"] == "/health"


def test_environments_may_make_jobs_only_where_the_run_file_says_so() -> None:
    without = objects_of(a_run())
    objects = objects_of(a_run(**VARIANTS["workspaces"]))

    assert ("ServiceAccount", "run-workspaces") not in without
    pods = {name: pod_of(thing) for (kind, name), thing in objects.items() if kind == "Deployment"}
    accounts = {name: pod.get("serviceAccountName") for name, pod in pods.items()}
    assert accounts["run-environment-gsm8k-server-0"] == "run-workspaces"
    assert accounts["run-engine-0"] is None
    assert ("PersistentVolumeClaim", "run-output") not in objects


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"kubernetes": {}}, "kubernetes.image: expected"),
        ({"service": {"tokens": {"trainer": "T"}}}, "kubernetes.token_secret: expected"),
        (
            {"name": "r" * 40, "environments": [{"program": "p.py", "name": "e" * 38}]},
            "choose a shorter name",
        ),
    ],
)
def test_run_that_cannot_work_names_the_key(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render_manifests(a_run(**sections))


def test_waiting_for_an_address_uses_no_proxy(free_port: int) -> None:
    dead = f"http://127.0.0.1:{free_port}"
    with ScriptedVllm() as engine:
        done = subprocess.run(
            [sys.executable, "-c", WAIT, f"http://127.0.0.1:{engine.port}/health"],
            env={**os.environ, "http_proxy": dead, "HTTP_PROXY": dead},
            timeout=60,
            check=False,
        )

    assert done.returncode == 0
