from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.retry import EngineStatusError, RetriesExhaustedError
from atroposlib.envs.server_handling.server_manager import TrlVllmServer as ReExported
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.errors import ConfigError, InferenceError, NoTokenIdsError
from tests.fakes import CharTokenizer, Fault, ScriptedEngine, ScriptedTrl

MakeServer = Callable[..., TrlVllmServer]
MODULE = "atroposlib.envs.server_handling.trl_vllm_server"
MESSAGES = [{"role": "user", "content": "hi"}]


class JsonOnly:
    """A response, and the context around it, of which only `json()` is known."""

    async def __aenter__(self) -> JsonOnly:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def json(self) -> dict[str, Any]:
        return {"completion_ids": [[1, 2, 3]]}


class PatchedSession:
    """What acceptance tests put in place of `aiohttp.ClientSession`."""

    async def __aenter__(self) -> PatchedSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def post(self, url: str, json: Any = None, **_: Any) -> JsonOnly:
        return JsonOnly()


@pytest.fixture
def patched_server() -> Iterator[TrlVllmServer]:
    """A server built outside of any event loop, its tokenizer class patched while it is built."""
    config = APIServerConfig(
        api_key="x", base_url="http://localhost:8000", model_name="test-model", timeout=30
    )
    tokenizer = MagicMock(eos_token_id=2)
    tokenizer.apply_chat_template.return_value = "prompt"
    tokenizer.decode.return_value = "decoded"
    with patch(f"{MODULE}.AutoTokenizer") as tokenizers:
        tokenizers.from_pretrained.return_value = tokenizer
        server = TrlVllmServer(config)
    with patch(f"{MODULE}.aiohttp.ClientSession", PatchedSession):
        yield server


async def test_completion_is_decoded_text(patched_server: TrlVllmServer) -> None:
    answer = await patched_server._completion_wrapper(prompt="Hello")

    assert answer.choices[0].text == "decoded"
    assert answer.object == "text_completion"


async def test_chat_is_decoded_text_of_the_rendered_prompt(patched_server: TrlVllmServer) -> None:
    answer = await patched_server._chat_completion_wrapper(messages=MESSAGES)

    assert answer.choices[0].message.content == "decoded"
    patched_server.tokenizer.apply_chat_template.assert_called_once_with(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )


async def test_public_calls_need_no_more_of_a_replaced_session(
    patched_server: TrlVllmServer,
) -> None:
    text = await patched_server.completion(prompt="Hello")
    chat = await patched_server.chat_completion(messages=MESSAGES)

    assert text.choices[0].text == chat.choices[0].message.content == "decoded"
    assert patched_server.attempts_list == [1, 1]


@pytest.mark.parametrize("ids", [None, ["a"], [-4], [2**70]])
async def test_ids_that_cannot_be_tokens_are_refused(
    ids: Any, patched_server: TrlVllmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def json_of_answer(_: JsonOnly) -> dict[str, Any]:
        return {"completion_ids": [ids]}

    monkeypatch.setattr(JsonOnly, "json", json_of_answer)

    with pytest.raises(InferenceError, match="completion_ids are not integers"):
        await patched_server._completion_wrapper(prompt="Hello")


@pytest.fixture
async def trl() -> AsyncIterator[ScriptedTrl]:
    async with ScriptedTrl(["ok"]) as running:
        yield running


async def test_older_routes_are_sent_every_option_with_its_default(
    trl: ScriptedTrl, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(trl, TrlVllmServer, api_key="sk-1")

    for _ in range(2):
        await server.completion(prompt="hi", n=2, temperature=0.5, max_new_tokens=9, stop=["x"])

    request = trl.requests[-1]
    assert request.body == {
        "prompts": ["hi"],
        "n": 2,
        "repetition_penalty": 1.0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_tokens": 9,
    }
    assert request.headers["Authorization"] == "Bearer sk-1"
    assert caplog.text.count("ignores unsupported stop") == 1


@pytest.mark.parametrize(("max_tokens", "reason"), [(9, "stop"), (2, "length")])
async def test_text_has_no_special_tokens_and_ends_as_the_ids_do(
    max_tokens: int, reason: str, trl: ScriptedTrl, make_server: MakeServer
) -> None:
    server = make_server(trl, TrlVllmServer)

    chat = await server.chat_completion(messages=MESSAGES, n=2, max_tokens=max_tokens)
    text = await server.completion(prompt="hi", max_tokens=max_tokens)

    assert [choice.message.content for choice in chat.choices] == ["ok", "ok"]
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("ok", reason)
    assert chat.model == text.model == "scripted"
    assert chat.id != text.id
    assert trl.requests[-2].body["prompts"] == ["[user]hi</s>\n[assistant]"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_older_route_is_found_below_the_address_as_written_or_its_root(
    prefix: str, make_server: MakeServer
) -> None:
    engine = ScriptedTrl(["ok"])
    engine.prefix = prefix
    async with engine:
        server = make_server(engine, TrlVllmServer)

        await server.completion(prompt="hi")

        assert engine.requests[-1].path == f"{prefix}/generate/"


async def test_kind_of_server_is_looked_for_once_by_many_requests(
    trl: ScriptedTrl, make_server: MakeServer
) -> None:
    server = make_server(trl, TrlVllmServer)

    await asyncio.gather(*(server.completion(prompt="hi") for _ in range(10)))

    assert [request.body["max_tokens"] for request in trl.requests] == [1] + [1024] * 10


@pytest.mark.parametrize("method", ["tokens_and_logprobs_completion", "get_logprobs"])
async def test_older_routes_give_no_logprobs_and_say_what_does(
    method: str, trl: ScriptedTrl, make_server: MakeServer
) -> None:
    with pytest.raises(NoTokenIdsError, match="server_type vllm"):
        await getattr(make_server(trl, TrlVllmServer), method)(prompt="hi")


@pytest.mark.parametrize("has_v1", [True, False])
async def test_server_of_today_is_used_as_the_vllm_it_is(
    has_v1: bool, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    base_url = engine.base_url if has_v1 else engine.root_url
    server = TrlVllmServer(APIServerConfig(base_url=base_url, model_name="scripted"))
    server.tokenizer = CharTokenizer()

    chat = await server.chat_completion(messages=MESSAGES)
    text = await server.completion(prompt="hi")
    _, ids, logprobs, _ = await server.tokens_and_logprobs_completion(prompt="hi", max_tokens=3)
    rows = await server.get_logprobs(input_ids=[5, 6])
    await server.close()

    assert (chat.choices[0].message.content, text.choices[0].text) == ("one", "two")
    assert len(ids[0]) == len(logprobs[0]) == 3
    assert len(rows["prompt_topk_token_ids"]) == 2


async def test_server_of_neither_kind_is_refused_with_what_was_tried(
    make_server: MakeServer,
) -> None:
    engine = ScriptedTrl(["ok"])
    engine.prefix = "/elsewhere"
    async with engine:
        server = make_server(engine, TrlVllmServer)

        with pytest.raises(ConfigError, match=r"neither TRL's /generate/ nor .*check base_url"):
            await server.completion(prompt="hi")


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault("drop"), Fault("garbage"), Fault("fewer_choices")]
)
@pytest.mark.parametrize("is_known", [True, False])
async def test_passing_fault_is_retried(
    fault: Fault, is_known: bool, trl: ScriptedTrl, make_server: MakeServer
) -> None:
    server = make_server(trl, TrlVllmServer)
    if is_known:
        await server.completion(prompt="hi")
    trl.fail_next(fault)

    answer = await server.completion(prompt="hi", n=2)

    assert [choice.text for choice in answer.choices] == ["ok", "ok"]


async def test_fault_during_the_search_is_not_taken_for_an_answer(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, TrlVllmServer)
    engine.healthy = False  # `/v1/models` answers 503 as well

    request = asyncio.create_task(server.completion(prompt="hi"))
    await asyncio.sleep(0.05)
    engine.healthy = True

    assert (await request).choices[0].text == "one"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("fewer_choices"), "answered 1 completions, not 2"),
        (Fault("garbage"), "JSONDecodeError"),
        (Fault(status=500, message="out of memory"), "out of memory"),
    ],
)
async def test_lasting_fault_ends_after_three_attempts_with_its_cause(
    fault: Fault, said: str, trl: ScriptedTrl, make_server: MakeServer
) -> None:
    server = make_server(trl, TrlVllmServer)
    await server.completion(prompt="hi")
    trl.fail_next(*[fault] * 3)

    with pytest.raises(RetriesExhaustedError, match=said):
        await server.completion(prompt="hi", n=2)


async def test_hang_past_the_timeout_counts_as_an_attempt(
    trl: ScriptedTrl, make_server: MakeServer
) -> None:
    server = make_server(trl, TrlVllmServer)
    await server.completion(prompt="hi")
    trl.fail_next(Fault("hang"))

    await server.completion(prompt="hi", timeout=0.05)

    assert server.attempts_list == [1, 2]


async def test_refusal_is_raised_at_once(trl: ScriptedTrl, make_server: MakeServer) -> None:
    server = make_server(trl, TrlVllmServer)
    await server.completion(prompt="hi")
    trl.fail_next(Fault(status=422, message="n must be positive"))

    with pytest.raises(EngineStatusError, match=r"/generate/ answered 422: .*n must be positive"):
        await server.completion(prompt="hi")


async def test_server_that_goes_down_and_comes_back_loses_no_request(
    trl: ScriptedTrl, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(trl, TrlVllmServer)
    await server.completion(prompt="hi")
    caplog.set_level(logging.INFO)
    await trl.stop()

    request = asyncio.create_task(server.completion(prompt="hi"))
    await asyncio.sleep(0.05)
    assert not request.done()
    await trl.start(trl.port)

    assert (await request).choices[0].text == "ok"
    assert "answers again" in caplog.text


def test_tokenizer_name_wins_over_the_model_name(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", loaded.append)
    config = APIServerConfig(base_url="http://a", model_name="m", tokenizer_name="org/tokenizer")

    assert TrlVllmServer(config).tokenizer is None

    assert loaded == ["org/tokenizer"]


def test_public_names_are_where_users_import_them() -> None:
    assert ReExported is TrlVllmServer
    assert not issubclass(TrlVllmServer, OpenAIServer)
