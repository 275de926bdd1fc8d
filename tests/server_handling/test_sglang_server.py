from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.retry import EngineStatusError, RetriesExhaustedError
from atroposlib.envs.server_handling.server_baseline import VersionedTokens
from atroposlib.envs.server_handling.server_manager import SGLangServer as ReExported
from atroposlib.envs.server_handling.sglang_server import (
    SGLangServer,
    parse_prompt_logprobs,
    parse_tokens,
    resolve_openai_configs,
)
from atroposlib.errors import ConfigError, ContextOverflowError, InferenceError
from tests.fakes import Fault, ScriptedEngine, ScriptedSGLang, logprob_of

MakeServer = Callable[..., SGLangServer]

# `hi` with bos, and the reply `ok` with its eos.
PROMPT_IDS = [1, 104, 105]
REPLY_IDS = [111, 107, 2]
REPLY_LOGPROBS = [logprob_of(token, t) for t, token in enumerate(REPLY_IDS)]
STOP = {"type": "stop", "matched": 2}


@pytest.fixture
async def sglang() -> AsyncIterator[ScriptedSGLang]:
    async with ScriptedSGLang(["ok"]) as running:
        yield running


@pytest.mark.parametrize("n", [1, 3])
async def test_tokens_and_finish_reasons_are_the_engines(
    n: int, sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    server = make_server(sglang, SGLangServer)

    answer = await server.tokens_and_logprobs_completion(prompt="<s>hi", n=n, max_tokens=9)

    assert answer == (PROMPT_IDS, [REPLY_IDS] * n, [REPLY_LOGPROBS] * n, [STOP] * n)
    assert [request.path for request in sglang.requests] == ["/generate"]


async def test_request_has_the_shape_of_the_contract(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    server = make_server(sglang, SGLangServer, api_key="sk-1")

    await server.tokens_and_logprobs_completion(
        prompt="ignored", input_ids=[9, 8], max_completion_tokens=4, stop=["x"], seed=3
    )

    request = sglang.requests[0]
    assert request.body == {
        "input_ids": [9, 8],
        "sampling_params": {"stop": ["x"], "sampling_seed": 3, "max_new_tokens": 4},
        "return_logprob": True,
        "return_text_in_logprobs": False,
    }
    assert request.headers["Authorization"] == "Bearer sk-1"


async def test_unlimited_request_leaves_the_limit_to_the_engine(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    await make_server(sglang, SGLangServer).tokens_and_logprobs_completion(
        prompt="hi", max_tokens=-1
    )

    assert sglang.requests[0].body["sampling_params"] == {"max_new_tokens": None}


@pytest.mark.parametrize("version", ["step-7", None])
async def test_weight_version_comes_with_each_completion(
    version: str | None, sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    sglang.weight_version = version

    answer = await make_server(sglang, SGLangServer).tokens_and_logprobs_completion(
        prompt="hi", n=2
    )

    assert isinstance(answer, VersionedTokens)
    assert answer.weight_versions == [version] * 2


async def test_chat_and_text_go_through_the_openai_routes(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    server = make_server(sglang, SGLangServer)

    chat = await server.chat_completion(messages=[{"role": "user", "content": "hi"}])
    text = await server.completion(prompt="hi")

    assert (chat.choices[0].message.content, text.choices[0].text) == ("ok", "ok")
    assert [r.path for r in sglang.requests] == ["/v1/chat/completions", "/v1/completions"]


async def test_managed_session_records_the_engines_tokens(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    server = make_server(sglang, SGLangServer)
    session = ManagedServer(server, server.tokenizer)

    chat = await session.chat_completion(messages=[{"role": "user", "content": "hi"}])

    node = session.get_state()["nodes"][0]
    assert chat.choices[0].finish_reason == "stop"
    assert node.tokens[-3:] == node.masked_tokens[-3:] == REPLY_IDS
    assert node.logprobs[-3:] == REPLY_LOGPROBS


@pytest.mark.parametrize(
    ("request_kwargs", "width"),
    [({"top_k": 0}, 1), ({}, 1), ({"top_k": 3}, 3), ({"top_logprobs": 2}, 2)],
)
async def test_prompt_logprobs_come_per_position_with_the_width_asked_for(
    request_kwargs: dict[str, int],
    width: int,
    sglang: ScriptedSGLang,
    make_server: MakeServer,
) -> None:
    rows = await make_server(sglang, SGLangServer).get_logprobs(
        input_ids=[5, 6, 7], **request_kwargs
    )

    assert rows["prompt_tokens"] == [5, 6, 7]
    assert [len(ids) for ids in rows["prompt_topk_token_ids"]] == [0, width, width]
    assert [len(values) for values in rows["prompt_topk_logprobs"]] == [0, width, width]
    assert rows["prompt_topk_token_ids"][1][0] == 6
    assert rows["prompt_topk_logprobs"][1][0] == logprob_of(6, 1)
    params = sglang.requests[0].body["sampling_params"]
    assert params == {"max_new_tokens": 1, "n": 1, "temperature": 0.0, "top_p": 1.0}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=500),
        Fault("drop"),
        Fault("cut"),
        Fault("garbage"),
        Fault("no_logprobs"),
        Fault("fewer_choices"),
    ],
)
async def test_passing_fault_is_retried_until_whole_answers_come(
    fault: Fault, sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    server = make_server(sglang, SGLangServer)
    sglang.fail_next(fault)

    _, ids, _, _ = await server.tokens_and_logprobs_completion(prompt="hi", n=2)

    assert ids == [REPLY_IDS] * 2
    assert server.attempts_list == [2]


async def test_hang_past_the_timeout_counts_as_an_attempt(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    server = make_server(sglang, SGLangServer)
    sglang.fail_next(Fault("hang"))

    await server.tokens_and_logprobs_completion(prompt="hi", timeout=0.05)

    assert server.attempts_list == [2]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("no_logprobs"), "no output_token_logprobs"),
        (Fault("fewer_choices"), "answered 1 completions, not 2"),
        (Fault("garbage"), "JSONDecodeError"),
        (Fault(status=500, message="out of memory"), "out of memory"),
    ],
)
async def test_lasting_fault_ends_after_three_attempts_with_its_cause(
    fault: Fault, said: str, sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    sglang.fail_next(*[fault] * 3)

    with pytest.raises(RetriesExhaustedError, match=said):
        await make_server(sglang, SGLangServer).tokens_and_logprobs_completion(prompt="hi", n=2)

    assert len(sglang.requests) == 3


async def test_refusal_is_raised_at_once_with_the_engines_words(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    sglang.fail_next(Fault(status=400, message="top_p must be in (0, 1]"))

    with pytest.raises(EngineStatusError, match=r"/generate answered 400: .*top_p must be"):
        await make_server(sglang, SGLangServer).tokens_and_logprobs_completion(prompt="hi")

    assert len(sglang.requests) == 1


async def test_server_of_another_kind_is_refused_with_what_was_tried(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    with pytest.raises(ConfigError, match=r"has no /generate.*check base_url and server_type"):
        await make_server(engine, SGLangServer).tokens_and_logprobs_completion(prompt="hi")


async def test_prompt_over_the_context_is_typed(
    sglang: ScriptedSGLang, make_server: MakeServer
) -> None:
    message = "The input (300 tokens) is longer than the model's context length (256 tokens)."
    sglang.fail_next(Fault(status=400, message=message))

    with pytest.raises(ContextOverflowError, match=r"300 tokens.*256 tokens"):
        await make_server(sglang, SGLangServer).tokens_and_logprobs_completion(prompt="hi")


def completion(**changes: Any) -> dict[str, Any]:
    info = {"output_token_logprobs": [[-0.5, 7, None], [-0.25, 2, None]], "finish_reason": None}
    return {"meta_info": {**info, **changes}}


def test_null_finish_reason_and_a_trimmed_stop_token_are_accepted() -> None:
    answer = {**completion(), "output_ids": [7]}

    assert parse_tokens(answer, [1], num_choices=1) == ([1], [[7, 2]], [[-0.5, -0.25]], [None])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({**completion(), "output_ids": [8, 2]}, "name different tokens"),
        (completion(finish_reason={"type": "abort"}), r"aborted completion 0 \(abort\)"),
        (completion(output_token_logprobs=[[None, 7, None]]), "not a finite number"),
        (completion(output_token_logprobs=[-0.5]), r"expected \[logprob, token id"),
        ({"text": "ok"}, "no meta_info"),
        ("ok", "no meta_info"),
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(answer: Any, said: str) -> None:
    with pytest.raises(InferenceError, match=said):
        parse_tokens(answer, [1], num_choices=1)


def test_own_token_outside_of_the_top_k_is_kept_first() -> None:
    info = {
        "input_token_logprobs": [[None, 5, None], [-4.0, 6, None]],
        "input_top_logprobs": [None, [[-0.1, 8, None], [-2.0, 9, None]]],
    }

    answer = parse_prompt_logprobs({"meta_info": info}, [5, 6], top_k=2)

    assert answer["prompt_topk_token_ids"] == [[], [6, 8, 9]]
    assert answer["prompt_topk_logprobs"] == [[], [-4.0, -0.1, -2.0]]


def test_prompt_logprobs_of_other_tokens_are_refused() -> None:
    answer = {"meta_info": {"input_token_logprobs": [[None, 5, None]]}}

    with pytest.raises(InferenceError, match="do not match the 2 tokens sent"):
        parse_prompt_logprobs(answer, [5, 6], top_k=0)
    with pytest.raises(ValueError, match="no input_token_logprobs"):
        parse_prompt_logprobs({"meta_info": {}}, [5, 6], top_k=0)


def test_public_names_are_where_users_import_them() -> None:
    assert ReExported is SGLangServer
    assert callable(resolve_openai_configs)
