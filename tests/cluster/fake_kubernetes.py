"""A Kubernetes API server in this process, whose pods are local processes (`fake_kubelet`).

    kubectl ─► HTTP: discovery, create, apply, get, list, watch, delete ─► ObjectStore ─► Cluster
            ─► WebSocket: exec, attach

Objects are checked against the API's own schemas (`kubernetes_schemas.json`: a subset of version
1.31, without unknown fields). Writes have resource versions and conflicts, lists have label
selectors, watches resume from a resource version, and `refuse` answers requests with 429.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml
from aiohttp import WSMsgType, web

from tests.cluster.fake_kubelet import Cluster, Container

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())
MAX_EVENTS = 10_000
MIN_KUBECTL = (1, 31)


class ApiResource(NamedTuple):
    """A kind of object and its place in the API."""

    plural: str
    group_version: str
    kind: str


RESOURCES = [
    ApiResource(plural, group_version, kind)
    for group_version, kinds in {
        "v1": "Pod Service ConfigMap Secret PersistentVolumeClaim ServiceAccount",
        "apps/v1": "Deployment StatefulSet",
        "batch/v1": "Job",
        "policy/v1": "PodDisruptionBudget",
        "networking.k8s.io/v1": "NetworkPolicy",
        "coordination.k8s.io/v1": "Lease",
        "rbac.authorization.k8s.io/v1": "Role RoleBinding",
    }.items()
    for kind in kinds.split()
    for plural in [kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")]
]
GROUPS = sorted({each.group_version for each in RESOURCES})


class ApiError(Exception):
    """An answer that is not 2xx."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body = {
            **{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"},
            **{"message": message, "reason": reason, "code": code},
        }


def validate(thing: Mapping[str, Any]) -> None:
    """Raise `ApiError` for an object that the schemas reject."""
    kind = f"{thing.get('apiVersion')}/{thing.get('kind')}"
    if kind not in SCHEMAS["kinds"]:
        raise ApiError(404, "NotFound", f"the server has no {kind}")
    reference = {"$ref": f"#/definitions/{SCHEMAS['kinds'][kind]}"}
    checker = jsonschema.Draft7Validator({**reference, "definitions": SCHEMAS["definitions"]})
    for error in checker.iter_errors(thing):
        place = ".".join(map(str, error.absolute_path))
        raise ApiError(422, "Invalid", f"{kind} is invalid: {place}: {error.message[:300]}")


class ObjectStore:
    """All objects by kind, namespace and name, and the changes that watches follow."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.events: list[tuple[int, str, str, dict[str, Any]]] = []
        """Resource version, type, kind, object."""
        self.version = 1
        self.changed = asyncio.Event()

    def list(
        self, kind: str, namespace: str | None = None, selector: str = ""
    ) -> list[dict[str, Any]]:
        return [
            thing
            for (each, place, _), thing in sorted(self.objects.items())
            if each == kind and namespace in (None, place) and matches(thing, selector)
        ]

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        try:
            return self.objects[kind, namespace, name]
        except KeyError:
            raise ApiError(404, "NotFound", f'{kind.lower()}s "{name}" not found') from None

    def create(self, thing: dict[str, Any], namespace: str) -> dict[str, Any]:
        metadata = thing.setdefault("metadata", {})
        if "name" not in metadata:
            metadata["name"] = metadata.get("generateName", "") + uuid.uuid4().hex[:5]
        key = (thing["kind"], namespace, metadata["name"])
        if key in self.objects:
            raise ApiError(409, "AlreadyExists", f'{key[0]} "{key[2]}" already exists')
        metadata["namespace"] = namespace
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.objects[key] = thing
        return self.touch(thing, "ADDED")

    def replace(self, thing: dict[str, Any], namespace: str) -> dict[str, Any]:
        old = self.get(thing["kind"], namespace, thing["metadata"]["name"])
        given = thing["metadata"].get("resourceVersion")
        if given not in (None, "", old["metadata"]["resourceVersion"]):
            raise ApiError(409, "Conflict", "the object has been modified; read it again")
        for name in ("uid", "creationTimestamp", "namespace"):
            thing["metadata"][name] = old["metadata"][name]
        thing.setdefault("status", old.get("status", {}))
        self.objects[thing["kind"], namespace, thing["metadata"]["name"]] = thing
        return self.touch(thing, "MODIFIED")

    def touch(self, thing: dict[str, Any], event: str = "MODIFIED") -> dict[str, Any]:
        """Give an object a new resource version and report the change."""
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, event, thing["kind"], copy.deepcopy(thing)))
        del self.events[:-MAX_EVENTS]
        self.changed.set()
        self.changed = asyncio.Event()
        return thing

    def remove(self, thing: dict[str, Any]) -> None:
        metadata = thing["metadata"]
        if self.objects.pop((thing["kind"], metadata["namespace"], metadata["name"]), None):
            self.touch(thing, "DELETED")


def matches(thing: Mapping[str, Any], selector: str) -> bool:
    """Whether an object has the labels of a selector such as `a=b,c!=d,e`."""
    labels = thing["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        name, _, value = term.replace("==", "=").partition("=")
        if name.endswith("!"):
            if labels.get(name[:-1]) == value:
                return False
        elif name.startswith("!"):
            if name[1:] in labels:
                return False
        elif name not in labels or ("=" in term and labels[name] != value):
            return False
    return True


def merged(old: Any, new: Any) -> Any:
    """Apply a JSON merge patch."""
    if not isinstance(new, dict):
        return new
    result = dict(old) if isinstance(old, dict) else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


class FakeKubernetes:
    """The API server. `url` is known once it is entered."""

    def __init__(self, folder: Path, *, images: Mapping[str, Path] | None = None) -> None:
        self.store = ObjectStore()
        self.cluster = Cluster(self.store, folder, images=images or {})
        self.requests: list[tuple[str, str]] = []
        self.url = ""
        self._folder = folder
        self._refusals: list[Callable[[web.Request], bool]] = []

    def refuse(self, count: int, method: str = "") -> None:
        """Answer the next requests with 429."""
        self._refusals += [lambda request: method in ("", request.method)] * count

    def write_kubeconfig(self) -> Path:
        """Write the file for KUBECONFIG and return its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "kubeconfig"
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "fake"},
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
            "users": [{"name": "fake", "user": {}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    async def __aenter__(self) -> FakeKubernetes:
        app = web.Application(middlewares=[self._answer], client_max_size=2**24)
        app.router.add_route("*", "/{path:.*}", self._route)
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        await self.cluster.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cluster.stop()
        await self._runner.cleanup()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        for number, applies in enumerate(self._refusals):
            if applies(request):
                del self._refusals[number]
                return web.json_response(
                    ApiError(429, "TooManyRequests", "slow down").body,
                    status=429,
                    headers={"Retry-After": "1"},
                )
        try:
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.body, status=error.code)

    async def _route(self, request: web.Request) -> web.StreamResponse:
        words = request.path.strip("/").split("/")
        if words == ["version"]:
            return web.json_response({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
        if words[0] == "openapi":
            return web.json_response(openapi(words))
        if words == ["api"]:
            return web.json_response({"kind": "APIVersions", "versions": ["v1"]})
        if words == ["apis"]:
            return web.json_response(group_list())
        group_version = words[1] if words[0] == "api" else "/".join(words[1:3])
        rest = words[2:] if words[0] == "api" else words[3:]
        if not rest:
            return web.json_response(resource_list(group_version))
        namespace = None
        if rest[0] == "namespaces":
            if len(rest) == 2:
                return web.json_response(
                    {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": rest[1]}}
                )
            namespace, rest = rest[1], rest[2:]
        for each in RESOURCES:
            if (each.group_version, each.plural) == (group_version, rest[0]):
                return await self._resource(request, each, namespace, rest[1:])
        raise ApiError(404, "NotFound", f"no resource at {request.path}")

    async def _resource(
        self, request: web.Request, resource: ApiResource, namespace: str | None, rest: list[str]
    ) -> web.StreamResponse:
        if len(rest) == 2:
            return await self._subresource(request, namespace or "default", *rest)
        if not rest:
            return await self._collection(request, resource, namespace)
        place, name = namespace or "default", rest[0]
        if request.method == "GET":
            return web.json_response(self.store.get(resource.kind, place, name))
        if request.method == "DELETE":
            thing = self.store.get(resource.kind, place, name)
            self.cluster.delete(thing, await grace_of(request))
            return web.json_response({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        body = yaml.safe_load(await request.text())
        if request.method == "PUT":
            validate(body)
            return web.json_response(self.store.replace(body, place))
        return self._patch(request, resource, place, name, body)

    def _patch(
        self, request: web.Request, resource: ApiResource, place: str, name: str, body: Any
    ) -> web.StreamResponse:
        is_apply = request.content_type == "application/apply-patch+yaml"
        dry = "dryRun" in request.query
        try:
            old = self.store.get(resource.kind, place, name)
        except ApiError:
            if not is_apply:
                raise
            validate(body)
            made = body if dry else self.store.create(body, place)
            return web.json_response(made, status=201)
        status = old.get("status", {})
        new = copy.deepcopy(body) if is_apply else merged(copy.deepcopy(old), body)
        validate(new)
        new["status"] = status
        if is_apply and all(
            old.get(key) == value for key, value in new.items() if key != "metadata"
        ):
            new["metadata"] = {**old["metadata"], **new["metadata"]}
        return web.json_response(new if dry else self.store.replace(new, place))

    async def _collection(
        self, request: web.Request, resource: ApiResource, namespace: str | None
    ) -> web.StreamResponse:
        selector = request.query.get("labelSelector", "")
        field, _, value = request.query.get("fieldSelector", "").partition("=")
        if request.method == "POST":
            body = yaml.safe_load(await request.text())
            validate(body)
            made = self.store.create(body, namespace or "default")
            return web.json_response(made, status=201)
        if request.query.get("watch") in ("1", "true"):
            return await self._watch(request, resource.kind, namespace, selector, value)
        found = self.store.list(resource.kind, namespace, selector)
        if field == "metadata.name":
            found = [each for each in found if each["metadata"]["name"] == value]
        if request.method == "DELETE":
            for thing in found:
                self.cluster.delete(thing, await grace_of(request))
        return web.json_response(
            {
                **{"kind": f"{resource.kind}List", "apiVersion": resource.group_version},
                **{"metadata": {"resourceVersion": str(self.store.version)}, "items": found},
            }
        )

    async def _watch(
        self, request: web.Request, kind: str, namespace: str | None, selector: str, name: str
    ) -> web.StreamResponse:
        seen = int(request.query.get("resourceVersion") or 0)
        if seen and self.store.events and seen < self.store.events[0][0] - 1:
            raise ApiError(410, "Expired", "too old resource version")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        until = asyncio.get_running_loop().time() + float(request.query.get("timeoutSeconds", 300))
        while True:
            changed = self.store.changed
            for version, event, each, thing in list(self.store.events):
                place = thing["metadata"]["namespace"]
                is_meant = each == kind and namespace in (None, place) and matches(thing, selector)
                if version > seen and is_meant and name in ("", thing["metadata"]["name"]):
                    line = json.dumps({"type": event, "object": thing}) + "\n"
                    try:
                        await answer.write(line.encode())
                    except ConnectionError:
                        return answer
            seen = max(seen, self.store.version)
            left = until - asyncio.get_running_loop().time()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(changed.wait(), max(left, 0.001))
            if left <= 0:
                return answer

    async def _subresource(
        self, request: web.Request, namespace: str, name: str, part: str
    ) -> web.StreamResponse:
        pod = self.store.get("Pod", namespace, name)
        container = self.cluster.container_of(pod)
        if part == "log":
            return web.Response(body=container.log_bytes() if container else b"")
        if part not in ("exec", "attach"):
            raise ApiError(404, "NotFound", f"pods have no {part}")
        if container is None or not container.is_running:
            raise ApiError(400, "BadRequest", f"the container of {name} is not running")
        socket = web.WebSocketResponse(protocols=("v5.channel.k8s.io",))
        await socket.prepare(request)
        if part == "exec":
            await serve_exec(socket, container, request.query.getall("command"))
        else:
            await serve_attach(socket, container)
        await socket.close()
        return socket


async def grace_of(request: web.Request) -> float | None:
    """Return the grace period that a request to delete asks for."""
    text = await request.text()
    body = yaml.safe_load(text) if text else {}
    grace = request.query.get("gracePeriodSeconds", (body or {}).get("gracePeriodSeconds"))
    return None if grace is None else float(grace)


async def serve_exec(socket: web.WebSocketResponse, container: Container, words: list[str]) -> None:
    """Run a command in a container, with the streams of `v5.channel.k8s.io`."""
    process = await container.execute(words)
    assert process.stdin is not None
    reading = asyncio.create_task(feed(socket, process.stdin))
    await asyncio.gather(
        send_stream(socket, 1, process.stdout), send_stream(socket, 2, process.stderr)
    )
    code = await process.wait()
    reading.cancel()
    await send_status(socket, code if code >= 0 else 128 - code)


async def serve_attach(socket: web.WebSocketResponse, container: Container) -> None:
    """Connect the streams of a container's first process; its input ends with the connection."""
    process = container.process
    assert process is not None
    reading = asyncio.create_task(feed(socket, process.stdin))
    async for piece in container.follow():
        if socket.closed:
            break
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(b"\x01" + piece)
    reading.cancel()
    await send_status(socket, 0)


async def feed(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter | None) -> None:
    """Copy channel 0 to a process until the channel or the connection is closed."""
    try:
        async for message in socket:
            if message.type != WSMsgType.BINARY or stdin is None:
                continue
            if message.data[:1] == b"\x00":
                stdin.write(message.data[1:])
                await stdin.drain()
            elif message.data == b"\xff\x00":
                stdin.close()
    except (ConnectionError, RuntimeError):
        pass
    finally:
        if stdin is not None:
            stdin.close()


async def send_stream(
    socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader | None
) -> None:
    assert stream is not None
    while piece := await stream.read(65536):
        with contextlib.suppress(ConnectionError):
            await socket.send_bytes(bytes([channel]) + piece)


async def send_status(socket: web.WebSocketResponse, code: int) -> None:
    """Send the end of a command on the channel of errors."""
    status: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        status = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode"}
        status |= {"message": f"exit code {code}", "details": {"causes": causes}}
    with contextlib.suppress(ConnectionError):
        await socket.send_bytes(b"\x03" + json.dumps(status).encode())


def group_list() -> dict[str, Any]:
    groups = []
    for each in GROUPS:
        if "/" in each:
            version = {"groupVersion": each, "version": each.partition("/")[2]}
            name = each.partition("/")[0]
            groups.append({"name": name, "versions": [version], "preferredVersion": version})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def resource_list(group_version: str) -> dict[str, Any]:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            **{"name": each.plural, "singularName": each.kind.lower(), "namespaced": True},
            **{"kind": each.kind, "verbs": verbs, "categories": ["all"]},
        }
        for each in RESOURCES
        if each.group_version == group_version
    ]
    if not resources:
        raise ApiError(404, "NotFound", f"no group {group_version}")
    base = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version}
    return {**base, "resources": resources}


def openapi(words: list[str]) -> dict[str, Any]:
    """Answer what `kubectl apply` asks: that the server checks fields itself."""
    if words[1:] == ["v3"]:
        prefix = {each: "api/v1" if each == "v1" else f"apis/{each}" for each in GROUPS}
        paths = {
            path: {"serverRelativeURL": f"/openapi/v3/{path}?hash=1"} for path in prefix.values()
        }
        return {"paths": paths}
    if words[1] == "v2":
        raise ApiError(404, "NotFound", "openapi v2 is not served")
    group_version = "/".join(words[3:])
    paths = {}
    for each in RESOURCES:
        if each.group_version == group_version:
            group, _, version = group_version.rpartition("/")
            kind = {"group": group, "version": version, "kind": each.kind}
            named = [{"name": name, "in": "query"} for name in ("dryRun", "fieldValidation")]
            patch = {"parameters": named, "x-kubernetes-group-version-kind": kind}
            path = f"/{'/'.join(words[2:])}/namespaces/{{namespace}}/{each.plural}/{{name}}"
            paths[path] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}


def require_cluster(*programs: str) -> None:
    """Skip the test with the reason where the fake cluster or kubectl cannot run."""
    for program in ("kubectl", "bwrap", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    shown = subprocess.run(
        ["kubectl", "version", "--client", "-o", "json"], capture_output=True, check=True
    )
    version = json.loads(shown.stdout)["clientVersion"]
    if (int(version["major"]), int(re.sub(r"\D", "", version["minor"]))) < MIN_KUBECTL:
        pytest.skip(f"kubectl is {version['gitVersion']}; exec over WebSockets needs 1.31")


@contextlib.asynccontextmanager
async def fake_kubernetes(
    folder: Path, *, images: Mapping[str, Path] | None = None
) -> AsyncIterator[FakeKubernetes]:
    """Serve a cluster; all of its processes have ended at the end."""
    async with FakeKubernetes(folder, images=images) as server:
        yield server
