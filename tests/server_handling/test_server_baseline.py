from __future__ import annotations

import asyncio
import gc
import inspect
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion
from tenacity import RetryError

from atroposlib.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    SharedSearch,
    TokensAndLogprobs,
)
from atroposlib.envs.server_handling.server_harness import (
    create_chat_completion,
    create_completion,
)


class RecordingServer(APIServer):
    """Remembers the kwargs of each call and fails as often as told."""

    max_backoff_s = 0.0

    def __init__(self, **settings: Any) -> None:
        config = APIServerConfig(
            **{"model_name": "test-model", "base_url": "", "health_check": False, **settings}
        )
        super().__init__(config=config, reasoning_config=None)
        self.calls: list[dict[str, Any]] = []
        self.errors: list[Exception] = []
        self.checks: list[bool] = []

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        self.checks.append(chat_completion)
        self.server_healthy = True

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        self._record(kwargs)
        return create_chat_completion("hi")

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        self._record(kwargs)
        return create_completion("hi")

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> TokensAndLogprobs:
        self._record(kwargs)
        return [1], [[2]], [[-0.5]], ["stop"]

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        self._record(kwargs)
        return {"prompt_tokens": [1]}

    def _record(self, kwargs: dict[str, Any]) -> None:
        self.calls.append(kwargs)
        if self.errors:
            raise self.errors.pop(0)


async def test_base_class_is_abstract() -> None:
    assert inspect.isabstract(APIServer)


async def test_each_split_has_its_own_measurements() -> None:
    server = RecordingServer()

    await server.get_logprobs(prompt="hi", split="train")
    assert server.calls[0] == {"prompt": "hi", "model": "test-model"}
    assert len(server.request_timings) == len(server.attempts_list) == 1
    assert server.eval_request_timings == server.eval_attempts_list == []

    await server.get_logprobs(prompt="hi", split="eval")
    assert len(server.request_timings) == 1
    assert len(server.eval_request_timings) == len(server.eval_attempts_list) == 1


@pytest.mark.parametrize(
    "method", ["chat_completion", "completion", "tokens_and_logprobs_completion", "get_logprobs"]
)
async def test_library_arguments_never_reach_the_engine(method: str) -> None:
    server = RecordingServer()

    await getattr(server, method)(
        prompt="hi", model="other", split="train", skip_reasoning=True, timeout=3, tools=[]
    )

    assert server.calls == [{"prompt": "hi", "model": "test-model", "timeout": 3, "tools": []}]


async def test_transient_error_is_retried_and_counted() -> None:
    server = RecordingServer()
    server.errors = [ConnectionError(), ConnectionError()]

    await server.completion(prompt="hi")

    assert server.attempts_list == [3]


async def test_third_failure_raises_a_retry_error_that_tells_the_cause() -> None:
    server = RecordingServer()
    server.errors = [ConnectionError("refused")] * 3

    with pytest.raises(RetryError, match=r"failed 3 attempts.*refused"):
        await server.chat_completion(messages=[])

    assert len(server.calls) == 3
    assert server.attempts_list == []
    assert server.sem._value == server.sem.max_val


async def test_programming_error_is_raised_at_once_as_it_is() -> None:
    server = RecordingServer()
    server.errors = [AssertionError("no messages")]

    with pytest.raises(AssertionError, match="no messages"):
        await server.chat_completion()

    assert len(server.calls) == 1


async def test_newest_requests_are_kept_and_measured() -> None:
    server = RecordingServer(rolling_buffer_length=2)
    server.errors = [ConnectionError()]
    for _ in range(3):
        await server.completion(prompt="hi")
    await server.completion(prompt="hi", split="eval")

    metrics = await server.wandb_metrics({"kept": 1}, "main")

    assert server.attempts_list == [1, 1]
    assert set(metrics) == {"kept"} | {
        f"server/main_{name}"
        for name in (
            *("request_time_avg", "request_time_std", "request_time_99p"),
            *("eval_request_time_avg", "eval_request_time_std", "eval_request_time_99p"),
            *("average_num_attempts", "eval_retry_rate"),
        )
    }
    assert metrics["server/main_average_num_attempts"] == 1.0


async def test_metrics_without_requests_or_name_are_empty() -> None:
    assert await RecordingServer().wandb_metrics(None, None) == {}
    server = RecordingServer()
    await server.completion(prompt="hi")
    assert "server/server_request_time_avg" in await server.wandb_metrics({}, None)


async def test_metrics_use_lists_that_a_monitor_assigned() -> None:
    server = RecordingServer()
    server.request_timings = [1.0, 3.0]
    server.eval_attempts_list = [2]

    metrics = await server.wandb_metrics({}, "main")
    await server.completion(prompt="hi")

    assert metrics["server/main_request_time_avg"] == 2.0
    assert metrics["server/main_eval_retry_rate"] == 2.0
    assert len(server.request_timings) == 3


async def test_failed_search_of_cancelled_callers_is_not_reported_as_lost() -> None:
    lost: list[str] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Collected clients of earlier tests report errors of their own.
        lost.append(str(context.get("exception")))

    asyncio.get_running_loop().set_exception_handler(note)
    may_fail = asyncio.Event()

    async def find() -> str:
        await may_fail.wait()
        raise RuntimeError("no route")

    search: SharedSearch[str] = SharedSearch()
    caller = asyncio.create_task(search.result(find))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    may_fail.set()
    assert search.running is not None
    await asyncio.wait([search.running])
    search.running = None
    gc.collect()

    assert "no route" not in lost


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"base_url": "http://h/v1", "health_check": True}, [True]),
        ({"base_url": "http://h/v1", "health_check": False}, []),
        ({"base_url": "", "health_check": True}, []),
    ],
)
async def test_health_check_starts_once_and_only_where_it_makes_sense(
    settings: dict[str, Any], expected: list[bool]
) -> None:
    server = RecordingServer(**settings)

    await server.chat_completion(messages=[])
    await server.completion(prompt="hi")
    await asyncio.sleep(0)

    assert server.checks == expected
    assert server.initialized
    await server.close()


async def test_requests_wait_while_the_server_is_marked_down() -> None:
    server = RecordingServer()
    server.health_poll_s = 0.001
    await server.completion(prompt="first")
    server.server_healthy = False

    request = asyncio.create_task(server.completion(prompt="hi"))
    await asyncio.sleep(0.005)
    assert len(server.calls) == 1
    server.server_healthy = True
    await request

    assert server.attempts_list == [1, 1]


def test_server_that_was_down_at_the_end_of_a_loop_is_asked_again_on_the_next() -> None:
    class DownServer(RecordingServer):
        async def check_server_status_task(self, chat_completion: bool = True) -> None:
            self.server_healthy = False
            await asyncio.sleep(100)

    server = DownServer(base_url="http://down/v1", health_check=True)

    async def find_it_down() -> None:
        await server.completion(prompt="hi")
        await asyncio.sleep(0)
        assert not server.server_healthy

    asyncio.run(find_it_down())

    asyncio.run(asyncio.wait_for(server.completion(prompt="hi"), 60))
    assert len(server.calls) == 2


async def test_first_request_without_health_check_takes_the_server_as_up() -> None:
    server = RecordingServer(health_check=False)
    server.server_healthy = False

    await asyncio.wait_for(server.completion(prompt="hi"), timeout=60)

    assert server.server_healthy


async def test_weight_is_set_for_both_splits() -> None:
    server = RecordingServer()

    await server.update_weight(0.25)

    assert server.sem.weight == server.eval_sem.weight == 0.25


async def test_view_with_its_own_slot_can_be_used_when_no_other_is_left() -> None:
    server = RecordingServer(num_max_requests_at_once=1)

    async with server.sem:
        view = server.with_own_slot()
        await asyncio.wait_for(view.completion(prompt="hi"), timeout=60)

    assert server.attempts_list == [1]
    assert server.sem._value == 1
    assert server.num_answered == view.num_answered == 1
    assert server.initialized
