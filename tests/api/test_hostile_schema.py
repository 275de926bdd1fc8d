"""Whatever the OpenAPI document allows, and much that it does not, is answered as documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from atroposlib.api.server import create_app
from example_trainer.processes import find_free_port
from tests.api.helpers import REGISTRATION, make_group, serve
from tests.api.soak.service_process import Replica

pytestmark = pytest.mark.slow

SCHEMA = schemathesis.openapi.from_dict(create_app().openapi())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
CASES = [
    *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
    *(
        (label, GenerationMode.NEGATIVE)
        for label, operation in OPERATIONS.items()
        if operation.body or operation.query
    ),
]
FEW, MANY = 3, 150
LONGEST_WAIT_S = 0.02


@schemathesis.serializer("application/msgpack")
def as_it_is(context: Any, value: Any) -> bytes:
    """Bytes of the binary format are generated as bytes."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def in_thread() -> Iterator[str]:
    with serve(create_app(), find_free_port()) as url:
        yield url


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A `run-api` on a file."""
    replica = Replica(Path(tmp_path_factory.mktemp("runs")), "sqlite")
    replica.start()
    yield replica.url
    replica.stop()


def prepare(url: str) -> None:
    """Begin a run with an environment and queued groups, so that there is something to answer."""
    with httpx.Client(base_url=url) as client:
        client.get("/reset_data")
        client.post("/register", json={**REGISTRATION, "batch_size": 2})
        client.get("/batch")
        client.post("/register-env", json={"max_token_length": 9, "desired_name": "a", "weight": 1})
        client.post("/scored_data_list", json=[make_group(1, env_id=0)] * 9)


def attack(url: str, label: str, mode: GenerationMode, num_examples: int) -> None:
    session = requests.Session()
    session.trust_env = False

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples == FEW,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def ask(case: Case) -> None:
        shorten_wait(case)
        answer = case.call(base_url=url, session=session, timeout=30)
        case.validate_response(answer, checks=CHECKS)

    ask()


def shorten_wait(case: Case) -> None:
    wait = (case.query or {}).get("wait")
    if isinstance(wait, (int, float)) and LONGEST_WAIT_S < wait <= 300:
        case.query["wait"] = LONGEST_WAIT_S


@pytest.mark.parametrize(("label", "mode"), CASES)
def test_requests_by_the_document_are_answered_by_the_document(in_thread, label, mode):
    prepare(in_thread)

    attack(in_thread, label, mode, FEW)


@pytest.mark.long
@pytest.mark.parametrize(("label", "mode"), CASES)
def test_many_requests_to_a_process_are_answered_by_the_document(process, label, mode):
    prepare(process)

    attack(process, label, mode, MANY)

    assert httpx.get(f"{process}/health/ready").status_code == 200
