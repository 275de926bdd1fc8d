"""What a request meets when its engine misbehaves, over real connections."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import openai
import pytest

from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.retry import EngineStatusError, RetriesExhaustedError
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ContextOverflowError, InferenceError
from tests.fakes import Fault, ScriptedEngine

pytestmark = pytest.mark.slow

MakeServer = Callable[..., OpenAIServer]
MESSAGES = [{"role": "user", "content": "hi"}]


async def wait_for(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds; fails after five seconds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition did not come true in five seconds")


@pytest.mark.parametrize(
    "fault", [Fault(status=500), Fault(status=429), Fault("drop"), Fault("cut"), Fault("garbage")]
)
@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer])
async def test_passing_fault_is_retried_until_an_answer_comes(
    fault: Fault, kind: type, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, kind)
    engine.fail_next(fault, fault)

    answer = await server.chat_completion(messages=MESSAGES)

    assert answer.choices[0].message.content == "one"
    assert server.attempts_list == [3]
    assert engine.count("/v1/chat/completions") == 3


@pytest.mark.parametrize("fault", [Fault(status=500, message="out of memory"), Fault("garbage")])
async def test_lasting_fault_ends_after_three_attempts(
    fault: Fault, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine)
    engine.fail_next(*[fault] * 9)

    with pytest.raises(RetriesExhaustedError, match="failed 3 attempts"):
        await server.chat_completion(messages=MESSAGES)

    assert len(engine.requests) == 3


@pytest.mark.parametrize("status", [400, 405, 422])
async def test_refusal_is_raised_at_once_as_it_came(
    status: int, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine)
    engine.fail_next(Fault(status=status, message="temperature must be positive"))

    with pytest.raises(openai.APIStatusError, match="temperature must be positive"):
        await server.chat_completion(messages=MESSAGES)

    assert len(engine.requests) == 1
    assert server.server_healthy


async def test_refusal_on_a_native_route_quotes_the_engine(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    await server.tokens_and_logprobs_completion(prompt="hi")
    engine.fail_next(Fault(status=422, message="n must be positive"))

    with pytest.raises(EngineStatusError, match=r"answered 422: .*n must be positive"):
        await server.tokens_and_logprobs_completion(prompt="hi")


@pytest.mark.parametrize(
    ("kind", "method"),
    [(OpenAIServer, "completion"), (VLLMServer, "tokens_and_logprobs_completion")],
)
async def test_context_overflow_is_typed_and_names_the_lengths(
    kind: type, method: str, make_server: MakeServer
) -> None:
    async with ScriptedEngine(["a"], max_model_len=10) as engine:
        server = make_server(engine, kind)

        with pytest.raises(ContextOverflowError, match=r"maximum context length is 10 .* 21 input"):
            await getattr(server, method)(prompt="x" * 20, max_tokens=1)

        requests = [request for request in engine.requests if len(request.body["prompt"]) > 1]
        assert len(requests) == 1


async def test_retry_after_is_honoured(
    engine: ScriptedEngine, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(engine, health_check=False)
    engine.fail_next(Fault(status=429, headers={"Retry-After": "7"}))
    slept: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await real_sleep(0)

    monkeypatch.setattr("atroposlib.envs.server_handling.server_baseline.asyncio.sleep", sleep)
    await server.chat_completion(messages=MESSAGES)

    assert 7.0 in slept


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer])
async def test_hang_past_the_timeout_counts_as_an_attempt(
    kind: type, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, kind)
    await server.tokens_and_logprobs_completion(prompt="hi") if kind is VLLMServer else None
    engine.fail_next(Fault("hang"))

    if kind is VLLMServer:
        await server.tokens_and_logprobs_completion(prompt="hi", timeout=0.05)
    else:
        await server.completion(prompt="hi", timeout=0.05)

    assert server.attempts_list[-1] == 2


@pytest.mark.parametrize(
    "fault", [Fault("drop"), Fault("cut"), Fault("garbage"), Fault(status=500)]
)
async def test_native_route_is_asked_again_after_an_unusable_answer(
    fault: Fault, engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    await server.tokens_and_logprobs_completion(prompt="hi")
    engine.fail_next(fault)

    _, ids, logprobs, _ = await server.tokens_and_logprobs_completion(prompt="hi")

    assert len(ids[0]) == len(logprobs[0]) > 0
    assert server.attempts_list == [1, 2]


async def test_fewer_choices_than_asked_for_are_not_accepted(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    await server.tokens_and_logprobs_completion(prompt="hi")
    engine.fail_next(Fault("fewer_choices"))

    _, ids, _, _ = await server.tokens_and_logprobs_completion(prompt="hi", n=3)

    assert len(ids) == 3
    assert server.attempts_list == [1, 2]


async def test_missing_logprobs_fail_with_their_name(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine, VLLMServer)
    await server.tokens_and_logprobs_completion(prompt="hi")
    engine.fail_next(*[Fault("no_logprobs")] * 3)

    with pytest.raises(InferenceError, match="no token_logprobs"):
        await server.tokens_and_logprobs_completion(prompt="hi")


@pytest.mark.parametrize("kind", [OpenAIServer, VLLMServer])
async def test_server_that_goes_down_and_comes_back_loses_no_request(
    kind: type, make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(["back"])
    await engine.start()
    server = make_server(engine, kind, api_key="sk-secret")
    await engine.stop()
    caplog.set_level(logging.INFO)

    requests = [asyncio.create_task(server.chat_completion(messages=MESSAGES)) for _ in range(20)]
    await wait_for(lambda: not server.server_healthy)
    await asyncio.sleep(0.05)
    assert not any(request.done() for request in requests)
    await engine.start(engine.port)
    answers = await asyncio.gather(*requests)
    await engine.stop()

    assert [answer.choices[0].message.content for answer in answers] == ["back"] * 20
    assert len(server.attempts_list) == 20
    assert max(server.attempts_list) <= 2  # the wait is no attempt; one was under way at the end
    assert caplog.text.count("does not answer") == 1
    assert caplog.text.count("answers again") == 1
    assert "sk-secret" not in caplog.text


async def test_engine_that_reports_itself_unhealthy_holds_requests(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine)
    engine.healthy = False
    engine.fail_next(Fault(status=503))

    request = asyncio.create_task(server.chat_completion(messages=MESSAGES))
    await wait_for(lambda: engine.num_health_checks > 3)
    assert not request.done()
    engine.healthy = True
    await request

    assert server.attempts_list == [1]


async def test_route_that_always_fails_does_not_stop_the_others(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine)
    engine.fail_next(*[Fault(status=500)] * 3)

    with pytest.raises(RetriesExhaustedError):
        await server.completion(prompt="hi")

    assert server.server_healthy
    assert (await server.chat_completion(messages=MESSAGES)).choices


async def test_healthy_server_is_probed_once_not_continuously(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine)

    for _ in range(5):
        await server.chat_completion(messages=MESSAGES)
    await asyncio.sleep(0.05)

    assert engine.num_health_checks == 1


async def test_cancelled_request_frees_its_slot(
    engine: ScriptedEngine, make_server: MakeServer
) -> None:
    server = make_server(engine)
    engine.fail_next(Fault("hang"))
    request = asyncio.create_task(server.chat_completion(messages=MESSAGES))
    await wait_for(lambda: len(engine.requests) == 1)

    request.cancel()
    await asyncio.gather(request, return_exceptions=True)

    assert server.sem._value == server.sem.max_val


async def test_semaphore_of_the_split_limits_what_is_in_flight(make_server: MakeServer) -> None:
    async with ScriptedEngine(["a"], delay_s=0.01) as engine:
        server = make_server(engine, num_max_requests_at_once=3, num_requests_for_eval=2)

        await asyncio.gather(*(server.completion(prompt="x") for _ in range(12)))
        train_peak, engine.max_in_flight = engine.max_in_flight, 0
        await asyncio.gather(*(server.completion(prompt="x", split="eval") for _ in range(6)))

        assert train_peak == 3
        assert engine.max_in_flight == 2
