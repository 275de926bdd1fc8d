from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.openai_compatible import LIMIT_NAMES, WrongChoiceCountError
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_harness import create_chat_completion
from atroposlib.errors import ConfigError, InferenceError, NoTokenIdsError
from tests.fakes import Fault, ScriptedEngine

MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_chat_and_completion_return_the_engines_texts(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)

    chat = await server.chat_completion(messages=MESSAGES, n=2)
    text = await server.completion(prompt="hi")

    assert [choice.message.content for choice in chat.choices] == ["one", "two"]
    assert text.choices[0].text == "three"
    assert engine.requests[0].body["model"] == "scripted"
    assert engine.requests[0].body["n"] == 2


async def test_client_may_be_replaced_by_one_with_only_the_called_methods() -> None:
    async def create(**_: Any) -> ChatCompletion:
        return create_chat_completion("hello")

    server = OpenAIServer(APIServerConfig(base_url="http://h/v1", api_key="k", health_check=False))
    completions = SimpleNamespace(create=create)
    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=completions))
    server.openai = client

    chat = await server.chat_completion(messages=MESSAGES)

    assert chat.choices[0].message.content == "hello"


@pytest.mark.parametrize(
    ("method", "prompt"),
    [("chat_completion", {"messages": MESSAGES}), ("completion", {"prompt": "hi"})],
)
async def test_server_that_ignores_n_is_asked_once_per_choice(
    method: str, prompt: dict[str, Any], make_server: Callable[..., OpenAIServer]
) -> None:
    async with ScriptedEngine(["a"], honours_n=False) as engine:
        server = make_server(engine)
        call = getattr(server, method)

        with pytest.warns(UserWarning, match="ignores n"):
            first = await call(**prompt, n=4)
        assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
        assert server.config.n_kwarg_is_ignored
        assert len(engine.requests) == 4

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second = await call(**prompt, n=3)
        assert [choice.index for choice in second.choices] == [0, 1, 2]
        assert len(engine.requests) == 7

        await call(**prompt)
        assert len(engine.requests) == 8


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "provider overloaded", "code": 502}},
        {"choices": None, "error": {"message": "provider overloaded"}},
        {"choices": [{"index": 0, "message": None}], "error": {"message": "provider overloaded"}},
    ],
)
@pytest.mark.parametrize("n", [1, 2])
async def test_error_with_status_200_is_retried_and_quoted(
    answer: dict[str, Any], n: int, make_server: Callable[..., OpenAIServer]
) -> None:
    class OverloadedEngine(ScriptedEngine):
        num_overloads = 1

        def _chat(self, body: dict[str, Any], fault: Fault | None) -> dict[str, Any]:
            self.num_overloads -= 1
            return answer if self.num_overloads >= 0 else super()._chat(body, fault)

    engine = OverloadedEngine(["a"])
    async with engine:
        server = make_server(engine)
        server.config.n_kwarg_is_ignored = n > 1
        server.max_backoff_s = 0.0

        chat = await server.chat_completion(messages=MESSAGES, n=n)
        engine.num_overloads = 100
        with pytest.raises(InferenceError, match=r"without choices.*provider overloaded"):
            await server.chat_completion(messages=MESSAGES, n=n)

    assert len(chat.choices) == n
    assert server.attempts_list == [2]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_new_tokens"])
async def test_limit_of_any_name_is_sent_as_every_server_knows_it(
    name: str, engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)

    await server.chat_completion(messages=MESSAGES, **{name: 2})
    await server.completion(prompt="hi", **{name: 2})
    await server.chat_completion(messages=MESSAGES, **{name: -1})

    limits = [{k: v for k, v in r.body.items() if k.startswith("max_")} for r in engine.requests]
    assert limits == [{"max_tokens": 2}, {"max_tokens": 2}, {}]


async def test_server_that_refuses_the_name_of_the_limit_gets_the_other_from_then_on(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)
    refusal = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    engine.fail_next(Fault(status=400, message=refusal))

    for _ in range(2):
        await server.chat_completion(messages=MESSAGES, max_tokens=2)

    limits = [{k: v for k, v in r.body.items() if k.startswith("max_")} for r in engine.requests]
    assert limits == [{"max_tokens": 2}, *[{"max_completion_tokens": 2}] * 2]


@pytest.mark.parametrize("text", ["max_tokens is too large: 9", "Unsupported parameter: 'top_k'"])
async def test_other_refusals_are_not_tried_under_another_name(
    text: str, engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)
    engine.fail_next(Fault(status=400, message=text))

    with pytest.raises(Exception, match=re.escape(text)):
        await server.chat_completion(messages=MESSAGES, max_tokens=2)

    assert len(engine.requests) == 1


async def test_openai_itself_gets_the_name_that_the_caller_wrote() -> None:
    server = OpenAIServer(APIServerConfig(base_url="https://api.openai.com/v1", api_key="k"))

    names = [server._chat_limit_name({name: 2}) for name in LIMIT_NAMES]
    await server.close()

    assert names == list(LIMIT_NAMES)


async def test_server_that_honours_n_is_asked_once(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)

    answer = await server.chat_completion(messages=MESSAGES, n=4)

    assert len(answer.choices) == 4
    assert not server.config.n_kwarg_is_ignored
    assert len(engine.requests) == 1


async def test_ignored_n_is_remembered_if_warnings_are_errors(
    make_server: Callable[..., OpenAIServer],
) -> None:
    async with ScriptedEngine(["a"], honours_n=False) as engine:
        server = make_server(engine)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            answer = await server.chat_completion(messages=MESSAGES, n=4)

    assert len(answer.choices) == 4
    assert server.config.n_kwarg_is_ignored


async def test_seeded_requests_in_place_of_n_do_not_repeat_each_other(
    make_server: Callable[..., OpenAIServer],
) -> None:
    async with ScriptedEngine(["a"], honours_n=False) as engine:
        server = make_server(engine)

        with pytest.warns(UserWarning, match="ignores n"):
            await server.chat_completion(messages=MESSAGES, n=3, seed=7)
        await server.completion(prompt="hi", n=3, seed=7)

        assert sorted(request.body["seed"] for request in engine.requests) == [7, 7, 8, 8, 9, 9]


async def test_other_wrong_counts_are_an_error(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)

    async def create_two(**_: Any) -> Any:
        return await server.openai.chat.completions.create(model="m", messages=MESSAGES, n=2)

    with pytest.raises(WrongChoiceCountError, match="answered 2 choices, expected 5"):
        await server._with_n_choices(create_two, {"n": 5})


async def test_request_without_messages_or_prompt_is_a_programming_error(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine)

    with pytest.raises(AssertionError, match="messages"):
        await server.chat_completion(prompt="hi")
    with pytest.raises(AssertionError, match="prompt"):
        await server.completion(messages=MESSAGES)
    assert engine.requests == []


async def test_tokens_are_refused_with_the_remedy(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    with pytest.raises(NoTokenIdsError, match="server_type vllm"):
        await make_server(engine).tokens_and_logprobs_completion(prompt="hi")


def test_missing_key_names_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_ADMIN_KEY", raising=False)

    with pytest.raises(ConfigError, match=r"set api_key, or OPENAI_API_KEY, or base_url"):
        OpenAIServer(APIServerConfig())


def test_empty_defaults_use_the_clients_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    server = OpenAIServer(APIServerConfig())

    assert server.openai.api_key == "from-environment"  # pragma: allowlist secret
    assert str(server.openai.base_url) == "https://api.openai.com/v1/"


async def test_key_is_sent_as_a_bearer_token(
    engine: ScriptedEngine, make_server: Callable[..., OpenAIServer]
) -> None:
    server = make_server(engine, api_key="sk-1")

    await server.completion(prompt="hi")

    assert engine.requests[0].headers["Authorization"] == "Bearer sk-1"
