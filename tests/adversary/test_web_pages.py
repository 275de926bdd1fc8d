"""Web pages that a user has open besides: what they can do to service, agent proxy and viewer.

Hostile pages run in a real Chromium, on another site, another port, another local name, without an
origin, and under a name that was rebound to this machine. Each tries every request a page can make.
"""

from __future__ import annotations

import itertools
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.auth import Role
from atroposlib.api.server import create_app
from atroposlib.api.settings import ApiSettings
from atroposlib.utils.web_pages import WebPageRule
from atroposlib.viewer.app import Screen, build_app, launch_app
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer
from tests.api.helpers import REGISTRATION, TOKENS, make_group, serve
from tests.server_handling.proxy.engine import RecordingEngine, app_of
from tests.viewer import groups
from tests.viewer.conftest import chromium
from tests.viewer.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

EVIL = "evil.example"
KEYS = {"require_keys": True, "admin_key": "key of the administrator"}  # pragma: allowlist secret
ATTACK = """
async ({bases, reads, writes}) => {
  const readable = [];
  const tries = [];
  const soon = () => new Promise(done => setTimeout(done, 60000));
  const attempt = make => tries.push(
    Promise.race([Promise.resolve().then(make), soon()]).catch(() => {}));
  const get = (url, options) => attempt(async () => {
    const answer = await fetch(url, options);
    if (answer.type !== "opaque") readable.push([url, answer.status, await answer.text()]);
  });
  const element = (name, attributes) => attempt(() => new Promise(done => {
    const made = document.createElement(name);
    Object.assign(made, attributes);
    made.onload = made.onerror = done;
    document.body.append(made);
  }));
  const form = (url, body, enctype) => attempt(() => new Promise(done => {
    const frame = document.createElement("iframe");
    frame.name = `frame${Math.random()}`;
    document.body.append(frame);
    const made = document.createElement("form");
    Object.assign(made, {method: "POST", action: url, enctype, target: frame.name});
    const field = document.createElement("input");
    // The form adds a "=": in the value of a last field that nobody reads, it does no harm.
    [field.name, field.value] = [body.replace(/}$/, ', "x": "'), '"}'];
    made.append(field);
    document.body.append(made);
    frame.onload = done;
    made.submit();
  }));
  for (const base of bases) {
    for (const path of reads) {
      const url = base + path;
      element("img", {src: url});
      element("script", {src: url});
      element("link", {rel: "stylesheet", href: url});
      element("iframe", {src: url});
      get(url, {mode: "no-cors"});
      get(url, {mode: "no-cors", credentials: "include", referrerPolicy: "no-referrer"});
      get(url, {mode: "cors"});
      get(url, {mode: "cors", headers: {"User-Agent": "curl", "X-Any": "1"}});
      attempt(() => new Promise(done => {
        const made = new WebSocket(url.replace("http", "ws"));
        made.onopen = () => { readable.push([url, "WebSocket", ""]); done(); };
        made.onerror = done;
      }));
      attempt(() => new Promise(done => {
        const made = new EventSource(url);
        made.onopen = () => { readable.push([url, "EventSource", ""]); done(); };
        made.onerror = () => { made.close(); done(); };
      }));
    }
    for (const [path, body] of writes) {
      const url = base + path;
      const typed = new Blob([body], {type: "application/json"});
      const upload = new FormData();
      upload.append("files", new Blob(["x".repeat(1000)]), "page.txt");
      const simple = {method: "POST", mode: "no-cors"};
      get(url, {...simple, body});
      get(url, {...simple, body: new Blob([body])});
      get(url, {...simple, body: new TextEncoder().encode(body)});
      get(url, {...simple, body: typed});
      get(url, {...simple, body: upload});
      get(url, {...simple, body: new URLSearchParams({a: body})});
      get(url, {method: "POST", body: new Blob([body])});
      for (const method of ["POST", "PUT", "DELETE"])
        get(url, {method, body, headers: {"Content-Type": "application/json"}});
      attempt(() => navigator.sendBeacon(url, body));
      attempt(() => navigator.sendBeacon(url, typed));
      attempt(() => navigator.sendBeacon(url, new Blob([body])));
      form(url, body, "text/plain");
      form(url, body, "multipart/form-data");
    }
  }
  await Promise.all(tries);
  return readable;
}
"""


class Target(NamedTuple):
    """What is attacked."""

    port: int
    reads: list[str]
    """Paths of GETs."""
    writes: list[tuple[str, str]]
    """Paths of POSTs and their bodies."""
    state: Callable[[], Any]
    """Returns what no page may change."""
    answers: list[tuple[str, str, int]]
    """Method, path and status of what the last attack was answered."""


class _HostilePage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if self.path == "/sandboxed":  # then its origin is "null", like that of a local file
            self.send_header("Content-Security-Policy", "sandbox allow-scripts allow-forms")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>hostile</title><body></body>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hostile_port() -> Iterator[int]:
    """Where hostile pages are served, under any name."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _HostilePage) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium for which a foreign name, as after a rebinding, leads to this machine."""
    with chromium(f"--host-resolver-rules=MAP {EVIL} 127.0.0.1") as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[str], Any]]:
    contexts = []

    def open_at(url: str) -> Any:
        contexts.append(browser.new_context())
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.goto(url)
        return page

    yield open_at
    for context in contexts:
        context.close()


class _Recorder:
    """Writes down how each request was answered."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.answers: list[tuple[str, str, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.answers.append((scope["method"], scope["path"], message["status"]))
            await send(message)

        await self.app(scope, receive, noting if scope["type"] == "http" else send)


@contextmanager
def attacked_service(port: int, *, tokens: Path | None) -> Iterator[Target]:
    """A service with a registered trainer, an environment, and a group that makes a batch."""
    app = create_app(ApiSettings(token_file=tokens))
    recorder = _Recorder(app)
    headers = {"Authorization": f"Bearer {TOKENS[Role.ADMIN]}"}
    env = {"max_token_length": 9, "desired_name": "env", "weight": 1.0}
    with serve(recorder, port) as url, httpx.Client(base_url=url, headers=headers) as client:
        client.post("/register", json={**REGISTRATION, "batch_size": 2}).raise_for_status()
        client.get("/batch").raise_for_status()
        client.post("/register-env", json=env).raise_for_status()
        client.post("/scored_data", json=make_group(2, env_id=0)).raise_for_status()
        run = app.state.run

        def state() -> Any:
            state = run.state
            counters = dict(state.counters + run.counters)
            envs = [repr(env) for env in state.envs]
            return state.registration, state.step, len(state.queue), envs, counters

        yield Target(
            port,
            ["/reset_data", "/batch", "/batch?lease=60", "/status-env?env_id=0", "/latest_example"],
            [
                ("/scored_data", '{"tokens": [[1]], "masks": [[1]], "scores": [9.0]}'),
                ("/register", '{"batch_size": 7, "max_token_len": 9, "replace": true}'),
                ("/disconnect-env", '{"env_id": 0}'),
                ("/groups/0", "{}"),
            ],
            state,
            recorder.answers,
        )


@contextmanager
def attacked_proxy(port: int, *, keys: dict[str, Any]) -> Iterator[Target]:
    """A proxy with a session, whose name the pages have guessed."""
    engine = RecordingEngine()
    recorder = _Recorder(app_of(engine, upstream_wait_s=0, **keys))
    headers = {"Authorization": f"Bearer {KEYS['admin_key']}"}
    with serve(recorder, port) as url, httpx.Client(base_url=url, headers=headers) as client:
        session = client.post("/sessions/create", json={}).raise_for_status().json()["uuid"]

        def state() -> Any:
            shown = [client.get(path).json() for path in ("/sessions", "/servers")]
            nodes = client.get(f"/{session}/nodes").json()
            return [entry["uuid"] for entry in shown[0]["sessions"]], shown[1], nodes, engine.calls

        chat = '{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
        setup = '{"servers": [{"base_url": "http://127.0.0.1:9/v1"}], "model_name": "m"}'
        yield Target(
            port,
            ["/sessions", "/servers", f"/{session}/nodes", f"/{session}/v1/models"],
            [
                ("/sessions/create", "{}"),
                ("/setup", setup),
                (f"/{session}/v1/chat/completions", chat),
                (f"/{session}", "{}"),
            ],
            state,
            recorder.answers,
        )


@contextmanager
def served_viewer(folder: Path) -> Iterator[int]:
    path = groups.write_groups(
        folder / "groups.jsonl",
        [groups.make_group(f"question {i}", ["yes", "no"], [1.0, 0.0]) for i in range(30)],
    )
    reader = TokenReader("bytes", lambda _: groups.byte_tokenizer())
    viewer = Viewer(JsonlSource(path), reader)
    wait_until(lambda: not viewer.is_reading and reader.wait(0))
    app = build_app(viewer)
    try:
        yield httpx.URL(launch_app(app)).port or 80
    finally:
        app.close()
        viewer.close()


@contextmanager
def attacked_viewer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A viewer whose uploads would lie in a folder of this test."""
    uploads = folder / "uploads"
    uploads.mkdir()
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(uploads))
    calls: list[Any] = []
    plain_of = Screen.plain

    def plain(screen: Screen, *args: Any) -> Any:
        calls.append(args)
        return plain_of(screen, *args)

    monkeypatch.setattr(Screen, "plain", plain)
    with served_viewer(folder) as port:
        yield Target(
            port,
            ["/config", "/gradio_api/info", "/gradio_api/deep_link?session_hash=x"],
            [
                ("/gradio_api/upload", "{}"),
                ("/gradio_api/run/get_batch", '{"data": []}'),
                ("/gradio_api/call/get_batch", '{"data": []}'),
            ],
            lambda: (sorted(uploads.rglob("*")), list(calls)),
            [],
        )


TARGETS = ("service", "service with tokens", "proxy", "proxy with keys", "viewer")


@pytest.fixture
def target(
    request: pytest.FixtureRequest,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Target]:
    tokens = tmp_path / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"admin {TOKENS[Role.ADMIN]}\n")
    made = {
        "service": partial(attacked_service, free_port, tokens=None),
        "service with tokens": partial(attacked_service, free_port, tokens=tokens),
        "proxy": partial(attacked_proxy, free_port, keys={}),
        "proxy with keys": partial(attacked_proxy, free_port, keys=KEYS),
        "viewer": partial(attacked_viewer, tmp_path, monkeypatch),
    }
    with made[request.param]() as target:
        yield target


def attack(page: Any, target: Target, *names: str) -> list[Any]:
    """Let a page try everything against the target's names; return what it could read."""
    target.answers.clear()
    return page.evaluate(
        ATTACK,
        {
            "bases": [f"http://{name}:{target.port}" for name in names],
            "reads": target.reads,
            "writes": target.writes,
        },
    )


SITES = ("http://evil.example", "http://127.0.0.1", "http://localhost")
FEW = {("service", SITES[0]), ("proxy", SITES[0]), ("viewer", SITES[1])}
PAIRS = [
    pytest.param(target, site, marks=[] if (target, site) in FEW else pytest.mark.long)
    for target, site in itertools.product(TARGETS, SITES)
]


@pytest.mark.parametrize(("target", "site"), PAIRS, indirect=["target"])
def test_pages_of_other_sites_change_and_read_nothing(target, site, hostile_port, open_page):
    before = target.state()

    readable = attack(open_page(f"{site}:{hostile_port}"), target, "127.0.0.1")

    served = [answer for answer in target.answers if answer[2] < 400]
    assert readable == []
    assert served == []
    assert target.state() == before


@pytest.mark.parametrize("target", ["service", "proxy"], indirect=True)
@pytest.mark.long
def test_pages_change_and_read_nothing_where_browsers_do_not_tell_the_site(
    target, hostile_port, open_page
):
    before = target.state()

    readable = attack(open_page(f"http://{EVIL}:{hostile_port}"), target, "0.0.0.0")

    assert readable == []
    assert target.answers  # it leads to this machine
    assert target.state() == before


@pytest.mark.parametrize("target", ["service", "proxy", "viewer"], indirect=True)
@pytest.mark.long
def test_pages_without_an_origin_change_and_read_nothing(target, hostile_port, open_page):
    before = target.state()
    page = open_page(f"http://127.0.0.1:{hostile_port}/sandboxed")

    readable = attack(page, target, "127.0.0.1")

    assert readable == []
    assert [answer for answer in target.answers if answer[2] < 400] == []
    assert target.state() == before


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.long
def test_pages_of_a_rebound_name_change_and_read_nothing(target, open_page):
    before = target.state()
    page = open_page(f"http://{EVIL}:{target.port}/health/live")

    readable = attack(page, target, EVIL)

    assert [answer for answer in readable if answer[1] not in (401, 403, 404, 405, 415)] == []
    assert [answer for answer in target.answers if answer[2] < 400] == []
    assert target.state() == before


@pytest.mark.parametrize(
    ("target", "site"),
    [
        ("service", "other"),
        ("service", "rebound"),
        ("proxy", "other"),
        ("proxy", "rebound"),
        ("viewer", "rebound"),
    ],
    indirect=["target"],
)
@pytest.mark.long
def test_the_same_pages_do_harm_where_nothing_is_refused(
    target, site, hostile_port, open_page, monkeypatch
):
    """What the tests above show is worth something: nothing else stops these pages."""
    monkeypatch.setattr(WebPageRule, "refusal_of", lambda self, scope: None)
    # Servers that are not there would be waited for.
    target = target._replace(writes=[write for write in target.writes if write[0] != "/setup"])
    before = target.state()
    port, name = (hostile_port, "127.0.0.1") if site == "other" else (target.port, EVIL)

    readable = attack(open_page(f"http://{EVIL}:{port}/"), target, name)

    assert target.state() != before
    assert bool(readable) == (site == "rebound")


@pytest.mark.parametrize("target", ["service"], indirect=True)
@pytest.mark.long
def test_links_and_typed_addresses_show_and_change_nothing(target, hostile_port, open_page):
    before = target.state()
    page = open_page(f"http://{EVIL}:{hostile_port}")
    url = f"http://127.0.0.1:{target.port}"

    def follow(path: str) -> int:
        page.goto(f"http://{EVIL}:{hostile_port}")
        with page.expect_navigation() as navigation:
            page.evaluate("url => { location = url; }", url + path)
        return navigation.value.status

    shown = ["/", "/status", "/metrics", "/docs", "/health/ready", "/latest_example"]
    changing = ["/reset_data", "/batch", "/status-env?env_id=0"]
    assert {path: page.goto(url + path).status for path in shown} == dict.fromkeys(shown, 200)
    assert {path: follow(path) for path in shown} == dict.fromkeys(shown, 200)
    assert {path: page.goto(url + path).status for path in changing} == dict.fromkeys(changing, 403)
    assert {path: follow(path) for path in changing} == dict.fromkeys(changing, 403)
    assert "such as curl" in page.inner_text("body")
    assert target.state() == before


@pytest.mark.parametrize("target", TARGETS, indirect=True)
def test_no_origin_is_allowed_in_advance(target):
    url = f"http://127.0.0.1:{target.port}{target.writes[0][0]}"

    for origin in ("http://evil.example", "http://localhost:3000", "null"):
        asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = httpx.options(url, headers=asks)

        assert answer.status_code == 403
        assert not [header for header in answer.headers if header.startswith("access-control")]


@pytest.mark.parametrize("target", ["viewer"], indirect=True)
@pytest.mark.long
def test_viewer_takes_no_uploads_at_all(target):
    before = target.state()
    url = f"http://127.0.0.1:{target.port}/gradio_api/upload"

    answer = httpx.post(url, files={"files": b"x" * 100})

    assert answer.status_code == 415
    assert target.state() == before


@pytest.fixture
def forwarded(free_port: int, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A viewer and a port that leads to it, as `ssh -L` and editors make one; both ports."""
    with served_viewer(tmp_path) as port, _forwarding(free_port, port):
        yield port, free_port


@contextmanager
def _forwarding(port: int, target_port: int) -> Iterator[None]:
    class Forward(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection(("127.0.0.1", target_port)) as onward:
                back = threading.Thread(target=_pump, args=(onward, self.request), daemon=True)
                back.start()
                _pump(self.request, onward)
                back.join()

    class Forwarding(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True

    with Forwarding(("127.0.0.1", port), Forward) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@pytest.mark.long
def test_viewer_works_under_local_names_through_forwarded_ports_and_in_frames(
    forwarded, hostile_port, open_page
):
    port, forwarded_port = forwarded
    for url in (f"http://localhost:{port}", f"http://localhost:{forwarded_port}"):
        page = open_page(url)
        search(page)
        page.close()

    page = open_page(f"http://localhost:{hostile_port}")
    page.evaluate(
        "url => { const f = document.createElement('iframe'); f.src = url;"
        " [f.width, f.height] = [1200, 700]; document.body.append(f); }",
        f"http://127.0.0.1:{forwarded_port}",
    )
    page.wait_for_selector("iframe")
    search(page.frames[1])


def search(page: Any) -> None:
    """Use the filters of a viewer, whose changes are posted."""
    page.click("#v-tab-groups-button")
    page.wait_for_selector("#v-groups tbody tr")
    page.fill("#v-search input, #v-search textarea", "question 7")
    page.wait_for_function("document.querySelectorAll('.v-groups tbody tr').length == 1")


@pytest.mark.parametrize("target", ["service"], indirect=True)
def test_own_pages_of_the_service_may_post(target, open_page):
    page = open_page(f"http://localhost:{target.port}/status")

    answer = page.evaluate(
        """async () => {
          const body = JSON.stringify({max_token_length: 9, desired_name: "own", weight: 1});
          const headers = {"Content-Type": "application/json"};
          return (await fetch("/register-env", {method: "POST", body, headers})).json();
        }"""
    )

    assert answer["status"] == "success"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/sessions/create"])
def test_proxy_refuses_in_the_shape_of_the_dialect(path, free_port):
    with attacked_proxy(free_port, keys={}) as target:
        answer = httpx.post(
            f"http://127.0.0.1:{target.port}{path}",
            content=b"{}",
            headers={"Origin": "http://evil.example"},
        )

    assert answer.status_code == 403
    error = answer.json()["error"]
    assert "send it from a program" in error["message"]
    assert error["type"] == ("permission_error" if "messages" in path else "invalid_request_error")
