"""The Kubernetes objects of a run file, as a kustomize base; pure.

    service      StatefulSet with a volume for its journal, or a Deployment on Redis; Service
    engines      one Deployment and Service each, so that the trainer reaches every one by name
    environments one Deployment each
    trainer      Job; each failure makes a new pod, which resumes from the checkpoints
    all          ConfigMap of settings, claim of the output folder, disruption budgets

Every object carries the label `atropos/run`. Secrets are named and never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from atroposlib.errors import ConfigError
from example_trainer.cluster.parts import (
    RENDEZVOUS_PORT,
    Addresses,
    Part,
    engine_names,
    environment_names,
    plan_parts,
    service_names,
)
from example_trainer.cluster.restarts import INVALID_SETTINGS
from example_trainer.cluster.run_file import RunFile

RUN_LABEL = "atropos/run"
PART_LABEL = "atropos/part"
ROLE_LABEL = "atropos/role"
OUTPUT = Path("/var/lib/atropos")
SETTINGS = Path("/etc/atropos/settings")
TRAINER = "trainer"
SERVICE_PORT = 8000
ENGINE_PORT = 9000
MAX_NAME = 63
PROBE_S = 10
WAIT = """\
import sys, time, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for url in sys.argv[1:]:
    print("waiting for", url, flush=True)
    while True:
        try:
            direct.open(url, timeout=5).close()
            break
        except OSError:
            time.sleep(1)
"""
"""Program that ends once all addresses answer."""
RESTORE = f"""\
{WAIT}
from pathlib import Path
from example_trainer.cluster.local import restore_engine
restore_engine(sys.argv[1].removesuffix("/health"), Path({str(OUTPUT)!r}))
"""
"""Program that gives an engine which was started again the newest weights."""

# A manifest is parsed JSON.
Manifest = dict[str, Any]


def render_manifests(run: RunFile) -> dict[str, str]:
    """Return the files of a kustomize base by name.

    Raises:
        ConfigError: The run cannot be run on Kubernetes; names the key of the run file.
    """
    _check(run)
    parts = plan_parts(run, cluster_addresses(run))
    urls = {part.name: part.ready_url for part in parts if part.ready_url is not None}
    files = {
        "settings.yaml": [_settings(run, parts)],
        "storage.yaml": [] if run.kubernetes.volume_claim else [_output_claim(run)],
        "service.yaml": _service(run, [part for part in parts if part.role == "service"]),
        "engines.yaml": _of_role(run, parts, "engine", urls),
        "environments.yaml": _of_role(run, parts, "environment", urls),
        "trainer.yaml": _trainer(run, parts[-1], urls),
        "disruption.yaml": _budgets(run),
        "workspaces.yaml": _workspaces(run) if run.kubernetes.workspaces else [],
    }
    texts = {name: _dump(manifests) for name, manifests in files.items() if manifests}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": run.kubernetes.namespace,
        "labels": [{"pairs": {RUN_LABEL: run.name}, "includeSelectors": False}],
        "resources": list(texts),
    }
    return {"kustomization.yaml": _dump([kustomization]), **texts}


def cluster_addresses(run: RunFile) -> Addresses:
    """Return the addresses of the parts: names of Services."""
    services, engines = service_names(run), engine_names(run)
    trainer = _name(run, TRAINER)
    return Addresses(
        hosts={
            # All replicas of the service are one Service.
            **dict.fromkeys(services, _name(run, "service")),
            **{name: _name(run, name) for name in engines},
            TRAINER: f"{trainer}-0.{trainer}" if run.trainer.nodes > 1 else trainer,
        },
        ports={
            **dict.fromkeys(services, run.service.port or SERVICE_PORT),
            **dict.fromkeys(engines, ENGINE_PORT),
        },
        output=OUTPUT,
        settings=SETTINGS,
        bind="0.0.0.0",
    )


def _check(run: RunFile) -> None:
    place = run.kubernetes
    if not place.image:
        raise ConfigError("kubernetes.image: expected the image of the parts, with this package")
    needs_secret = bool(run.secret_names or run.service.token_file)
    if needs_secret and place.token_secret is None:
        raise ConfigError(
            "kubernetes.token_secret: expected the name of the Secret with the keys of "
            "service.tokens, of ${NAME} and the file of service.token_file; make it with kubectl "
            "create secret"
        )
    names = [*service_names(run), *engine_names(run), *environment_names(run)]
    longest = max(names, key=len)
    if len(_name(run, longest)) > MAX_NAME - 2:
        raise ConfigError(
            f"name: {_name(run, longest)} has {len(_name(run, longest))} characters and names of "
            f"Kubernetes at most {MAX_NAME - 2}; choose a shorter name of the run or part"
        )


def _name(run: RunFile, part: str) -> str:
    return f"{run.name}-{part}"


def _labels(run: RunFile, part: str, role: str) -> dict[str, str]:
    return {RUN_LABEL: run.name, PART_LABEL: part, ROLE_LABEL: role}


def _object(run: RunFile, version: str, kind: str, name: str, spec: Mapping[str, Any]) -> Manifest:
    labels = {RUN_LABEL: run.name}
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **spec}


def _workload(
    run: RunFile, version: str, kind: str, part: Part, spec: Mapping[str, Any], name: str = ""
) -> Manifest:
    name = name or part.name
    made = _object(run, version, kind, _name(run, name), {"spec": dict(spec)})
    made["metadata"]["labels"] = _labels(run, name, part.role)
    return made


class ManifestDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


ManifestDumper.add_representer(str, _as_text)


def _dump(manifests: Sequence[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=ManifestDumper, sort_keys=False, width=100)


def _settings(run: RunFile, parts: Iterable[Part]) -> Manifest:
    files = {name: text for part in parts for name, text in part.files.items()}
    return _object(run, "v1", "ConfigMap", _name(run, "settings"), {"data": files})


def _claim_spec(run: RunFile, gib: int, access: str) -> Manifest:
    spec: Manifest = {
        "accessModes": [access],
        "resources": {"requests": {"storage": f"{gib}Gi"}},
    }
    if run.kubernetes.storage_class is not None:
        spec["storageClassName"] = run.kubernetes.storage_class
    return spec


def _output_claim(run: RunFile) -> Manifest:
    spec = _claim_spec(run, run.kubernetes.storage_gib, run.kubernetes.access_mode)
    return _object(run, "v1", "PersistentVolumeClaim", _name(run, "output"), {"spec": spec})


def _service(run: RunFile, parts: Sequence[Part]) -> list[Manifest]:
    """Return the service: one that keeps its journal on a volume, or replicas that share Redis."""
    part = parts[0]
    selector = {"matchLabels": _labels(run, "service", "service")}
    template = _template(run, part, name="service")
    common: Manifest = {"replicas": len(parts), "selector": selector, "template": template}
    network = _network_service(run, "service", part)
    if run.service.store == "redis":
        return [_workload(run, "apps/v1", "Deployment", part, common, "service"), network]
    folder = str(run.service.data_dir or OUTPUT / "service")
    container = template["spec"]["containers"][0]
    container["volumeMounts"] = [
        *(each for each in container["volumeMounts"] if each["name"] != "output"),
        {"name": "journal", "mountPath": folder},
    ]
    template["spec"]["volumes"] = [
        each for each in template["spec"]["volumes"] if each["name"] != "output"
    ]
    claim = _object(
        run,
        *("v1", "PersistentVolumeClaim", "journal"),
        {"spec": _claim_spec(run, run.kubernetes.journal_gib, "ReadWriteOnce")},
    )
    stateful = {
        **{"serviceName": _name(run, "service"), **common},
        "volumeClaimTemplates": [{"metadata": claim["metadata"], "spec": claim["spec"]}],
    }
    return [_workload(run, "apps/v1", "StatefulSet", part, stateful, "service"), network]


def _of_role(
    run: RunFile, parts: Iterable[Part], role: str, urls: Mapping[str, str]
) -> list[Manifest]:
    """Return a Deployment of one pod for each part, and a Service where it listens."""
    made = []
    for part in parts:
        if part.role != role:
            continue
        spec = {
            "replicas": 1,
            # Two pods of one part at a time would need twice the GPUs.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": _labels(run, part.name, part.role)},
            "template": _template(run, part, wait_for=_urls(part, urls)),
        }
        made.append(_workload(run, "apps/v1", "Deployment", part, spec))
        if part.port is not None:
            made.append(_network_service(run, part.name, part))
    return made


def _urls(part: Part, urls: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(urls[name] for name in part.after))


def _trainer(run: RunFile, part: Part, urls: Mapping[str, str]) -> list[Manifest]:
    """Return the Job of the trainer, with a name for the first of several nodes."""
    template = _template(run, part, wait_for=_urls(part, urls))
    template["spec"]["restartPolicy"] = "Never"
    nodes = run.trainer.nodes
    rules = [
        # A preempted pod is not a failure of the trainer.
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {
            "action": "FailJob",
            "onExitCodes": {
                **{"containerName": TRAINER, "operator": "In", "values": [INVALID_SETTINGS]}
            },
        },
    ]
    spec: Manifest = {
        "backoffLimit": part.restarts.attempts * nodes,
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }
    if nodes == 1:
        return [_workload(run, "batch/v1", "Job", part, spec)]
    template["spec"]["subdomain"] = _name(run, TRAINER)
    spec |= {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}
    ports = [{"name": "rendezvous", "port": RENDEZVOUS_PORT}]
    headless = {
        **{"clusterIP": "None", "publishNotReadyAddresses": True, "ports": ports},
        "selector": _labels(run, TRAINER, TRAINER),
    }
    return [
        _workload(run, "batch/v1", "Job", part, spec),
        _object(run, "v1", "Service", _name(run, TRAINER), {"spec": headless}),
    ]


def _network_service(run: RunFile, name: str, part: Part) -> Manifest:
    spec = {
        "selector": _labels(run, name, part.role),
        "ports": [{"name": "http", "port": part.port, "targetPort": "http"}],
    }
    return _object(run, "v1", "Service", _name(run, name), {"spec": spec})


def _template(
    run: RunFile, part: Part, *, name: str = "", wait_for: Sequence[str] = ()
) -> Manifest:
    """Return the pod of a part: not root, no privileges, a root file system it cannot change."""
    place = run.kubernetes
    own = [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    claim = place.volume_claim or _name(run, "output")
    volumes: list[Manifest] = [
        *own,
        {"name": "output", "persistentVolumeClaim": {"claimName": claim}},
    ]
    if part.files:
        volumes.append({"name": "settings", "configMap": {"name": _name(run, "settings")}})
    if part.role == "service" and run.service.token_file is not None:
        volumes.append(_token_volume(run))
    container = _container(run, part, name or part.name)
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": place.grace_s,
        "securityContext": {
            **{"runAsNonRoot": True, "runAsUser": place.run_as_user},
            **{"runAsGroup": place.run_as_user, "fsGroup": place.run_as_user},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    if wait_for:
        keys = ("image", "securityContext")
        waiting = {"name": "wait", "command": ["python", "-c", WAIT, *wait_for]}
        limits = {"resources": {"limits": {"cpu": "1", "memory": "256Mi"}}}
        spec["initContainers"] = [{**waiting, **{key: container[key] for key in keys}, **limits}]
    if part.role == "environment" and place.workspaces:
        spec |= {"automountServiceAccountToken": True}
        spec |= {"serviceAccountName": _name(run, "workspaces")}
    if place.pull_secret is not None:
        spec["imagePullSecrets"] = [{"name": place.pull_secret}]
    if place.node_selector:
        spec["nodeSelector"] = dict(place.node_selector)
    return {"metadata": {"labels": _labels(run, name or part.name, part.role)}, "spec": spec}


def _container(run: RunFile, part: Part, name: str) -> Manifest:
    mounts: list[Manifest] = [
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "output", "mountPath": str(OUTPUT)},
    ]
    if part.files:
        mounts.append({"name": "settings", "mountPath": str(SETTINGS), "readOnly": True})
    if part.role == "service" and run.service.token_file is not None:
        folder = str(run.service.token_file.parent)
        mounts.append({"name": "tokens", "mountPath": folder, "readOnly": True})
    made: Manifest = {
        **{"name": part.role if part.role == "service" else name, "image": run.kubernetes.image},
        "command": list(map(_literal, part.command)),
        "env": _variables(run, part),
        **_resources(part),
        "securityContext": {
            **{"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    if part.port is not None:
        made["ports"] = [{"name": "http", "containerPort": part.port}]
        made |= _probes(run, part)
    if part.role == "engine":
        # The pod is not ready before it ends.
        restore = ["python", "-c", RESTORE, f"http://localhost:{part.port}/health"]
        made["lifecycle"] = {"postStart": {"exec": {"command": restore}}}
    return made


def _token_volume(run: RunFile) -> Manifest:
    assert run.service.token_file is not None
    key = run.service.token_file.name
    secret = {"secretName": run.kubernetes.token_secret, "items": [{"key": key, "path": key}]}
    return {"name": "tokens", "secret": {**secret, "defaultMode": 0o440}}


def _variables(run: RunFile, part: Part) -> list[Manifest]:
    # Caches of libraries, which the home folder of the image cannot take.
    values = {"HOME": "/tmp", **part.variables}
    found: list[Manifest] = [
        {"name": name, "value": _literal(value)} for name, value in values.items()
    ]
    for name, key in part.secrets.items():
        source = {"secretKeyRef": {"name": run.kubernetes.token_secret, "key": key}}
        found.append({"name": name, "valueFrom": source})
    return found


def _literal(text: str) -> str:
    """Return a word of a command, or a value, in which Kubernetes replaces no `$(NAME)` or `$$`."""
    return text.replace("$", "$$")


def _resources(part: Part) -> Manifest:
    asked = part.resources
    limits: dict[str, str] = {}
    if asked.cpus is not None:
        limits["cpu"] = f"{asked.cpus:g}"
    if asked.memory_gib is not None:
        limits["memory"] = f"{round(asked.memory_gib * 1024)}Mi"
    if asked.gpus:
        limits["nvidia.com/gpu"] = str(asked.gpus)
    return {"resources": {"requests": limits, "limits": limits}} if limits else {}


def _probes(run: RunFile, part: Part) -> Manifest:
    """Return the probes of a server: of its start, of its life, and of its readiness."""
    paths = ("/health/live", "/health/ready") if part.role == "service" else ("/health", "/health")

    def probe(path: str, failures: int) -> Manifest:
        get = {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": PROBE_S}
        return {**get, "periodSeconds": PROBE_S, "failureThreshold": failures}

    starting = max(1, round(run.start_limit_s / PROBE_S))
    return {
        "startupProbe": {**probe(paths[0], starting * PROBE_S), "periodSeconds": 1},
        # A long pause, such as an update of weights, does not call for a restart.
        "livenessProbe": probe(paths[0], 12),
        "readinessProbe": {**probe(paths[1], 3), "periodSeconds": 5},
    }


def _budgets(run: RunFile) -> list[Manifest]:
    """Return the disruption budgets: no drain ends the service or the trainer, or two engines."""
    limits = {
        "service": {"minAvailable": max(1, run.service.replicas - 1)},
        "engine": {"maxUnavailable": 1},
        "environment": {"maxUnavailable": 1},
        TRAINER: {"minAvailable": run.trainer.nodes},
    }
    if not engine_names(run):
        del limits["engine"]
    return [
        _object(
            run,
            *("policy/v1", "PodDisruptionBudget", _name(run, role)),
            {
                "spec": {
                    **limit,
                    "selector": {"matchLabels": {RUN_LABEL: run.name, ROLE_LABEL: role}},
                }
            },
        )
        for role, limit in limits.items()
    ]


def _workspaces(run: RunFile) -> list[Manifest]:
    """Return the account with which environments make Jobs of workspaces, and its rights."""
    name = _name(run, "workspaces")
    every = ["create", "delete", "get", "list", "patch", "watch"]
    rules = [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": every},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": every},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": every},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {
            **{"apiGroups": [""], "resources": ["pods/exec", "pods/attach"]},
            "verbs": ["create", "get"],
        },
    ]
    rbac = "rbac.authorization.k8s.io"
    account = {"kind": "ServiceAccount", "name": name, "namespace": run.kubernetes.namespace}
    role = {"apiGroup": rbac, "kind": "Role", "name": name}
    return [
        _object(run, "v1", "ServiceAccount", name, {}),
        _object(run, f"{rbac}/v1", "Role", name, {"rules": rules}),
        _object(run, f"{rbac}/v1", "RoleBinding", name, {"roleRef": role, "subjects": [account]}),
    ]
