"""Structured outputs of the torch engine: what completions follow, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from example_trainer.torch_engine import grammars
from example_trainer.torch_engine.grammars import (
    MAX_NESTING,
    GrammarCompiler,
    GrammarError,
    GrammarSource,
)
from tests.trainer.torch_engine.conftest import LocalEngine, wait_until

pytestmark = pytest.mark.slow

PROMPT = "What is 7 plus 1?"
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
# The schema without white space, which an untrained model could write for ever.
DENSE_POINT = r'\{"x":[0-9]{1,2},"kind":"(a|b)"\}'
MINUTES_TO_COMPILE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string"} for i in range(20_000)},
}
TAG = {"type": "tag", "begin": "<t>", "end": "</t>"}
DIGITS_IN_A_TAG = {
    "type": "structural_tag",
    "format": {**TAG, "content": {"type": "regex", "pattern": "[0-9]{2}"}},
}


def follows(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.DOTALL) is not None


def is_beginning_of_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError as error:  # cut by the limit of tokens
        return text.lstrip().startswith("{") and "Extra data" not in str(error)


@pytest.mark.parametrize(
    ("options", "is_followed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no", 'a"\n\\é']}}, follows(r'yes|no|a"\n\\é')),
        ({"structured_outputs": {"regex": DENSE_POINT}}, follows(DENSE_POINT)),
        ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]? "b"'}}, follows("a[0-9]?b")),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, follows("ab")),
        ({"structured_outputs": {"json": {"enum": ["a", 5]}}}, follows('"a"|5')),
        ({"structured_outputs": {"json": '{"type": "boolean"}'}}, follows("true|false")),
        ({"structured_outputs": {"json": POINT}}, is_beginning_of_object),
        ({"structured_outputs": {"json_object": True}}, is_beginning_of_object),
        (
            {"structured_outputs": {"structural_tag": json.dumps(DIGITS_IN_A_TAG), "json": None}},
            follows("<t>[0-9]{2}</t>"),
        ),
        ({"response_format": DIGITS_IN_A_TAG}, follows("<t>[0-9]{2}</t>")),
        ({"response_format": {"type": "json_object"}}, is_beginning_of_object),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}}},
            follows("7"),
        ),
    ],
)
def test_completions_follow_what_is_requested(
    torch_engine: LocalEngine, options: dict[str, Any], is_followed: Callable[[str], bool]
) -> None:
    answer = torch_engine.complete(PROMPT, n=8, max_tokens=60, seed=3, temperature=1.5, **options)

    texts = [choice["text"] for choice in answer["choices"]]
    assert [text for text in texts if not is_followed(text)] == []
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}


def test_a_chat_follows_the_schema_and_streams_the_same_text(torch_engine: LocalEngine) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": [12, 13]}}}
    body = {"messages": [{"role": "user", "content": PROMPT}], "seed": 4, "response_format": form}

    whole = torch_engine.http.post("/v1/chat/completions", json=body).json()
    streamed = torch_engine.http.post("/v1/chat/completions", json={**body, "stream": True}).text

    content = whole["choices"][0]["message"]["content"]
    assert content in ("12", "13")
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == content


def test_logprobs_are_those_among_the_allowed_tokens(
    torch_engine: LocalEngine, model: Any, tokenizer: Any
) -> None:
    import torch

    [choice] = torch_engine.complete(
        PROMPT, max_tokens=1, structured_outputs={"regex": "[0-9]"}, seed=1
    )["choices"]

    digits = [tokenizer.encode(str(digit))[0] for digit in range(10)]
    with torch.no_grad():
        logits = model(torch.tensor([choice["prompt_token_ids"]])).logits[0, -1].double()
    expected = torch.log_softmax(logits[digits], dim=0)[digits.index(choice["token_ids"][0])]
    assert choice["logprobs"]["token_logprobs"] == pytest.approx([float(expected)], abs=1e-4)


def test_sequences_without_a_grammar_are_unchanged_beside_one(torch_engine: LocalEngine) -> None:
    alone = torch_engine.complete(PROMPT, max_tokens=20, seed=5)

    async def both() -> list[Any]:
        forced = {"structured_outputs": {"regex": "[ab]{40}"}, "max_tokens": 40}
        bodies = [forced, {"max_tokens": 20, "seed": 5}]
        return await asyncio.gather(
            *(asyncio.to_thread(torch_engine.complete, PROMPT, **body) for body in bodies)
        )

    forced, beside = asyncio.run(both())
    assert set(forced["choices"][0]["text"]) <= set("ab")
    assert beside["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


def test_after_its_end_a_text_is_free_if_the_end_is_ignored(torch_engine: LocalEngine) -> None:
    answer = torch_engine.complete(
        PROMPT, max_tokens=12, ignore_eos=True, structured_outputs={"choice": ["a"]}
    )

    [choice] = answer["choices"]
    assert choice["text"].startswith("a")
    assert len(choice["token_ids"]) == 12


def test_a_minimum_of_tokens_yields_to_the_end_of_the_grammar(torch_engine: LocalEngine) -> None:
    answer = torch_engine.complete(
        PROMPT, max_tokens=9, min_tokens=7, structured_outputs={"regex": "[a-c]{2}"}
    )

    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"]
    assert re.fullmatch("[a-c]{2}", answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"structured_outputs": {}}, "expected one of json, json_object, regex"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "got json, regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice: expected a list"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice: expected a list"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs: the schema is not JSON"),
        ({"structured_outputs": {"json": [1]}}, "expected an object or a text"),
        ({"structured_outputs": {"json": {"type": "nope"}}}, 'Unsupported type "nope"'),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs: Regex parsing error"),
        ({"structured_outputs": {"grammar": "root = 3"}}, "structured_outputs: Lark error"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs: "),
        ({"structured_outputs": {"regex": "a" * (2**20 + 1)}}, "at most 1048576 characters"),
        ({"response_format": {"type": "json_schema"}}, "response_format: expected the type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema: expected an object",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "got both",
        ),
    ],
)
def test_a_malformed_form_is_answered_with_its_field(
    torch_engine: LocalEngine, options: dict[str, Any], named: str
) -> None:
    answer = torch_engine.http.post("/v1/completions", json={"prompt": PROMPT, **options})

    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert named in message
    assert ".cc:" not in message


def test_a_schema_that_is_nested_too_deep_is_refused(torch_engine: LocalEngine) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_NESTING):
        schema = {"type": "array", "items": schema}

    answer = torch_engine.http.post(
        "/v1/completions", json={"prompt": PROMPT, "structured_outputs": {"json": schema}}
    )

    assert answer.status_code == 400
    assert f"at most {MAX_NESTING} objects" in answer.json()["error"]["message"]


def test_keywords_that_are_not_enforced_are_logged(
    torch_engine: LocalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    items = {"type": "array", "items": {"type": "null"}, "uniqueItems": True, "maxItems": 1}
    schema = {"$defs": {"not": items}, "anyOf": [{"$ref": "#/$defs/not"}, {"type": "null"}]}

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch_engine.complete(PROMPT, max_tokens=3, structured_outputs={"json": schema})

    warnings = [r.getMessage() for r in caplog.records if "not enforced" in r.getMessage()]
    assert warnings == ["structured outputs: uniqueItems of a JSON schema is not enforced"]


def test_a_schema_that_takes_long_to_compile_is_refused_and_others_are_served(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_COMPILING_S", 2.0)
    body = {"prompt": PROMPT, "structured_outputs": {"json": MINUTES_TO_COMPILE}}

    answer = torch_engine.http.post("/v1/completions", json=body)

    assert answer.status_code == 400
    assert "compiling it takes more than 2 s" in answer.json()["error"]["message"]
    monkeypatch.undo()
    after = torch_engine.complete(PROMPT, structured_outputs={"choice": ["still here"]})
    assert after["choices"][0]["text"] == "still here"


def test_a_grammar_that_takes_long_ends_its_request(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_TOKEN_S", -1.0)  # after the second token, none is left
    body = {"prompt": PROMPT, "structured_outputs": {"regex": "[0-9]{9}"}, "n": 3}

    answer = torch_engine.http.post("/v1/completions", json=body)

    assert answer.status_code == 500
    assert "less ambiguous" in answer.json()["error"]["message"]
    assert torch_engine.complete(PROMPT, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_settings_that_leave_no_token_end_the_request(
    torch_engine: LocalEngine, tokenizer: Any
) -> None:
    body = {
        "prompt": PROMPT,
        "structured_outputs": {"regex": "[0-9]+"},
        "allowed_token_ids": tokenizer.encode("a"),
    }

    answer = torch_engine.http.post("/v1/completions", json=body)

    assert answer.status_code == 500
    assert "exclude every token that the grammar allows" in answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_the_compilation(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    compile_source = GrammarCompiler._compile

    async def recorded(self: GrammarCompiler, source: GrammarSource) -> grammars.Grammar:
        try:
            events.append("started")
            return await compile_source(self, source)
        except asyncio.CancelledError:
            events.append("cancelled")
            raise

    monkeypatch.setattr(GrammarCompiler, "_compile", recorded)
    body = {"prompt": PROMPT, "structured_outputs": {"json": {**MINUTES_TO_COMPILE, "title": "a"}}}
    request = torch_engine.http.build_request("POST", "/v1/completions", json=body)
    head = [f"{name}: {value}" for name, value in request.headers.items()]

    with socket.create_connection((request.url.host, request.url.port)) as client:
        lines = "\r\n".join(["POST /v1/completions HTTP/1.1", *head, "", ""])
        client.sendall(lines.encode() + request.content)
        wait_until(lambda: events)

    wait_until(lambda: events == ["started", "cancelled"])


@pytest.fixture
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, len(tokenizer), frozenset({tokenizer.eos_token_id}))
    yield made
    made.close()


async def test_a_kept_grammar_does_not_wait_for_another(compiler: GrammarCompiler) -> None:
    kept = await compiler.compile(GrammarSource("regex", "a+"))
    source = GrammarSource("json", json.dumps(MINUTES_TO_COMPILE))
    slow = asyncio.create_task(compiler.compile(source))
    await asyncio.sleep(0)  # until it waits for its process

    assert await compiler.compile(GrammarSource("regex", "a+")) is kept
    assert not slow.done()
    slow.cancel()


async def test_a_source_that_takes_too_long_is_tried_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_COMPILING_S", 2.0)
    source = GrammarSource("json", json.dumps(MINUTES_TO_COMPILE))
    with pytest.raises(GrammarError, match="takes more than 2 s"):
        await compiler.compile(source)
    monkeypatch.setattr(compiler, "_compile", None)

    with pytest.raises(GrammarError, match="takes more than 2 s"):
        await compiler.compile(source)


async def test_the_latest_grammars_are_kept(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_COMPILED_BYTES", 1)
    first, second = GrammarSource("regex", "a+"), GrammarSource("regex", "b+")

    compiled = [await compiler.compile(source) for source in (first, first, second, first)]

    assert compiled[0] is compiled[1]
    assert compiled[3] is not compiled[0]


async def test_closing_ends_the_process(compiler: GrammarCompiler) -> None:
    before = set(multiprocessing.active_children())
    await compiler.compile(GrammarSource("regex", "a+"))
    [started] = set(multiprocessing.active_children()) - before

    compiler.close()

    assert not started.is_alive()
