"""Which requests of browsers a local server refuses; each row is what a real client sends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.utils.web_pages import (
    WebPageMiddleware,
    WebPageRule,
    check_allowed_host,
    names_of_address,
)

pytestmark = pytest.mark.slow

HOST = "127.0.0.1:8000"
CHROMIUM = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/143.0.0.0 Safari/537.36"}
SAME = {**CHROMIUM, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}
TYPED = {**CHROMIUM, "sec-fetch-site": "none", "sec-fetch-mode": "navigate"}
LINK = {
    **CHROMIUM,
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
}
FRAME = {**LINK, "sec-fetch-dest": "iframe"}
IMAGE = {**CHROMIUM, "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
# What Node's fetch sends, and with it most agents written in TypeScript.
NODE = {"user-agent": "node", "accept-language": "*", "sec-fetch-mode": "cors"}
JSON = {"content-type": "application/json", "content-length": "2"}


def scope_of(
    method: str = "GET",
    path: str = "/read",
    server: Any = ("127.0.0.1", 8000),
    kind: str = "http",
    **headers: str,
) -> dict[str, Any]:
    sent = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return {
        "type": kind,
        "method": method,
        "path": path,
        "server": server,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
    }


def rule_of(**settings: Any) -> WebPageRule:
    defaults: dict[str, Any] = {
        "machine_name": "node17.cluster.edu",
        "changes": lambda scope: scope["path"] == "/erase",
    }
    return WebPageRule(**{**defaults, **settings})


def code_of(rule: WebPageRule, scope: dict[str, Any]) -> str | None:
    refusal = rule.refusal_of(scope)
    return None if refusal is None else refusal.code


@pytest.mark.parametrize("client", [{}, {"user-agent": "curl/8.5.0"}, NODE])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/erase", {}),
        ("GET", "/erase", JSON),
        ("POST", "/write", JSON),
        (
            "POST",
            "/write",
            {"content-type": "Application/JSON; charset=utf-8"} | {"content-length": "9"},
        ),
        ("POST", "/write", {"content-type": "application/vnd.api+json", "content-length": "9"}),
        ("POST", "/write", {"content-length": "9"}),
        ("POST", "/write", {"transfer-encoding": "chunked"}),
        ("POST", "/write", {"content-type": "text/plain", "content-length": "0"}),
        ("POST", "/write", {}),
        ("DELETE", "/write", {}),
        ("OPTIONS", "/write", {}),
    ],
)
def test_programs_may_send_what_they_always_sent(client, method, path, body):
    assert code_of(rule_of(), scope_of(method, path, **client, **body)) is None


@pytest.mark.parametrize(
    "media_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "a/b"],
)
@pytest.mark.parametrize("client", [{}, SAME, CHROMIUM])
def test_bodies_of_other_types_are_refused(media_type, client):
    for length in ({"content-length": "2"}, {"transfer-encoding": "chunked"}):
        sent = scope_of("POST", "/write", **client, **length, content_type=media_type)

        refusal = rule_of().refusal_of(sent)

        assert refusal is not None
        assert (refusal.status, refusal.code) == (415, "unsupported_media_type")
        assert "Content-Type: application/json" in refusal.text


@pytest.mark.parametrize("client", [SAME, CHROMIUM, {"origin": f"http://{HOST}"}])
def test_bodies_without_a_type_are_refused_from_browsers(client):
    scope = scope_of("POST", "/write", content_length="2", **client)

    assert code_of(rule_of(), scope) == "unsupported_media_type"


@pytest.mark.parametrize(
    ("client", "read", "erase", "write"),
    [
        (SAME, None, "browser_changes", None),
        (TYPED, None, "browser_changes", None),
        (LINK, None, "browser_changes", "foreign_page"),
        (FRAME, "foreign_page", "foreign_page", "foreign_page"),
        (IMAGE, "foreign_page", "foreign_page", "foreign_page"),
        ({**IMAGE, "sec-fetch-site": "same-site"}, "foreign_page", "foreign_page", "foreign_page"),
        # Over plain HTTP, other machines are told nothing of the page.
        (CHROMIUM, None, "browser_changes", None),
        ({"origin": f"http://{HOST}"}, None, "browser_changes", None),
        ({"origin": "http://127.0.0.1:3000"}, "foreign_page", "foreign_page", "foreign_page"),
        ({"origin": "http://127.0.0.1"}, "foreign_page", "foreign_page", "foreign_page"),
        ({"origin": "http://localhost:8000"}, "foreign_page", "foreign_page", "foreign_page"),
        ({"origin": "https://evil.example"}, "foreign_page", "foreign_page", "foreign_page"),
        ({"origin": "null"}, "foreign_page", "foreign_page", "foreign_page"),
        ({"origin": ""}, "foreign_page", "foreign_page", "foreign_page"),
        ({"origin": f"file://{HOST}"}, "foreign_page", "foreign_page", "foreign_page"),
        ({**TYPED, "origin": "moz-extension://a"}, "foreign_page", "foreign_page", "foreign_page"),
        ({**SAME, "origin": "https://hub.example"}, None, "browser_changes", None),
    ],
)  # fmt: skip
def test_pages_of_other_sites_may_only_link_to_what_shows(client, read, erase, write):
    rule = rule_of()

    assert code_of(rule, scope_of("GET", "/read", **client)) == read
    assert code_of(rule, scope_of("GET", "/erase", **client)) == erase
    assert code_of(rule, scope_of("POST", "/write", **client, **JSON)) == write


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        ("https://dash.example", True),
        ("https://dash.example:444", False),
        ("http://dash.example", False),
        ("https://evil.example", False),
    ],
)
def test_pages_of_named_origins_may_send_everything(origin, is_allowed):
    rule = rule_of(allowed_origins=frozenset({"https://dash.example"}))
    expected = None if is_allowed else "foreign_page"

    for method, path in (("GET", "/erase"), ("POST", "/write"), ("OPTIONS", "/write")):
        sent = {"origin": origin, "sec-fetch-site": "cross-site"}
        assert code_of(rule, scope_of(method, path, **sent)) == expected


OWN = ("localhost", "LOCALHOST.", "viewer.localhost", "127.0.0.1", "127.8.8.8", "[::1]", "10.0.0.5")


@pytest.mark.parametrize("server", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("name", "browser", "program"),
    [
        *((name, None, None) for name in OWN),
        ("node17.cluster.edu", None, None),
        ("node17", None, None),
        # Of a container, a sidecar, another name in the hosts file.
        ("host.docker.internal", "foreign_host", None),
        ("atropos.default.svc.cluster.local", "foreign_host", None),
        ("localhost-evil", "foreign_host", None),
        ("node17.other.edu", "foreign_host", None),
        ("evil.example", "foreign_host", "foreign_host"),
        ("localhost.evil.example", "foreign_host", "foreign_host"),
        ("127.0.0.1.evil.example", "foreign_host", "foreign_host"),
        ("1.2.3", "foreign_host", "foreign_host"),
    ],
)
def test_names_given_by_others_are_refused_on_this_machine(server, name, browser, program):
    rule = rule_of()
    for host in (name, f"{name}:8000", f"{name}:9"):
        at = {"server": (server, 8000), "host": host}
        assert code_of(rule, scope_of(**at, **CHROMIUM)) == browser
        assert code_of(rule, scope_of(**at)) == program


@pytest.mark.parametrize("server", [("10.0.0.5", 8000), ("/run/atropos.sock", None), None])
@pytest.mark.parametrize("host", ["atropos", "node3.other.edu:8000", "svc.ns.svc.cluster.local"])
def test_between_machines_any_name_is_served(server, host):
    for client in ({}, NODE, CHROMIUM, TYPED):
        assert code_of(rule_of(), scope_of(server=server, host=host, **client)) is None
    assert code_of(rule_of(), scope_of("POST", "/write", server=server, host=host, **JSON)) is None


def test_pages_of_a_rebound_name_cannot_write_between_machines_either():
    sent = {"host": "evil.example:8000", "origin": "http://evil.example:8000", **CHROMIUM, **JSON}
    scope = scope_of("POST", "/write", server=("10.0.0.5", 8000), **sent)

    assert code_of(rule_of(), scope) == "foreign_host"
    assert code_of(rule_of(has_pages=True), scope) is None
    assert code_of(rule_of(allowed_hosts=frozenset({"evil.example"})), scope) is None


@pytest.mark.parametrize(
    ("allowed", "host", "is_served"),
    [
        ("runs.example.org", "runs.example.org", True),
        ("runs.example.org", "Runs.Example.Org.:443", True),
        ("runs.example.org", "evil.runs.example.org", False),
        ("runs.example.org:8443", "runs.example.org:8443", True),
        ("runs.example.org:8443", "runs.example.org", False),
        ("*.example.org", "runs.example.org:1", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evilexample.org", False),
        ("*", "anything.example", True),
    ],
)
def test_named_hosts_are_served(allowed, host, is_served):
    rule = rule_of(allowed_hosts=frozenset({check_allowed_host(allowed)}))

    assert (code_of(rule, scope_of(host=host, **TYPED)) is None) == is_served


@pytest.mark.parametrize(
    ("allowed", "origin", "is_served"),
    [
        ("runs.example.org", "https://runs.example.org", True),
        ("runs.example.org", "https://runs.example.org:8443", False),
        ("runs.example.org:8443", "https://runs.example.org:8443", True),
        ("*", "https://runs.example.org", False),
        ("*.example.org", "https://runs.example.org", False),
    ],
)
def test_pages_of_named_hosts_are_own_behind_a_proxy_that_changes_the_name(
    allowed, origin, is_served
):
    rule = rule_of(allowed_hosts=frozenset({allowed}))

    assert (code_of(rule, scope_of("POST", "/write", origin=origin, **JSON)) is None) == is_served


@pytest.mark.parametrize(
    ("host", "names"),
    [
        ("Runs.Example.org", {"runs.example.org"}),
        ("localhost", {"localhost"}),
        ("0.0.0.0", set()),
        ("::", set()),
        ("", set()),
    ],
)
def test_name_that_is_listened_on_is_served(host, names):
    assert names_of_address(host) == names


def test_endless_headers_are_refused_and_not_remembered():
    rule = rule_of()
    long = "a" * 60_000

    assert code_of(rule, scope_of(host=long)) == "foreign_host"
    typed = scope_of("POST", "/write", content_type=f"text/{long}", content_length="1")
    assert code_of(rule, typed) == "unsupported_media_type"


WATCHED = ("host", "origin", "sec-fetch-site", "sec-fetch-mode", "content-type", "content-length")
VALUES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"[", b"[::1", b"a:b:c", b"://", b"http://[", b"fe80::1%x", b"{}", b"{0}", b"."]
    ),
)


@settings(max_examples=200)
@given(
    headers=st.lists(st.tuples(st.sampled_from([name.encode() for name in WATCHED]), VALUES)),
    method=st.sampled_from(["GET", "POST", "OPTIONS", "X"]),
)
def test_whatever_is_sent_gets_a_decision(headers, method):
    scope = {**scope_of(method), "headers": headers}
    rule = rule_of(host_remedy="h {}", origin_remedy="o {}", allowed_hosts=frozenset({"*.a.b"}))

    refusal = rule.refusal_of(scope)

    assert refusal is None or (refusal.status in (403, 415) and refusal.text.isascii())


def test_names_do_not_matter_where_keys_are_asked_for():
    rule = rule_of(checks_host=False)

    assert code_of(rule, scope_of(host="evil.example", **CHROMIUM)) is None


def test_pages_may_be_framed_where_that_is_wanted():
    rule = rule_of(may_be_framed=True)

    assert code_of(rule, scope_of(**FRAME)) is None
    assert code_of(rule, scope_of(**IMAGE)) == "foreign_page"
    assert code_of(rule, scope_of("POST", **FRAME)) == "foreign_page"


@pytest.mark.parametrize(
    "name",
    ["", "http://a", "a/b", "a b", "a:b", "*x", "a.*", "é", "-a", "a" * 300, "a\nb"],
)
def test_allowed_hosts_that_are_no_names_are_refused(name):
    with pytest.raises(ValueError, match="expected one such as viewer"):
        check_allowed_host(name)


@pytest.mark.parametrize("value", ["evil\r\nX: 1", "\x1b[31m" * 500, "{0}{name}", "é" * 9])
def test_what_senders_write_is_told_in_one_short_line(value):
    rule = rule_of(host_remedy="--allowed-host {}", origin_remedy="--cors-origin {}")

    for scope in (scope_of(host=f"{value}.example"), scope_of(origin=value)):
        refusal = rule.refusal_of(scope)
        assert refusal is not None
        assert refusal.text.isascii()
        assert refusal.text.isprintable()
        assert len(refusal.text) < 1200


async def test_web_sockets_of_other_pages_are_closed_and_refusals_logged_once(caplog):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*_: Any) -> None:
        raise AssertionError("the application was called")

    guard = WebPageMiddleware(never, rule=rule_of())
    scope = scope_of(kind="websocket", origin="http://evil.example")
    del scope["method"]
    for _ in range(3):
        await guard(scope, never, send)

    assert [message["type"] for message in sent] == ["websocket.close"] * 3
    assert [record.message for record in caplog.records] == [
        "refused websocket: the request comes from a web page of http://evil.example, and pages of "
        "other addresses may only link here; send it from a program"
    ]
