"""The inference engines that the service shares among environments: their metrics and limits.

    engines ── GET /metrics, once per poll ──► EngineArbiter ── next_limit ──► limits
                                                     │
    environments ◄── /status-env: max_running_sequences ◄── sum of the limits, by weight

vLLM, SGLang and the torch engine report the same values under different names. An engine that does
not answer keeps its limit for a while; then the limit falls to the smallest one.

Each replica of a service polls the engines itself and decides alone.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import httpx
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from atroposlib.api.concurrency import (
    ConcurrencyRule,
    EngineLimit,
    EngineReading,
    decayed_limit,
    first_limit,
    next_limit,
)
from atroposlib.utils.text import without_secrets

__all__ = ["EngineArbiter", "read_metrics"]

logger = logging.getLogger(__name__)

_MAX_METRICS_BYTES = 4 * 1024 * 1024
_TIMEOUT_S = 5.0

_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_CACHE_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
_PREFIXES = (*_RUNNING, *_WAITING, *_CACHE_USE, *_PREEMPTIONS)
_READ = frozenset(_PREFIXES)
_MAX_LINES = 1024
_MAX_LINE_CHARACTERS = 4096


def read_metrics(text: str) -> EngineReading:
    """Return the load of an engine from its metrics; several data-parallel ranks are added up.

    Raises:
        ValueError: the text is not in the format of Prometheus, the number of running or of waiting
            requests is missing, or a number is negative or not finite.
    """
    values: dict[str, list[float]] = {}
    for sample in _samples(text):
        if sample.name in _READ:
            if not 0.0 <= sample.value < math.inf:
                raise ValueError(f"{sample.name} is {sample.value}; expected a count or a ratio")
            values.setdefault(sample.name, []).append(sample.value)
    running, waiting = _first(values, _RUNNING), _first(values, _WAITING)
    if running is None or waiting is None:
        raise ValueError(
            f"expected {_RUNNING[0]} and {_WAITING[0]}, or the names of SGLang "
            "(--enable-metrics of its server)"
        )
    cache_use, preemptions = _first(values, _CACHE_USE), _first(values, _PREEMPTIONS)
    return EngineReading(
        running=sum(running),
        waiting=sum(waiting),
        cache_use=None if cache_use is None else max(cache_use),
        preemptions=None if preemptions is None else sum(preemptions),
    )


def _samples(text: str) -> list[Sample]:
    """Parse the lines that are read; to parse all of a large text would take seconds."""
    lines = [line for line in text.split("\n") if line.startswith(_PREFIXES)]
    if len(lines) > _MAX_LINES or any(len(line) > _MAX_LINE_CHARACTERS for line in lines):
        raise ValueError(
            f"expected at most {_MAX_LINES} lines of {_PREFIXES[0]} and the like, of at most "
            f"{_MAX_LINE_CHARACTERS} characters each"
        )
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except IndexError as error:  # of the parser, for some malformed labels
        raise ValueError(f"expected metrics of Prometheus: {error}") from error
    return [sample for family in families for sample in family.samples]


def _first(values: Mapping[str, list[float]], names: Sequence[str]) -> list[float] | None:
    return next((values[name] for name in names if name in values), None)


class _PolledEngine:
    """One engine: its limit and its last reading."""

    def __init__(self, url: str, limit: EngineLimit) -> None:
        self.url = url
        self.limit = limit
        self.reading: EngineReading | None = None
        """None while it does not answer."""
        self.error = ""


class EngineArbiter(Collector):
    """Polls engines and limits the sequences that environments generate on them together.

    Args:
        urls: base URLs.
        rule: settings of the limits.
        poll_s: seconds between two polls.
        clock: monotonic seconds.
        transport: of the HTTP client; None opens connections.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        rule: ConcurrencyRule,
        poll_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._rule = rule
        self._poll_s = poll_s
        self._clock = clock
        self._transport = transport
        self._engines = [
            _PolledEngine(url, first_limit(rule, now=clock()))
            for url in {without_secrets(url): url for url in urls}.values()
        ]

    @property
    def max_sequences(self) -> int:
        """Sequences that all environments may generate at once."""
        return sum(engine.limit.num_sequences for engine in self._engines)

    async def run(self) -> None:
        """Poll until cancelled."""
        # With a transport of its own, the client ignores proxies of the environment variables.
        transport = self._transport or httpx.AsyncHTTPTransport()
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, transport=transport) as client:
            while True:
                await self.poll(client)
                await asyncio.sleep(self._poll_s)

    async def poll(self, client: httpx.AsyncClient) -> None:
        """Read all engines once, concurrently, and update their limits."""
        await asyncio.gather(*(self._poll_one(engine, client) for engine in self._engines))

    async def _poll_one(self, engine: _PolledEngine, client: httpx.AsyncClient) -> None:
        try:
            # The client's own limit is per read: a body in small pieces would never end.
            text = await asyncio.wait_for(_fetch(client, f"{engine.url}/metrics"), _TIMEOUT_S)
            reading = read_metrics(text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, asyncio.TimeoutError) as error:
            self._note_failure(engine, f"{type(error).__name__}: {error}")
            return
        if engine.error:
            logger.info("engine %s reports its metrics again", without_secrets(engine.url))
        engine.error, engine.reading = "", reading
        before = engine.limit.num_sequences
        engine.limit = next_limit(engine.limit, reading, self._rule, now=self._clock())
        if engine.limit.num_sequences != before:
            logger.debug(
                "engine %s: limit %d, was %d (%s)",
                without_secrets(engine.url),
                engine.limit.num_sequences,
                before,
                reading,
            )

    def _note_failure(self, engine: _PolledEngine, error: str) -> None:
        if not engine.error:
            logger.warning(
                "engine %s does not report its metrics (%s); its limit of %d sequences falls "
                "until it does",
                without_secrets(engine.url),
                error[:200],
                engine.limit.num_sequences,
            )
        engine.error, engine.reading = error, None
        engine.limit = decayed_limit(engine.limit, self._rule, now=self._clock())

    def collect(self) -> Iterator[Metric]:
        """Return the state of all engines for `/metrics`."""
        for name, text, read in _ENGINE_FIGURES:
            family = GaugeMetricFamily(f"atropos_engine_{name}", text, labels=["engine"])
            for engine in self._engines:
                value = read(engine)
                if value is not None:
                    family.add_metric([without_secrets(engine.url)], value)
            yield family


def _of_reading(
    read: Callable[[EngineReading], float | None],
) -> Callable[[_PolledEngine], float | None]:
    return lambda engine: None if engine.reading is None else read(engine.reading)


_ENGINE_FIGURES: tuple[tuple[str, str, Callable[[_PolledEngine], float | None]], ...] = (
    ("up", "1 if the engine reports its metrics, else 0.", lambda e: e.reading is not None),
    (
        "max_sequences",
        "Sequences that environments may generate on the engine at once.",
        lambda e: e.limit.num_sequences,
    ),
    ("running_sequences", "Sequences that the engine generates.", _of_reading(lambda r: r.running)),
    ("waiting_requests", "Requests in the engine's queue.", _of_reading(lambda r: r.waiting)),
    (
        "cache_used_ratio",
        "Used part of the engine's cache of keys and values.",
        _of_reading(lambda r: r.cache_use),
    ),
    (
        "preemptions",
        "Sequences that the engine has preempted since it started.",
        _of_reading(lambda r: r.preemptions),
    ),
)


async def _fetch(client: httpx.AsyncClient, url: str) -> str:
    """Return the body of a response, at most a few megabytes.

    Raises:
        httpx.HTTPError: no response.
        ValueError: the status is not 200, or the body is too large or not text.
    """
    async with client.stream("GET", url) as response:
        if response.status_code != 200:  # the client's own error has the password of the URL
            raise ValueError(f"status {response.status_code}")
        pieces, size = [], 0
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > _MAX_METRICS_BYTES:
                raise ValueError(f"more than {_MAX_METRICS_BYTES} bytes of metrics")
            pieces.append(piece)
    return b"".join(pieces).decode()
