"""What a group may look like, and how a malformed one is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.helpers import Service, make_group

pytestmark = pytest.mark.slow


@pytest.fixture
def service() -> Service:
    return Service()


def two(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": [[1, 2, 3], [4, 5]],
        "masks": [[-100, 2, 3], [-100, 5]],
        "scores": [1.0, -1.0],
        **changes,
    }


ROLE = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "changes",
    [
        {"ref_logprobs": [[0, 0, 0], [0, 0]]},
        {"scores": [1, "0.5"]},
        {"tokens": [["1", 2.0, 3], [4, 5]]},
        {"advantages": [[1, 2, 3, 4, 5], []]},
        {"advantages": [0.5, -0.5]},
        {"messages": None},
        {"messages": []},
        {"messages": [[], [ROLE]]},
        {"messages": ["plain", "strings"]},
        {"messages": [["plain"], [ROLE]]},
        {"messages": [[{**ROLE, "reward": None, "x": {"y": [1]}}]]},
        {"messages": [[{"role": "dog", "content": {"a": [1, None]}}]]},
        {"messages": [[{"role": "", "content": []}]]},
        {"overrides": [{"temperature": 0.5}, {}]},
        {"group_overrides": {"sft": True}},
        {"generation_params": {"temperature": 0.7}},
        {"images": ["data"]},
        {"images": {"any": 1}},
        {"inference_logprobs": [[1.0, -0.1, -0.2], [1.0, -3]]},
        {"distill_token_ids": [[[1, 2]], []], "distill_logprobs": [[[-1, -2.5]], []]},
        {"env_id": "3"},
        {"unknown_field": object.__name__},
    ],
)
def test_well_formed_groups_are_received(service, changes):
    answer = service.post("/scored_data", json=two(**changes))

    assert answer.json() == {"status": "received"}


@pytest.mark.parametrize(
    ("changes", "loc", "says"),
    [
        ({"tokens": [], "masks": [], "scores": []}, ["tokens"], "at least one"),
        ({"tokens": None}, ["tokens"], "null"),
        ({"masks": [[-100, 2, 3]]}, ["masks"], "1 entries, tokens has 2"),
        ({"masks": [[-100, 2, 3], [5]]}, ["masks", 1], "1 entries, tokens[1] has 2"),
        ({"scores": [1.0]}, ["scores"], "1 entries, tokens has 2"),
        ({"scores": [1.0, "nan"]}, ["scores", 1], "not a finite number"),
        ({"scores": [1.0, None]}, ["scores", 1], "null"),
        ({"inference_logprobs": [[1.0, 0.0], [0.0, 0.0]]}, ["inference_logprobs", 0], "2 entries"),
        ({"inference_logprobs": [["inf", 0, 0], [0, 0]]}, ["inference_logprobs", 0, 0], "finite"),
        ({"ref_logprobs": [[0, "-inf", 0], []]}, ["ref_logprobs", 0], "finite"),
        ({"advantages": [["nan"], [1]]}, ["advantages", 0], "finite"),
        ({"distill_logprobs": [[["nan"]]]}, ["distill_logprobs", 0], "finite"),
        ({"tokens": [[1, 2.5, 3], [4, 5]]}, ["tokens", 0, 1], "int"),
        ({"tokens": [[1, 2, 3], 4]}, ["tokens", 1], "array"),
        ({"tokens": [[1, 2, 2**70], [4, 5]]}, ["tokens", 0, 2], "<="),
        ({"messages": 5}, ["messages"], "list"),
        ({"messages": [1]}, ["messages", 0], "list of messages"),
        ({"messages": [None]}, ["messages", 0], "list of messages"),
        ({"messages": [ROLE]}, ["messages", 0], "list of messages"),
        ({"messages": [[ROLE, 1]]}, ["messages", 0, 1], "role and content are required"),
        ({"messages": [[None]]}, ["messages", 0, 0], "role and content are required"),
        ({"messages": [[{"content": "x"}]]}, ["messages", 0, 0], "role and content are required"),
        ({"messages": [[{"role": "user"}]]}, ["messages", 0, 0], "role and content are required"),
        ({"overrides": {"a": 1}}, ["overrides"], "list of objects"),
        ({"overrides": [1, 2]}, ["overrides", 0], "object"),
        ({"group_overrides": []}, ["group_overrides"], "object"),
        ({"generation_params": 3}, ["generation_params"], "object"),
        ({"env_id": 1.5}, ["env_id"], "int"),
    ],
)
def test_malformed_groups_are_422_with_the_path(service, changes, loc, says):
    answer = service.post("/scored_data", json=two(**changes))

    (detail,) = answer.json()["detail"]
    assert answer.status_code == 422
    assert detail["loc"] == ["body", *loc]
    assert says in detail["msg"]
    assert set(detail) >= {"type", "loc", "msg", "input"}
    assert service.get("/status").json()["queue_size"] == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["scores", "images"])
def test_numbers_that_are_not_finite_are_422_and_block_nothing(service, number, field):
    service.register(batch_size=1)
    body = json.dumps(make_group(1, **{field: ["X"]})).replace('"X"', number)

    answer = service.post("/scored_data", content=body)

    assert answer.status_code == 422
    service.push(1)
    assert service.take() == [0]


def test_missing_field_is_named_like_the_framework_names_it(service):
    answer = service.post("/scored_data", json={"tokens": [[1]], "scores": [1]})

    (detail,) = answer.json()["detail"]
    assert detail["type"] == "missing"
    assert detail["loc"] == ["body", "masks"]


@pytest.mark.parametrize("body", [b"", b"{", b'{"tokens": [[1', b"nonsense"])
def test_malformed_json_is_422_of_type_json_invalid(service, body):
    answer = service.post("/scored_data", content=body)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["type"] == "json_invalid"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/scored_data", b"[1, x]"),
        ("/scored_data", b'{"tokens": 5, "masks": ['),
        ("/scored_data_list", b"{"),
        ("/scored_data_list", b"[5, x]"),
    ],
)
def test_malformed_json_is_reported_before_a_wrong_type(service, path, body):
    answer = service.post(path, content=body)

    assert answer.status_code == 422
    assert answer.json()["detail"][0]["type"] == "json_invalid"


@pytest.mark.parametrize("path", ["/scored_data", "/scored_data_list", "/register"])
def test_body_that_is_not_text_is_400(service, path):
    headers = {"Content-Type": "application/json"}

    answer = service.post(path, content=b'{"a": "\xff"}', headers=headers)

    assert answer.status_code == 400
    assert answer.json() == {"detail": "There was an error parsing the body"}


def test_batch_delivers_every_digit_and_every_byte_of_opaque_fields(service):
    service.register(batch_size=1)
    group = make_group(
        1,
        score=0.1 + 0.2,
        advantages=[[1e-300, -123456789.123456789]],
        inference_logprobs=[[-0.30000000000000004]],
        messages=[[{"role": "user", "content": "ü🙂\n\\", "reward": None}]],
        images=[{"big": 2**60, "tiny": 5e-324, "text": "</script>"}],
        group_overrides={"a": [1.10, True, None]},
        env_id=None,
    )

    service.post("/scored_data", json=group)
    (delivered,) = service.get("/batch").json()["batch"]

    assert {key: delivered[key] for key in group} == group


def test_refused_and_loose_groups_are_counted(service):
    service.post("/scored_data", json=two(scores=[1.0]))
    service.post("/scored_data", json=two(advantages=[[1.0], [2.0]]))

    counters = service.get("/health/ready").json()["counters"]

    assert counters["groups/refused_value_error"] == 1
    assert counters["groups/loose"] == 1


def test_group_tokenized_from_text_is_delivered_with_the_key_and_counted(service):
    service.register(batch_size=2)
    service.post("/scored_data", json=two(tokenized_from_text=True))

    (delivered,) = service.get("/batch").json()["batch"]
    counters = service.get("/health/ready").json()["counters"]

    assert delivered["tokenized_from_text"] is True
    assert counters["groups/tokenized_from_text"] == 1
    assert "atropos_groups_tokenized_from_text_total 1.0" in service.get("/metrics").text
