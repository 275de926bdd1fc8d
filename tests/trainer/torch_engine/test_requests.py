"""Requests that the torch engine refuses, its bounds, and the routes without generation."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.api.concurrency import EngineReading
from atroposlib.api.engines import read_metrics
from example_trainer.torch_engine import protocol
from example_trainer.torch_engine.protocol import (
    MAX_COMPLETIONS,
    ChatFields,
    DetokenizeFields,
    EngineRefusal,
    TextFields,
    TokenizeFields,
    UpdateFields,
    parse_body,
)
from tests.end_to_end.conftest import MAX_MODEL_LEN
from tests.trainer.torch_engine.conftest import LocalEngine

pytestmark = pytest.mark.slow

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def refused(local: LocalEngine, path: str, body: Any, status: int = 400) -> str:
    """Return the message of an error in the shape of OpenAI's."""
    answer = local.http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    return str(error["message"])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "0 prompts"),
        ({"prompt": [[]]}, "at least one token"),
        ({"prompt": ""}, "at least one token"),
        ({"prompt": [1, -1]}, "out of vocabulary"),
        ({"prompt": [1, 10**9]}, "out of vocabulary"),
        ({"prompt": [1, 1.5]}, "prompt: expected a token id at position 1"),
        ({"prompt": [1, True]}, "prompt: expected a token id at position 1"),
        ({"prompt": ["a", 1]}, "prompt: expected a text at position 1"),
        ({"prompt": [[1], [2, None]]}, "prompt: expected a token id at position 1.1"),
        ({"prompt": [[1], "a"]}, "prompt: expected a list of token ids at position 1"),
        ({"prompt": [None]}, "prompt: expected a text, a list of token ids"),
        ({"prompt": {}}, "prompt: expected a text, a list of token ids"),
        ({"prompt": [[]] * (MAX_COMPLETIONS + 1)}, f"at most {MAX_COMPLETIONS} prompts"),
        ({"prompt": [1], "n": 0}, "n:"),
        ({"prompt": [1], "n": MAX_COMPLETIONS + 1}, "n:"),
        ({"prompt": [[1]] * MAX_COMPLETIONS, "n": 2}, "completions"),
        ({"prompt": [1], "max_tokens": -1}, "max_tokens"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1], "max_tokens": True}, "max_tokens"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "top_p": 0}, "top_p"),
        ({"prompt": [1], "top_p": 1.1}, "top_p"),
        ({"prompt": [1], "top_k": -2}, "top_k"),
        ({"prompt": [1], "min_p": 2}, "min_p"),
        ({"prompt": [1], "seed": 2**70}, "seed"),
        ({"prompt": [1], "stop": ["a"] * 65}, "stop"),
        ({"prompt": [1], "stop": "a" * 2000}, "stop"),
        ({"prompt": [1], "stop_token_ids": [10**9]}, "stop_token_ids"),
        ({"prompt": [1], "logit_bias": {"999999": 1}}, "logit_bias"),
        ({"prompt": [1], "logprobs": 21}, "--max-logprobs"),
        ({"prompt": [1], "prompt_logprobs": 21}, "--max-logprobs"),
        ({"prompt": [1], "echo": True, "stream": True}, "echo"),
        ({"prompt": "a" * 10**6}, "characters cannot fit"),
        ({"prompt": [[1] * 200] * MAX_COMPLETIONS, "prompt_logprobs": 20}, "send fewer prompts"),
        ({"prompt": [1] * 200, "n": MAX_COMPLETIONS, "prompt_logprobs": 20}, "lower n"),
        ({"prompt": [1] * 200, "n": 512, "echo": True, "logprobs": 20}, "lower n"),
        ({"prompt": [1], "bad_words": [""]}, "bad_words"),
        ({"prompt": [1], "bad_words": ["a"] * 1025}, "bad_words"),
        ({"prompt": [1], "bad_words": ["a" * 129]}, "bad_words"),
        ({"prompt": [1], "best_of": 2}, "best_of is not supported"),
        ({"prompt": [1], "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": [1], "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": [1], "min_tokens": 17}, "min_tokens must be at most max_tokens=16"),
        ({"prompt": [1], "allowed_token_ids": []}, "allowed_token_ids"),
        (
            {"prompt": [1], "allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 2},
            "only tokens that end a completion",
        ),
        ({"prompt": [1], "allowed_token_ids": [10**9]}, "out of vocabulary"),
        ({"prompt": [1], "response_format": {"type": "xml"}}, "response_format: expected the type"),
        ({"prompt": [1], "guided_regex": "a+"}, "guided_regex is not supported"),
        ([1], "JSON object"),
    ],
)
def test_a_bad_text_request_is_answered_with_the_field(
    torch_engine: LocalEngine, body: Any, named: str
) -> None:
    assert named in refused(torch_engine, TEXT, body)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "--max-logprobs"),
        ({"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}, "tokenize"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "a" * 10**6}]}, "characters cannot fit"),
        ({"messages": HELLO, "tools": [{"a": "b" * 10**6}]}, "characters cannot fit"),
    ],
)
def test_a_bad_chat_request_is_answered_with_the_field(
    torch_engine: LocalEngine, body: Any, named: str
) -> None:
    assert named in refused(torch_engine, CHAT, body)


def test_a_setting_of_templates_that_is_reserved_is_named(torch_engine: LocalEngine) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}

    error = torch_engine.http.post(CHAT, json=body).json()["error"]

    assert error["message"] == "chat_template_kwargs: tokenize cannot be set here"
    assert error["param"] == "chat_template_kwargs"


MANY = 20_000


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        (TextFields, {"prompt": [None] * MANY}),
        (TextFields, {"prompt": [1, *[None] * MANY]}),
        (TextFields, {"prompt": [[None] * MANY]}),
        (TextFields, {"prompt": [[]] * MANY}),
        (TextFields, {"prompt": [1], "logit_bias": {f"x{i}": None for i in range(MANY)}}),
        (ChatFields, {"messages": [0] * MANY}),
        (ChatFields, {"messages": HELLO, "tools": [0] * MANY}),
        (TokenizeFields, {"messages": [0] * MANY}),
        (TokenizeFields, {"tools": [0] * MANY}),
        (DetokenizeFields, {"tokens": [None] * MANY}),
        (UpdateFields, {f"x{i}": 0 for i in range(MANY)}),
    ],
)
def test_parse_body_with_many_bad_elements_keeps_one_error(
    fields: type[Any], body: dict[str, Any]
) -> None:
    with pytest.raises(EngineRefusal) as refusal:
        parse_body(fields, body)

    found = refusal.value.__cause__
    assert found is None or (isinstance(found, ValidationError) and found.error_count() == 1)
    assert len(str(refusal.value)) < 200


def test_ignored_fields_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_noted", set())  # as in a new process
    for _ in range(2):
        parse_body(TextFields, {"prompt": [1], "temprature": 0.7, "guided\x1b": 1, "best_of": 1})

    assert sorted(record.message for record in caplog.records) == [
        "field guided\N{SYMBOL FOR ESCAPE} of a request is ignored",
        "field temprature of a request is ignored; did you mean temperature?",
    ]


def test_arguments_of_a_tool_that_json_cannot_represent_are_refused(
    torch_engine: LocalEngine,
) -> None:
    call = {"function": {"name": "a", "arguments": '"\\ud800"'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}

    assert "messages" in refused(torch_engine, CHAT, {"messages": [*HELLO, message]})


def test_choices_of_a_prompt_share_its_logprobs_while_the_answer_is_built(
    torch_engine: LocalEngine,
) -> None:
    from example_trainer.torch_engine.answers import AnswerWriter
    from example_trainer.torch_engine.jobs import Completion, Job, PromptRequest

    fields = TextFields(prompt=[5, 6], n=2, echo=True, logprobs=1, prompt_logprobs=1)
    request = PromptRequest((5, 6), num_completions=2, num_top=1, prompt_top=1)
    job = Job(request, on_done=lambda _: None)
    job.prompt_logprobs = [(-1.0, [(7, -0.5)])]
    job.completions = [Completion(request, index, random.Random(0)) for index in range(2)]

    first, second = AnswerWriter(fields, torch_engine.state.served).whole([job])["choices"]

    assert first["prompt_logprobs"] is second["prompt_logprobs"]
    assert first["prompt_logprobs"][1]["7"]["logprob"] == -0.5
    rows, others = first["logprobs"]["top_logprobs"], second["logprobs"]["top_logprobs"]
    assert rows == others
    assert rows[1] is others[1]


def test_a_large_answer_is_that_of_its_parts(torch_engine: LocalEngine) -> None:
    prompt = [9, *range(30, 130)]
    options = {"max_tokens": 2, "echo": True, "logprobs": 20, "seed": 3}

    many = torch_engine.complete([prompt] * 10, **options)["choices"]
    [one] = torch_engine.complete(prompt, **options)["choices"]

    assert len(many) == 10
    for choice in many:
        assert choice["logprobs"]["tokens"] == one["logprobs"]["tokens"]
        assert choice["logprobs"]["text_offset"] == one["logprobs"]["text_offset"]


def test_a_prompt_beyond_the_context_is_refused_in_the_words_of_vllm(
    torch_engine: LocalEngine,
) -> None:
    message = refused(torch_engine, TEXT, {"prompt": [5] * 250, "max_tokens": 10})

    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in message
    assert "prompt contains 250 input tokens" in message


def test_an_unknown_model_is_not_found(torch_engine: LocalEngine) -> None:
    body = {"model": "other", "prompt": [1]}

    assert "`other` does not exist" in refused(torch_engine, TEXT, body, status=404)


def test_large_and_broken_bodies_are_refused(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastapi.testclient import TestClient

    from example_trainer.torch_engine.server import create_app

    post = torch_engine.http.post
    for body in (b"{", b"[" * 100_000, b"\xff\xfe", b'{"prompt": "\\ud800"}'):
        assert post(TEXT, content=body).status_code == 400

    monkeypatch.setattr("example_trainer.torch_engine.server.MAX_BODY_BYTES", 100_000)
    client = TestClient(create_app(torch_engine.state, has_update_routes=False))
    for large in (b" " * 100_001, iter([b" " * 60_000] * 2)):
        answer = client.post(TEXT, content=large)
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert (error["code"], error["message"]) == (
            413,
            "request body larger than 100000 bytes",
        )


def test_a_body_that_comes_too_slowly_is_refused_in_the_shape_of_openai(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atroposlib.utils.request_limits import Pace

    monkeypatch.setattr(Pace, "grace_s", 0.05)
    host, _, port = torch_engine.url.removeprefix("http://").partition(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"

    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(f"{head}Content-Length: 100000\r\n\r\n{{".encode())
        answer = connection.recv(65536)
        while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
            answer += connection.recv(65536)

    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408


def test_a_name_of_a_proxy_can_be_allowed(torch_engine: LocalEngine) -> None:
    from fastapi.testclient import TestClient

    from example_trainer.torch_engine.server import create_app

    headers = {"Host": "engine.example.org"}
    app = create_app(
        torch_engine.state, has_update_routes=False, allowed_hosts=["engine.example.org"]
    )
    client = TestClient(app, base_url="http://127.0.0.1:9001")

    assert client.get("/health", headers=headers).status_code == 200
    refused = torch_engine.http.get("/health", headers=headers)
    assert refused.status_code == 403
    assert "--allowed-host engine.example.org" in refused.json()["error"]["message"]


def test_prompts_after_one_that_is_refused_are_not_encoded(
    torch_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []

    def encode(_: Any, text: str, **__: Any) -> list[int]:
        encoded.append(text)
        return [1] * 10**4

    monkeypatch.setattr("example_trainer.torch_engine.protocol.encode_text", encode)

    assert "maximum context" in refused(torch_engine, TEXT, {"prompt": ["a"] * MAX_COMPLETIONS})
    assert encoded == ["a"]


def test_a_client_that_disconnects_while_it_sends_its_body_is_not_an_error(
    torch_engine: LocalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    from example_trainer.torch_engine.server import create_app

    sent: list[Any] = []
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": TEXT,
        "query_string": b"",
        "headers": headers,
    }

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = create_app(torch_engine.state, has_update_routes=False)
    asyncio.run(app(scope, receive, send))

    assert sent[0]["status"] == 499
    assert not caplog.records


def test_a_setting_beyond_any_vocabulary_does_not_end_other_requests(
    torch_engine: LocalEngine,
) -> None:
    choice = torch_engine.complete([9, 30], max_tokens=3, top_k=10**30)["choices"][0]

    assert choice["finish_reason"] == "length"


def test_messages_of_unusual_structure_are_not_errors_of_the_server(
    torch_engine: LocalEngine,
) -> None:
    nested = {"function": {"name": "a", "arguments": "[" * 100_000}}
    message = {"role": "assistant", "content": "", "tool_calls": [nested]}

    for messages in ([], [message]):
        answer = torch_engine.http.post("/tokenize", json={"messages": messages})
        assert answer.status_code == 400
        assert "messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
    ],
)
def test_web_pages_cannot_update_weights(
    torch_engine: LocalEngine, headers: dict[str, str], status: int
) -> None:
    body = b'{"method": "reload_weights", "kwargs": {"weights_path": "/tmp"}}'
    headers = {"Content-Type": "application/json", **headers}

    answer = torch_engine.http.post("/collective_rpc", content=body, headers=headers)

    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


def test_stop_ids_end_a_completion_and_are_not_part_of_its_text(
    torch_engine: LocalEngine, tokenizer: Any
) -> None:
    free = torch_engine.complete([9, 30], max_tokens=30, temperature=0, ignore_eos=True)
    tokens = free["choices"][0]["token_ids"]
    stop = tokens[10]
    length = tokens.index(stop) + 1

    answer = torch_engine.complete([9, 30], max_tokens=30, temperature=0, stop_token_ids=[stop])

    [choice] = answer["choices"]
    assert choice["token_ids"] == tokens[:length]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["text"] == tokenizer.decode(tokens[: length - 1], skip_special_tokens=True)


def test_the_end_of_the_turn_has_no_stop_reason(torch_engine: LocalEngine, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id

    answer = torch_engine.complete([9, 30], max_tokens=30, logit_bias={str(end): 100.0})

    [choice] = answer["choices"]
    assert choice["token_ids"] == [end]
    assert (choice["finish_reason"], choice["stop_reason"], choice["text"]) == ("stop", None, "")


def test_tokenize_and_detokenize_are_inverse(torch_engine: LocalEngine, tokenizer: Any) -> None:
    post = torch_engine.http.post

    text = post("/tokenize", json={"prompt": "It is 12."}).json()
    chat = post("/tokenize", json={"messages": HELLO}).json()

    assert text["tokens"] == tokenizer.encode("It is 12.")
    assert text["count"] == len(text["tokens"])
    assert text["max_model_len"] == MAX_MODEL_LEN
    rendered = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert chat["tokens"] == tokenizer.encode(rendered)
    assert post("/detokenize", json={"tokens": text["tokens"]}).json() == {"prompt": "It is 12."}
    assert "prompt or messages" in refused(torch_engine, "/tokenize", {})


def test_tools_and_arguments_reach_the_template(torch_engine: LocalEngine, tokenizer: Any) -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "add_generation_prompt": False,
    }
    served = torch_engine.tokenizer
    original, served.chat_template = served.chat_template, template
    try:
        tokens = torch_engine.http.post("/tokenize", json=body).json()["tokens"]
    finally:
        served.chat_template = original

    assert tokenizer.decode(tokens) == "f;HelloRome"


def test_texts_reach_a_template_that_reads_only_parts(
    torch_engine: LocalEngine, tokenizer: Any
) -> None:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    served = torch_engine.tokenizer
    original, served.chat_template = served.chat_template, template
    try:
        tokens = torch_engine.http.post("/tokenize", json={"messages": HELLO}).json()["tokens"]
    finally:
        served.chat_template = original

    assert tokenizer.decode(tokens) == "Hello"


def test_facts_of_the_engine(torch_engine: LocalEngine) -> None:
    get = torch_engine.http.get

    assert get("/health").status_code == 200
    assert get("/v1/models").json()["data"][0]["max_model_len"] == MAX_MODEL_LEN
    info = get("/server_info").json()
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["torch_engine"]["takes_weight_version"] is True
    assert get("/version").json()["version"]
    metrics = get("/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0' in metrics
    assert read_metrics(metrics)._replace(cache_use=0.0) == EngineReading(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/collective_rpc", {}, "method"),
        ("/collective_rpc", {"method": "sleep"}, "method"),
        ("/collective_rpc", {"method": "reload_weights"}, "kwargs"),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {}}, "weights_path"),
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": "x", "more": 1}},
            "more",
        ),
        ("/pause?mode=later", {}, "mode"),
    ],
)
def test_bad_update_requests_are_refused(
    torch_engine: LocalEngine, path: str, body: Any, named: str
) -> None:
    assert named in refused(torch_engine, path, body)


def test_update_routes_exist_only_where_they_are_offered(torch_engine: LocalEngine) -> None:
    from fastapi.testclient import TestClient

    from atroposlib.utils.listening import is_loopback
    from example_trainer.torch_engine.server import create_app

    client = TestClient(create_app(torch_engine.state, has_update_routes=False))

    assert client.post("/collective_rpc", json={}).status_code == 404
    assert client.post("/pause").status_code == 404
    assert [is_loopback(host) for host in ("127.0.0.1", "localhost", "::1")] == [True] * 3
    assert not is_loopback("0.0.0.0")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder"),
        (["--model", "FOLDER", "--device", "cuda:77"], "--device cuda:77"),
        (["--model", "FOLDER", "--max-model-len", "100000"], "--max-model-len 100000"),
        (["--model", "FOLDER", "--kv-cache-memory-bytes", "1000"], "--kv-cache-memory-bytes"),
    ],
)
def test_settings_that_cannot_work_end_in_one_line(
    model_folder: Path,
    free_port: int,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    named: str,
) -> None:
    from example_trainer.torch_engine.__main__ import main

    given = [str(model_folder) if word == "FOLDER" else word for word in words]

    with pytest.raises(SystemExit) as ended:
        main([*given, "--port", str(free_port)])

    assert ended.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert named in line


def test_a_port_in_use_is_reported_before_the_model_is_loaded(
    torch_engine: LocalEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    from example_trainer.torch_engine.__main__ import main

    port = torch_engine.url.rpartition(":")[2]

    with pytest.raises(SystemExit) as ended:
        main(["--model", "/no/such/folder", "--port", port])

    assert ended.value.code == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert f"port {port} is in use" in line


def test_lines_of_libraries_with_a_handler_are_logged_once(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import logging as hub_logging

    from example_trainer.torch_engine.__main__ import main

    logger = hub_logging.get_logger()
    monkeypatch.setattr(logger, "propagate", True)

    with pytest.raises(SystemExit):
        main(["--model", "/no/such/folder", "--port", str(free_port)])

    assert not logger.propagate


def test_a_model_with_other_attention_is_refused_at_the_start(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    from atroposlib.errors import ConfigError
    from example_trainer.demo.settings import train_tokenizer
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

    tokenizer = train_tokenizer([[{"role": "user", "content": "a"}]], max_length=64)
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=r"Gemma2ForCausalLM.*softcap"):
        load_engine(TorchEngineOptions(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        pytest.param(
            "gptj",
            {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "rotary_dim": 8},
            r"GPTJForCausalLM: it has attention layers of its own; use vLLM",
            id="own attention",
        ),
        pytest.param(
            "diffllama",  # each prompt alone is right, what is generated after it is not
            {},
            r"DiffLlamaForCausalLM: a logprob .* all tokens at once",
            id="own cache",
        ),
        pytest.param(
            "llama4_text",
            {"layer_types": ["chunked_attention", "full_attention"], "num_local_experts": 2},
            r"Llama4ForCausalLM: it has no caches for layers of chunked_attention; use vLLM",
            id="chunks",
        ),
        pytest.param(
            "cpmant",  # its logits have fewer entries than its embedding
            {"hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 32},
            r"CpmAntForCausalLM: RuntimeError: index 1.* out of bounds",
            id="error of its code",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_at_the_start(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from atroposlib.errors import ConfigError
    from example_trainer.demo.settings import train_tokenizer
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

    tokenizer = train_tokenizer([[{"role": "user", "content": "a"}]], max_length=64)
    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = {
        **{name: value for name, value in SMALL.items() if name in known},
        **{"vocab_size": 8 if kind == "cpmant" else len(tokenizer), "pad_token_id": 0},
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **settings}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=reason):
        load_engine(TorchEngineOptions(model=str(tmp_path), device="cpu"))


def test_a_window_that_only_a_mask_knows_is_refused_if_the_context_exceeds_it(
    tmp_path: Path,
) -> None:
    import torch
    from transformers import OlmoeConfig, OlmoeForCausalLM

    from atroposlib.errors import ConfigError
    from example_trainer.demo.settings import train_tokenizer
    from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

    tokenizer = train_tokenizer([[{"role": "user", "content": "a"}]], max_length=64)
    config = OlmoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, num_experts=2,
        num_experts_per_tok=1, sliding_window=20, eos_token_id=None, bos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)  # where two experts are about equal, rounding decides between them
    model = OlmoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def load(max_model_len: int) -> None:
        options = TorchEngineOptions(model=str(tmp_path), device="cpu", max_model_len=max_model_len)
        load_engine(options).engine.close()

    with pytest.raises(ConfigError, match=r"OlmoeForCausalLM: a logprob differs"):
        load(max_model_len=64)
    load(max_model_len=20)


SMALL = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "sliding_window": 8,
    "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
        (  # the layers differ in their heads, and the last ones have keys of earlier ones
            "gemma4_text",
            {
                "num_hidden_layers": 4,
                "num_kv_shared_layers": 2,
                "head_dim": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
        ),
    ],
)
def test_models_with_windows_shared_heads_and_sinks_are_served(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from example_trainer.demo.settings import train_tokenizer
    from tests.trainer.torch_engine.conftest import serve_locally

    tokenizer = train_tokenizer([[{"role": "user", "content": "a"}]], max_length=256)
    config = CONFIG_MAPPING[kind](vocab_size=len(tokenizer), **{**SMALL, **settings})
    torch.manual_seed(0)  # where two experts are about equal, rounding decides between them
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            parameter.mul_(5 if parameter.dim() > 1 else 1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    with serve_locally(tmp_path) as local:
        options = {"max_tokens": 40, "ignore_eos": True, "seed": 0}
        answer = local.complete([list(range(3, 33)), [4]], **options)
        earlier = answer["choices"][0]["token_ids"]
        prompt = [*range(3, 33), *earlier, *range(5, 25)]
        cached = local.engine.counts().cached_tokens
        continued = local.complete(prompt, **options)
        assert local.engine.counts().cached_tokens == cached + 69  # the last one was not computed

    for choice in (*answer["choices"], *continued["choices"]):
        prompt, tokens = choice["prompt_token_ids"], choice["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        found = choice["logprobs"]["token_logprobs"]
        assert found == pytest.approx(logprobs.tolist(), abs=1e-4)
