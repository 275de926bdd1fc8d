"""Bodies on the wire: compression both ways, caps, CORS, and never a 5xx."""

from __future__ import annotations

import gzip
import json
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.settings import ApiSettings
from tests.api.helpers import REGISTRATION, Service, make_group

pytestmark = pytest.mark.slow

GZIP = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
GROUP = json.dumps(make_group(2, length=300)).encode()
PACKED = gzip.compress(GROUP, mtime=0)
NESTED = "[" * 50_000 + "]" * 50_000


@pytest.fixture(scope="module")
def shared() -> Service:
    """One service for the fuzz tests: whatever it was sent, it must go on answering."""
    return Service()


@pytest.fixture
def service() -> Service:
    return Service()


def test_small_responses_are_not_compressed(service):
    answer = service.get("/info", headers={"Accept-Encoding": "gzip"})

    assert "content-encoding" not in answer.headers


@pytest.mark.parametrize("path", ["/latest_example", "/batch"])
@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [("gzip, deflate", "gzip"), ("br, GZIP;q=0.5", "gzip"), ("gzip;q=0", None), ("identity", None)],
)
def test_large_responses_are_compressed_when_accepted(service, path, accepted, encoding):
    service.register(batch_size=2)
    service.post("/scored_data", content=GROUP)

    answer = service.get(path, headers={"Accept-Encoding": accepted})

    assert answer.headers.get("content-encoding") == encoding
    group = answer.json()["batch"][0] if path == "/batch" else answer.json()
    assert group["tokens"] == json.loads(GROUP)["tokens"]


@pytest.mark.parametrize("name", ["gzip", "GZIP", "x-gzip"])
def test_compressed_groups_are_received(service, name):
    answer = service.post(
        "/scored_data", content=PACKED, headers={**GZIP, "Content-Encoding": name}
    )

    assert answer.json() == {"status": "received"}


def test_compressed_body_of_several_members_is_received(service):
    body = gzip.compress(GROUP[:100]) + gzip.compress(GROUP[100:]) + b"\0\0"

    assert service.post("/scored_data", content=body, headers=GZIP).status_code == 200


def test_compressed_registration_is_received(service):
    body = gzip.compress(json.dumps(REGISTRATION).encode())

    assert service.post("/register", content=body, headers=GZIP).status_code == 200


def test_empty_compressed_body_is_422(service):
    assert service.post("/scored_data", content=b"", headers=GZIP).status_code == 422


@pytest.mark.parametrize(
    "body",
    [
        b"not gzip",
        PACKED[:-9],  # cut inside the data
        PACKED[:-1],  # cut inside the trailer
        PACKED[:5],  # cut inside the header
        PACKED[:-8] + b"\0" * 4 + PACKED[-4:],  # wrong checksum
        PACKED[:-4] + b"\1\2\3\4",  # wrong length
        PACKED + b"junk",
        PACKED[:10] + b"\xff" * 20,  # data the inflater rejects
        zlib.compress(GROUP),
    ],
)
def test_body_that_is_not_gzip_is_400_as_text_without_cors(body):
    service = Service(ApiSettings(cors_origins=("http://a",)))

    answer = service.post("/scored_data", content=body, headers={**GZIP, "Origin": "http://a"})

    assert (answer.status_code, answer.text) == (400, "Invalid gzip payload")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "access-control-allow-origin" not in answer.headers


def test_bodies_above_the_cap_are_413():
    service = Service(ApiSettings(max_body_bytes=1000))
    bomb = gzip.compress(b" " * 100_000)
    assert len(bomb) < 1000

    answers = [
        service.post("/scored_data", content=bomb, headers=GZIP),
        service.post("/scored_data", content=b" " * 1001),
        service.post("/scored_data", content=iter([b" " * 600, b" " * 600])),
        service.post("/register", content=iter([b" " * 600, b" " * 600])),
        service.post("/scored_data", content=gzip.compress(b" " * 1000), headers=GZIP),
    ]

    assert [answer.status_code for answer in answers] == [413, 413, 413, 413, 422]
    assert {str(answer.json()["detail"]) for answer in answers[:4]} == {
        "request body larger than 1000 bytes; post fewer groups at a time"
    }


PREFLIGHT = {
    "Origin": "http://example.org",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "X-Any",
}


@pytest.mark.parametrize("origins", [("*",), ("http://example.org",)])
def test_listed_origins_may_call(origins):
    service = Service(ApiSettings(cors_origins=origins))

    answer = service.options("/scored_data", headers=PREFLIGHT)

    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] in ("*", "http://example.org")
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_other_origins_may_not_call(service):
    elsewhere = Service(ApiSettings(cors_origins=("http://example.com",)))

    for asked in (service, elsewhere):
        answer = asked.options("/scored_data", headers=PREFLIGHT)

        assert answer.status_code >= 400
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/register-env", '{"max_token_length": 1, "desired_name": "x", "weight": NaN}'),
        ("/register-env", '{"max_token_length": 1, "desired_name": "\\ud800", "weight": 1}'),
        ("/register-env", '{"max_token_length": 1e400, "desired_name": "x", "weight": 1}'),
        ("/disconnect-env", '{"env_id": Infinity}'),
        ("/disconnect-env", '{"env_id": %s}' % ("9" * 5000)),
        ("/status-env", '{"env_id": %s}' % ("9" * 400)),
        ("/register", NESTED),
        ("/scored_data", NESTED),
        ("/scored_data", '{"tokens":[[1]],"masks":[[1]],"scores":[1],"images":' + "[" * 50_000),
        ("/scored_data", '{"tokens":[[1]],"masks":[[1]],"scores":[1],"images":' + NESTED + "}"),
        ("/scored_data", '{"tokens":[[1]],"masks":[[1]],"scores":[1],"images":"\\ud800"}'),
    ],
    ids=lambda value: value[:40],
)  # fmt: skip
def test_hostile_bodies_are_refused_as_the_client_s_fault(service, path, body):
    answer = service.post(path, content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code in (400, 422)
    json.loads(answer.content)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [*make_group(1), "messages", "advantages", "overrides", "env_id", "ref_logprobs", "images"]
POSTS = ["/register", "/register-env", "/disconnect-env", "/status-env", "/scored_data",
         "/scored_data_list"]  # fmt: skip


@settings(max_examples=150)
@given(path=st.sampled_from(POSTS), value=JSON_VALUES, as_gzip=st.booleans())
def test_fuzz_any_json_is_never_a_server_error(shared, path, value, as_gzip):
    body = json.dumps(value).encode("utf-8")
    headers = {"Content-Type": "application/json"}

    if as_gzip:
        answer = shared.post(path, content=gzip.compress(body), headers={**headers, **GZIP})
    else:
        answer = shared.post(path, content=body, headers=headers)

    assert answer.status_code < 500
    assert shared.get("/latest_example").status_code == 200


@settings(max_examples=150)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=3))
def test_fuzz_groups_are_stored_whole_or_refused(shared, changes):
    shared.get("/reset_data")
    shared.register(batch_size=1)

    answer = shared.post("/scored_data", content=json.dumps({**make_group(1), **changes}))

    assert answer.status_code in (200, 422)
    batch = shared.get("/batch")
    assert batch.status_code == 200
    assert (batch.json()["batch"] is not None) == (answer.status_code == 200)


@settings(max_examples=150)
@given(path=st.sampled_from(POSTS), body=st.binary(max_size=60), as_gzip=st.booleans())
def test_fuzz_any_bytes_are_never_a_server_error(shared, path, body, as_gzip):
    headers = GZIP if as_gzip else {"Content-Type": "application/json"}

    assert shared.post(path, content=body, headers=headers).status_code < 500
