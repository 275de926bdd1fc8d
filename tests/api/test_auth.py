"""Tokens, roles and the check in front of the application."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.routing import Route

from atroposlib.api.auth import (
    UNKNOWN_ROUTE,
    BearerAuthMiddleware,
    Holder,
    Role,
    TokenTable,
    path_of,
    read_token_file,
    rule_for,
)
from atroposlib.api.server import create_app
from atroposlib.errors import ConfigError
from tests.api.helpers import TOKENS

REPO = Path(__file__).resolve().parents[2]
FILE = f"""
# who may do what
environment {TOKENS[Role.ENVIRONMENT]} maths
trainer     {TOKENS[Role.TRAINER]}

admin {TOKENS[Role.ADMIN]} operator
"""


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_token_file_names_holders_and_roles(token_file: Path) -> None:
    table = read_token_file(token_file)

    found = [table.find(TOKENS[role].encode()) for role in Role]
    assert found == [
        Holder(Role.ENVIRONMENT, "maths"),
        Holder(Role.TRAINER, "trainer, line 4"),
        Holder(Role.ADMIN, "operator"),
    ]
    assert table.find(b"some other text of that length") is None
    assert table.find("schlüssel".encode("latin-1")) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trainr 0123456789abcdef", "line 2: the first word is not a role; expected one of envir"),
        ("trainer", "line 2: 1 words; expected: role token"),
        ("trainer 0123456789abcdef one two", "line 2: 4 words; expected: role token"),
        ("trainer short", "line 2: the token must be at least 16 of the characters"),
        ("trainer 0123456789abcdefé", "line 2: the token must be at least 16 of the characters"),
        (f"admin {TOKENS[Role.TRAINER]}", "line 2: this is also the token of 'trainer, line 1'"),
    ],
)
def test_bad_token_file_is_refused_by_line_without_showing_it(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"trainer {TOKENS[Role.TRAINER]}\n{line}\n", encoding="utf-8")
    path.chmod(0o600)

    with pytest.raises(ConfigError, match=message) as refusal:
        read_token_file(path)

    assert "0123456789abcdef" not in str(refusal.value)
    assert TOKENS[Role.TRAINER] not in str(refusal.value)


@pytest.mark.parametrize("content", ["", "# nothing but a comment\n"])
def test_token_file_without_tokens_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(content)

    with pytest.raises(ConfigError, match="holds no token; expected lines of: role token"):
        read_token_file(path)


def test_token_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the token file"):
        read_token_file(tmp_path / "nowhere")


@pytest.mark.skipif(os.name != "posix", reason="file modes are those of POSIX")
def test_token_file_that_others_can_read_is_warned_about(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_token_file(token_file)
    assert not caplog.records

    token_file.chmod(0o644)
    read_token_file(token_file)

    assert "other users can read it; run: chmod 600" in caplog.text


def test_route_without_a_rule_is_for_admins() -> None:
    assert rule_for("/groups/7/payload").roles == {Role.ADMIN}
    assert rule_for("/batch/3-1/ack").route == "/batch/{}/ack"
    for path in ("/groups/", "/groups/1/2", "/batch/1/2/ack", "/Status", "/status/", "", "//"):
        assert rule_for(path) is UNKNOWN_ROUTE


def test_deletion_is_for_admins_except_of_the_own_registration() -> None:
    assert rule_for("/groups/7", "DELETE").roles == {Role.ADMIN}
    assert rule_for("/batch", "DELETE").roles == {Role.ADMIN}
    assert rule_for("/register", "DELETE").roles == {Role.TRAINER, Role.ADMIN}


def routes_of(app: FastAPI) -> list[str]:
    """Paths of the application as rules write them: `{}` in place of each parameter."""
    pages = [route.path for route in app.routes if isinstance(route, Route)]
    return [re.sub(r"{[^}]+}", "{}", path) for path in {*pages, *app.openapi()["paths"]}]


def test_each_route_of_the_service_has_a_rule_and_a_row_in_its_documentation() -> None:
    page = (REPO / "docs" / "service.md").read_text(encoding="utf-8")
    documented = [*re.findall(r"`(/[^`]*)`", page), "/batch/ID/ack", "/batch/ID/nack"]

    routes = routes_of(create_app())

    assert {"/batch/{}/ack", "/groups/{}/payload", "/scored_data"} <= set(routes)
    for route in routes:
        assert rule_for(route.replace("{}", "7")).route == route
        if not route.startswith(("/docs/", "/openapi.json", "/redoc")):
            assert route.replace("{}", "ID") in documented


def test_path_of_a_request_leaves_out_the_prefix_of_a_proxy() -> None:
    assert path_of({"path": "/atropos/status", "root_path": "/atropos"}) == "/status"
    assert path_of({"path": "/status", "root_path": "/atropos"}) == "/status"
    assert path_of({"path": "/atroposphere", "root_path": "/atropos"}) == "/atroposphere"


@pytest.fixture
def client(token_file: Path) -> TestClient:
    """An application of two routes that says who reached it."""
    app = FastAPI()

    @app.api_route("/batch", methods=["GET", "POST"])
    @app.get("/health/live")
    async def reached() -> str:
        return "reached"

    app.add_middleware(BearerAuthMiddleware, tokens=read_token_file(token_file))
    return TestClient(app)


def test_request_without_a_token_is_asked_for_one(client: TestClient) -> None:
    answer = client.get("/batch")

    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json() == {"detail": "this route needs a token"}


@pytest.mark.parametrize(
    "value", ["Bearer", "Bearer ", "Basic abc", "Bearer wrong-but-long-enough", "Bearer \xff\xff"]
)
def test_request_with_another_token_is_refused(client: TestClient, value: str) -> None:
    answer = client.get("/batch", headers={"Authorization": value.encode("latin-1")})

    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")


def test_role_that_may_not_is_told_which_may(client: TestClient) -> None:
    answer = client.get("/batch", headers=bearer(TOKENS[Role.ENVIRONMENT]))

    assert answer.status_code == 403
    expected = "this route needs the role admin or trainer; the token has environment"
    assert answer.json() == {"detail": expected}


def test_role_that_may_reaches_the_route(client: TestClient) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"Authorization": f"{scheme} {TOKENS[Role.TRAINER]}"}
        assert client.get("/batch", headers=headers).json() == "reached"
    assert client.get("/health/live").json() == "reached"


def test_refusals_are_logged_once_and_never_show_the_token(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for _ in range(3):
        client.get("/batch", headers=bearer("wrong-but-long-enough"))
        client.get("/batch", headers=bearer(TOKENS[Role.ENVIRONMENT]))

    lines = [r.getMessage() for r in caplog.records if r.name == "atroposlib.api.auth"]
    assert [line.split(":")[0] for line in lines] == [
        "refused a client on /batch",
        "refused maths on /batch",
    ]
    assert not any(t in caplog.text for t in ("wrong-but-long", *TOKENS.values()))


def test_table_shows_no_token_when_it_is_printed(token_file: Path) -> None:
    table = read_token_file(token_file)

    shown = f"{table!r} {vars(table)}"
    assert not any(token in shown for token in TOKENS.values())


def test_empty_table_knows_nobody() -> None:
    assert TokenTable().find(b"") is None
