"""Engines whose metrics the service polls, with answers of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError

from atroposlib.api.concurrency import ConcurrencyRule, EngineReading
from atroposlib.api.engines import EngineArbiter, read_metrics
from atroposlib.api.settings import ApiSettings
from tests.api.helpers import Service

VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 30.0
vllm:num_requests_running{engine="1",model_name="m"} 34.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:num_preemptions_total{engine="1",model_name="m"} 5.0
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 12.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 3.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.75
"""

Answer = Callable[[httpx.Request], httpx.Response]


def test_read_metrics_of_vllm_adds_up_its_ranks() -> None:
    assert read_metrics(VLLM) == EngineReading(64.0, 3.0, 0.5, 9.0)


def test_read_metrics_of_sglang() -> None:
    assert read_metrics(SGLANG) == EngineReading(12.0, 3.0, 0.75, None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "expected vllm:num_requests_running"),
        ("vllm:num_requests_running NaN\n", "num_requests_running is nan"),
        ("vllm:num_requests_running -1\n", "is -1"),
        ("vllm:num_requests_running +Inf\n", "is inf"),
        ("<html>", "Prometheus|metric|expected"),
        ('vllm:num_requests_running{a="b", ="c"} 1\n', "metrics of Prometheus"),
        ("vllm:num_requests_running 1\n" * 2000, "at most 1024 lines"),
        (f'vllm:num_requests_running{{a="{"b" * 5000}"}} 1\n', "at most 4096 characters"),
    ],
)
def test_read_metrics_rejects_other_texts(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read_metrics(text)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_arbiter(*urls: str) -> tuple[EngineArbiter, Clock]:
    clock = Clock()
    return EngineArbiter(
        urls or ("http://engine:9001",), rule=ConcurrencyRule(), clock=clock
    ), clock


async def poll(arbiter: EngineArbiter, answer: Answer, *, times: int, clock: Clock) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        for _ in range(times):
            clock.now += 1.0
            await arbiter.poll(client)


def always(text: str) -> Answer:
    return lambda request: httpx.Response(200, text=text)


def metrics_of(arbiter: EngineArbiter) -> str:
    registry = CollectorRegistry()
    registry.register(arbiter)
    return generate_latest(registry).decode()


async def test_poll_raises_the_limit_of_a_busy_engine() -> None:
    arbiter, clock = make_arbiter()

    await poll(arbiter, always(VLLM), times=11, clock=clock)

    assert arbiter.max_sequences == 96
    text = metrics_of(arbiter)
    assert 'atropos_engine_up{engine="http://engine:9001"} 1.0' in text
    assert 'atropos_engine_max_sequences{engine="http://engine:9001"} 96.0' in text
    assert 'atropos_engine_cache_used_ratio{engine="http://engine:9001"} 0.5' in text
    assert 'atropos_engine_preemptions{engine="http://engine:9001"} 9.0' in text


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("connection refused")


def too_large(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=b"#" * (5 * 1024 * 1024))


@pytest.mark.parametrize(
    "answer",
    [refuse, too_large, always("<html>"), lambda request: httpx.Response(404)],
)
async def test_poll_without_metrics_lets_the_limit_fall_and_says_so_once(
    answer: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    arbiter, clock = make_arbiter("http://user:secret@engine:9001")

    await poll(arbiter, answer, times=9, clock=clock)
    assert arbiter.max_sequences == 64
    clock.now += 10.0
    await poll(arbiter, answer, times=1, clock=clock)

    assert arbiter.max_sequences == 57  # 0.9 of it
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text + metrics_of(arbiter)
    assert 'atropos_engine_up{engine="http://***@engine:9001"} 0.0' in metrics_of(arbiter)


async def test_poll_one_engine_away_leaves_the_other() -> None:
    arbiter, clock = make_arbiter("http://a:1", "http://b:1", "http://a:1")

    def answer(request: httpx.Request) -> httpx.Response:
        return refuse(request) if request.url.host == "b" else httpx.Response(200, text=VLLM)

    await poll(arbiter, answer, times=11, clock=clock)

    assert arbiter.max_sequences == 96 + 57


@pytest.mark.parametrize(
    "url",
    ["engine:9001", "ftp://engine", "http://", "http://e:99999", "http://e/?a=1", "http://[e"],
)
def test_settings_refuse_what_is_no_engine(url: str) -> None:
    with pytest.raises(ValidationError, match="not the address of an inference server"):
        ApiSettings(engines=(url,))


def test_settings_take_the_url_that_environments_use() -> None:
    assert ApiSettings(engines=("http://e:9001/v1/",)).engines == ("http://e:9001",)


@pytest.mark.slow
def test_status_env_shares_the_engines_by_weight() -> None:
    # Nothing listens on port 9: the limit is the first one of two engines, 2 x 64.
    settings = ApiSettings(engines=("http://127.0.0.1:9", "http://localhost:9"))
    with Service(settings) as service:
        service.start()
        service.register_env(weight=3.0)
        service.register_env(weight=1.0)

        shares = [service.status_env(i).json()["max_running_sequences"] for i in range(2)]
        text = service.get("/metrics").text

    assert shares == [96, 32]
    assert 'atropos_engine_max_sequences{engine="http://localhost:9"} 64.0' in text


@pytest.mark.slow
def test_status_env_gives_others_what_an_environment_does_not_use() -> None:
    settings = ApiSettings(engines=("http://127.0.0.1:9", "http://localhost:9"))
    with Service(settings) as service:
        service.start()
        service.register_env(weight=3.0, group_size=4)
        service.register_env(weight=1.0, group_size=4)

        idle = {"env_id": 0, "running_sequences": 16}
        first = service.request("GET", "/status-env", json=idle).json()
        other = service.status_env(1).json()
        wrong = service.request("GET", "/status-env", json={**idle, "running_sequences": "many"})

    assert first["max_running_sequences"] == 24  # a quarter and one group more than it runs
    assert other["max_running_sequences"] == 128 - 24
    assert wrong.status_code == 200
