"""Base of all clients: formats of bodies, retries, error messages, and the two transports.

`AsyncTransport` is used by `TrajectoryApiClient`; `SyncClient` is the base of `TrainerClient` and
`InspectionClient`. Each has one connection pool; the rules above them are pure.

`ServiceTraits` chooses the format of bodies by the responses of the service:

| service | format of posted groups |
|---|---|
| sends `Accept-Post: ... application/msgpack` | binary; honors `Idempotency-Key` |
| any other | JSON, gzip if that saves time |
| rejected gzip, accepted the same content plain | plain JSON |

`WaitLog` decides when a wait for the service is logged: at the first failure, then at growing
intervals.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import httpx
import msgspec
from typing_extensions import Self

from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.io import (
    body_chunks,
    gunzipped,
    open_socket,
    pieces,
    retry_after_s,
    socket_options,
)
from atroposlib.utils.json_text import json_kind
from atroposlib.utils.proxies import may_use_proxy
from atroposlib.utils.text import hide_secrets, hide_secrets_of_requests, without_secrets
from atroposlib.wire import MEDIA_TYPES, WireFormat, decode_batch

logger = logging.getLogger(__name__)

_MIN_GZIP_BYTES = 1024
_ADVERTISING_PATHS = frozenset({"/info", "/wandb_info", "/register", "/register-env"})
_FORMAT_REFUSALS = (400, 415, 422)

BINARY_FORMAT_HEADERS = {"Accept": f"{MEDIA_TYPES['msgpack']}; zstd=1, {MEDIA_TYPES['json']};q=0.5"}
"""Headers that request groups in the binary format; services without it send JSON."""


Encoder = Callable[..., bytes]
"""`wire.encode_group` or `wire.encode_groups`."""


class BodyEncoding(NamedTuple):
    """Encoding of a request body."""

    wire_format: WireFormat
    is_gzip_wanted: bool = False


_BINARY = BodyEncoding("msgpack")
_GZIP = BodyEncoding("json", is_gzip_wanted=True)
_PLAIN = BodyEncoding("json")


class Body(NamedTuple):
    """A request body and the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]

    @property
    def is_compressed(self) -> bool:
        return "Content-Encoding" in self.headers

    @property
    def is_plain(self) -> bool:
        """Whether every version of the service can read it."""
        return not self.is_compressed and self.headers["Content-Type"] == MEDIA_TYPES["json"]


class ServiceTraits:
    """Traits of a service, known from its responses; the latest response counts.

    Attributes:
        honors_keys: Whether groups with a repeated `Idempotency-Key` are stored only once. True for
            services that have the binary format.
    """

    def __init__(self) -> None:
        self.honors_keys = False
        self._takes_binary = False
        self._takes_gzip = True

    def learn(self, path: str, headers: Mapping[str, str]) -> None:
        """Update from the `Accept-Post` header of a successful response.

        A service with the binary format always sends it. Its absence means that an older service
        now responds at the address.
        """
        offer = headers.get("Accept-Post", "")
        if offer or path in _ADVERTISING_PATHS:
            self._takes_binary = self.honors_keys = MEDIA_TYPES["msgpack"] in offer.lower()

    def formats(self) -> list[BodyEncoding]:
        """Return the formats to try, best first."""
        formats = [_BINARY] if self._takes_binary else []
        if self._takes_gzip:
            formats.append(_GZIP)
        return [*formats, _PLAIN]

    def may_be_format(self, status: int | None, body: Body) -> bool:
        """Whether the rejection of a body may be due to its format, not its content."""
        return status in _FORMAT_REFUSALS and not body.is_plain

    def drop(self, refused: Iterable[Body]) -> None:
        """Stop using formats that were rejected, after the same content was accepted in another."""
        for body in refused:
            if body.is_compressed:
                self._takes_gzip = False
            else:
                self._takes_binary = self.honors_keys = False


def is_on_this_machine(url: str) -> bool:
    """Whether an address is on this machine, where compression only costs time."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def encode_body(encode: Encoder, value: Any, form: BodyEncoding, *, zstd: bool = False) -> Body:
    """Encode a group or groups with an encoder; `zstd` applies to the binary format only.

    Raises:
        GroupError: a group is malformed.
    """
    content = encode(value, form.wire_format, zstd=zstd)
    if form.is_gzip_wanted and len(content) >= _MIN_GZIP_BYTES:
        # Level 1: token ids shrink well already, and higher levels cost more than they save.
        packed = gzip.compress(content, compresslevel=1)
        if len(packed) < len(content):
            headers = {"Content-Type": MEDIA_TYPES["json"], "Content-Encoding": "gzip"}
            return Body(packed, headers)
    return Body(content, {"Content-Type": MEDIA_TYPES[form.wire_format]})


def plain(request: Mapping[str, Any]) -> Body:
    """Encode a small request as JSON."""
    return Body(msgspec.json.encode(request), {"Content-Type": MEDIA_TYPES["json"]})


def format_of_response(headers: Mapping[str, str]) -> WireFormat:
    """Return the format of a response by its `Content-Type`."""
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return "msgpack" if media_type == MEDIA_TYPES["msgpack"] else "json"


_MAX_QUOTED_CHARS = 500
_BUSY_STATUSES = (429, 503)
_REMEDIES = {
    401: "the service requires a token: set ATROPOS_API_TOKEN, or give the client its `token`",
    403: "use a token of the right role (environment, trainer or admin)",
    404: "the service was reset or replaced: register again, or check the address",
    413: "post fewer groups at a time",
    422: "the request is malformed; a retry will not help",
    503: "the service is busy; retry later",
}
_COMMON_ROUTES = ("/register", "/register-env", "/batch", "/info", "/status", "/wandb_info")
"""Routes that every version of the service has."""
_MISSING_ROUTE_STATUSES = (404, 405, 501)
_NOT_CURRENT = (
    "the server at this address is not a current trajectory service; check the address, `run-api` "
    "starts a service"
)
_BATCH_ID = re.compile(r"[!-~]{1,256}")
"""An id that can be part of a URL and of a log line."""
_CONFLICT_REMEDIES = {
    "/register": "use the settings of the running run, or take it over with --replace-run",
    "/ack": "its groups may be trained on twice; ask for longer leases",
}


class LeasedBatch(NamedTuple):
    """A batch that is leased to the trainer."""

    groups: list[dict[str, Any]]
    """Decoded groups, oldest first; `policy_version` falls back to that of the service."""
    batch_id: str | None
    """Argument of `ack` and `nack`; None from a service without leases."""


class RetryRule(NamedTuple):
    """Number, delays and deadline of the retries of a failed request."""

    attempts: int | None = 3
    """Total number of attempts; None is limited by `deadline_s` only."""
    first_delay_s: float = 0.2
    """Pause after the first failure; each further pause is four times longer."""
    max_delay_s: float = 10.0
    """Longest pause, unless the service asks for a longer one."""
    deadline_s: float = 120.0
    """Latest start of an attempt, in seconds after the first one."""

    def delay_s(
        self,
        error: TrajectoryApiError,
        *,
        attempt: int,
        is_repeatable: bool,
        passed_s: float = 0.0,
        jitter: float = 0.0,
    ) -> float | None:
        """Return the seconds to wait before the next attempt; None to give up.

        Args:
            error: the failure.
            attempt: number of attempts made, from 1.
            is_repeatable: Whether the request is idempotent. If not, it is retried only after
                failures in which the service did nothing.
            passed_s: seconds since the start of the first attempt.
            jitter: 0 to 1, lengthens the pause by up to a quarter, to spread many clients out.
        """
        if self.attempts is not None and attempt >= self.attempts:
            return None
        if not _may_repeat(error, is_repeatable=is_repeatable):
            return None
        pause_s = error.retry_after_s
        if pause_s is None:
            # The exponent is bounded because a float is.
            pause_s = min(self.first_delay_s * 4.0 ** min(attempt - 1, 16), self.max_delay_s)
        pause_s *= 1.0 + jitter / 4.0
        return pause_s if passed_s + pause_s <= self.deadline_s else None


POST_RETRY = RetryRule(attempts=None, deadline_s=600.0)
"""For groups: long enough for a service that is being restarted or moved."""


class NotReachedError(TrajectoryApiError):
    """No connection could be made: the service has not seen the request."""


class NoServiceError(TrajectoryApiError, ConfigError):
    """The address does not serve the trajectory service, or it did not start in time."""


def _may_repeat(error: TrajectoryApiError, *, is_repeatable: bool) -> bool:
    if isinstance(error, NoServiceError):
        return False
    was_not_sent = isinstance(error, NotReachedError)
    is_rate_limited = error.status in _BUSY_STATUSES and error.retry_after_s is not None
    is_transient = error.status is None or error.status >= 500 or error.status == 408
    return was_not_sent or is_rate_limited or (is_repeatable and is_transient)


def auth_headers(token: str | None) -> dict[str, str]:
    """Return the header with a token; empty without a token.

    Raises:
        ConfigError: the token cannot be sent; the message does not contain it.
    """
    token = (token or "").strip()
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigError(
            "the token of the trajectory service holds blanks, line breaks or characters outside "
            "ASCII; it is one word, as in the service's token file"
        )
    return {"Authorization": f"Bearer {token}"}


def unreachable(
    method: str, url: str, error: Exception, *, attempt: int, sent: bool
) -> TrajectoryApiError:
    """Return the error for a request that received no response."""
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = (
        f"{method} {without_secrets(url)} got no answer (attempt {attempt}): "
        f"{hide_secrets(reason)}; "
        "is the trajectory service running there? `run-api` starts one"
    )
    return TrajectoryApiError(message) if sent else NotReachedError(message)


def read_answer(
    method: str,
    url: str,
    *,
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    attempt: int = 1,
    secrets: Mapping[str, str] | None = None,
) -> Any:
    """Return the decoded body of a successful response, in either format.

    The values of the request headers `secrets` are removed from error messages.

    Raises:
        NoServiceError: a route that every service has is missing.
        TrajectoryApiError: the status is not 2xx, or the body cannot be decoded.
    """
    is_json = format_of_response(headers) == "json"
    try:
        answer = msgspec.json.decode(content) if is_json else decode_batch(content, "msgpack")
    except (msgspec.DecodeError, ValueError, RecursionError):
        answer = None
    is_null = is_json and content.strip() == b"null"
    if 200 <= status < 300 and (answer is not None or is_null):
        return answer
    shown_url, route = without_secrets(url), _last_part(url)
    if status in _MISSING_ROUTE_STATUSES and route in _COMMON_ROUTES:
        # The body, possibly an HTML page, is not shown.
        raise NoServiceError(
            f"{method} {shown_url} answered {status} (attempt {attempt}): the server at this "
            "address is not a trajectory service; check the address, `run-api` starts a service",
            status=status,
        )
    detail = answer.get("detail", answer) if isinstance(answer, dict) else None
    text = _spell(detail) if detail else content[: 4 * _MAX_QUOTED_CHARS].decode(errors="replace")
    for secret in (secrets or {}).values():
        text = text.replace(secret, "***").replace(secret.removeprefix("Bearer "), "***")
    remedy = _CONFLICT_REMEDIES.get(route) if status == 409 else _REMEDIES.get(status)
    if 200 <= status < 300:
        remedy = f"the body cannot be decoded, or is nested too deeply; {_NOT_CURRENT}"
    if "--replace-run" in text:  # a current service includes the remedy
        remedy = None
    raise TrajectoryApiError(
        f"{method} {shown_url} answered {status} (attempt {attempt}): {text[:_MAX_QUOTED_CHARS]}"
        + (f"; {remedy}" if remedy else ""),
        status=status,
        retry_after_s=retry_after_s(headers),
    )


def _failed(method: str, url: str, fault: str, *, status: int | None = None) -> TrajectoryApiError:
    return TrajectoryApiError(f"{method} {without_secrets(url)}: {fault}", status=status)


def malformed_answer(method: str, url: str, fault: str) -> TrajectoryApiError:
    """Return the error for a successful response whose content is not that of the route."""
    return _failed(method, url, f"{fault}; {_NOT_CURRENT}", status=200)


def object_of(answer: Any, method: str, url: str) -> dict[str, Any]:
    """Return a decoded response that has to be an object.

    Raises:
        TrajectoryApiError: it is not.
    """
    if not isinstance(answer, dict):
        fault = f"the response is {json_kind(answer)}, expected an object"
        raise malformed_answer(method, url, fault)
    return answer


def checked_object(answer: Any, kind: Any, method: str, url: str) -> dict[str, Any]:
    """Return a decoded response that has the fields of a typed dictionary, and maybe others.

    Raises:
        TrajectoryApiError: it has not.
    """
    fields = object_of(answer, method, url)
    try:
        msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise malformed_answer(method, url, str(error)) from None
    return fields


def _last_part(url: str) -> str:
    path = url.partition("?")[0]
    return path[path.rfind("/") :]


def _spell(detail: Any) -> str:
    """Join the reasons in a response: `path: message; path: message`."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(
        str(entry.get("msg", entry)) if isinstance(entry, dict) else str(entry) for entry in detail
    )


def batch_path(*, lease_s: float | None, wait_s: float | None, consumer: int | None = None) -> str:
    """Return the path that requests a batch; older services ignore the query."""
    numbers = {"lease": lease_s, "wait": wait_s}
    options = {name: f"{value:g}" for name, value in numbers.items() if value is not None}
    if consumer is not None:
        options["consumer"] = str(consumer)
    query = "&".join(f"{name}={value}" for name, value in options.items())
    return f"/batch?{query}" if query else "/batch"


def ack_path(batch_id: str, *, steps_done: int | None) -> str:
    """Return the path that acknowledges a batch; older services ignore the query."""
    query = "" if steps_done is None else f"?steps_done={steps_done}"
    return f"/batch/{quote(batch_id, safe='')}/ack{query}"


def nack_path(batch_id: str) -> str:
    """Return the path that returns a batch to the service."""
    return f"/batch/{quote(batch_id, safe='')}/nack"


def assigned_id(answer: Any, url: str) -> int:
    """Return the trainer's id in a response of `POST /register`.

    Raises:
        TrajectoryApiError: the response has none; another program may listen at the address.
    """
    uuid = answer.get("uuid") if isinstance(answer, dict) else None
    try:
        return int(uuid)  # type: ignore[arg-type]  # checked by the conversion
    except (TypeError, ValueError):
        fault = (
            "the response has no integer uuid; check that a trajectory service (`run-api`) listens "
            "at this address"
        )
        raise _failed("POST", f"{url}/register", fault, status=200) from None


def delivered_groups(answer: Any, url: str) -> list[dict[str, Any]] | None:
    """Return the groups of a response of `GET /batch`; None if no batch is ready.

    Raises:
        TrajectoryApiError: no trainer is registered, or the response has another form.
    """
    answer = object_of(answer, "GET", f"{url}/batch")
    if answer.get("status") == "error":
        fault = "the service was reset or restarted: register the trainer again"
        raise _failed("GET", f"{url}/batch", f"{answer.get('message')}; {fault}", status=200)
    batch = answer.get("batch")
    if batch is None:
        return None
    if not isinstance(batch, list):
        fault = f"batch is {json_kind(batch)}, expected a list of groups or null"
        raise malformed_answer("GET", f"{url}/batch", fault)
    for i, group in enumerate(batch):
        if not isinstance(group, dict):
            fault = f"batch[{i}] is {json_kind(group)}, expected a group"
            raise malformed_answer("GET", f"{url}/batch", fault)
    return batch


def says_unregistered(error: TrajectoryApiError) -> bool:
    """Whether an error means that no trainer is registered at the service."""
    # The service responds 200 with status "error"; the client repeats its message.
    return "not registered" in str(error).lower()


def leased_batch(answer: Any, url: str) -> LeasedBatch | None:
    """Return the batch of a response of `GET /batch?lease=`; otherwise like `delivered_groups`."""
    groups = delivered_groups(answer, url)
    if groups is None:
        return None
    batch_id = answer.get("batch_id")
    is_id = isinstance(batch_id, int | str) and _BATCH_ID.fullmatch(str(batch_id))
    if batch_id is not None and not is_id:
        fault = f"batch_id is {batch_id!a:.80}, expected printable ASCII without blanks"
        raise malformed_answer("GET", f"{url}/batch", fault)
    versions = answer.get("policy_versions")  # absent in responses of older services
    if isinstance(versions, list) and len(versions) == len(groups):
        for group, version in zip(groups, versions, strict=True):
            if version is not None and group.get("policy_version") is None:
                group["policy_version"] = version
    return LeasedBatch(groups, None if batch_id is None else str(batch_id))


def service_address(text: str) -> str:
    """Return an address without trailing slashes, so that a path can be appended.

    Raises:
        ConfigError: it does not start with http:// or https://, or has no host or an invalid port.
    """
    address = text.rstrip("/")
    is_http = address.lower().startswith(("http://", "https://"))
    try:
        parts = urlsplit(address)
        is_valid = is_http and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 host
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"the address of the trajectory service is {text!r}; expected an address such as "
            "http://localhost:8000"
        )
    return address


_FIRST_REPEAT_S = 30.0


class WaitLog:
    """Decides when a wait is logged: at the first failure, after 30 s, then at doubling intervals.

    Each kind of failure is logged separately. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first_at: dict[str, float] = {}
        self._due_s: dict[str, float] = {}

    def due(self, error: TrajectoryApiError) -> str | None:
        """Return the text to log for a failure, None if it was logged recently."""
        kind = type(error).__name__ if error.status is None else f"status {error.status}"
        now = self._clock()
        waited_s = now - self._first_at.setdefault(kind, now)
        due_s = self._due_s.get(kind, 0.0)
        if waited_s < due_s:
            return None
        while due_s <= waited_s:
            due_s = max(2 * due_s, _FIRST_REPEAT_S)
        self._due_s[kind] = due_s
        return f"{error} (for {waited_s:.0f} s now)" if waited_s else str(error)

    def end(self) -> bool:
        """Reset after a response; return whether any failure was logged."""
        was_logged = bool(self._due_s)
        self._first_at.clear()
        self._due_s.clear()
        return was_logged


_PIECE_BYTES = 2**18
MAX_ANSWER_BYTES = 2**32
"""Limit on the size of a response after decompression: that of the largest MessagePack value, and
far above any batch."""
MAX_SHORT_ANSWER_BYTES = 2**26
"""The same for responses without groups."""
_MAX_INLINE_BYTES = 2**16
_OUTAGE_STATUSES = (None, 502, 504)


class AsyncTransport:
    """Sends requests and retries them by a rule, until there is a response.

    Arguments are those of `TrajectoryApiClient`; the address has no slash at the end.

    Attributes:
        traits: traits of the service, known from its responses.
        num_outages: attempts that reached no service, or only a proxy without one.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float,
        retry: RetryRule,
        post_retry: RetryRule,
        token: str | None,
    ) -> None:
        self.traits = ServiceTraits()
        self.num_outages = 0
        self._base_url = base_url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._retry = retry
        self._post_retry = post_retry
        self._auth_headers = auth_headers(token)
        self._session: aiohttp.ClientSession | None = None
        self._waits = WaitLog(time.monotonic)

    async def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        is_repeatable: bool = False,
        is_post: bool = False,
        max_answer_bytes: int | None = None,
    ) -> Any:
        """Send until there is a response; return it decoded.

        Args:
            method: such as `GET`.
            path: from the first slash.
            body: None without one.
            headers: in addition to those of the body.
            is_repeatable: Whether the request is idempotent.
            is_post: Whether it posts groups, which use `post_retry`.
            max_answer_bytes: limit on the size of the response; `MAX_SHORT_ANSWER_BYTES` by
                default.

        Raises:
            TrajectoryApiError: the request was rejected, received no response in time, or one that
                is too large.
        """
        rule = self._post_retry if is_post else self._retry
        max_bytes = max_answer_bytes or MAX_SHORT_ANSWER_BYTES
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                answer = await self._attempt(
                    method, path, body, headers or {}, attempt, max_answer_bytes=max_bytes
                )
            except TrajectoryApiError as error:
                self.num_outages += error.status in _OUTAGE_STATUSES
                delay_s = rule.delay_s(
                    error,
                    attempt=attempt,
                    is_repeatable=is_repeatable or (is_post and self.traits.honors_keys),
                    passed_s=time.monotonic() - started,
                    jitter=random.random() if is_post else 0.0,
                )
                if delay_s is None:
                    raise
                if (is_post or rule.attempts is None) and (text := self._waits.due(error)):
                    logger.warning("retrying until the service responds: %s", text)
            else:
                self._waits.end()
                return answer
            await asyncio.sleep(delay_s)
            attempt += 1

    async def _attempt(
        self,
        method: str,
        path: str,
        body: Body | None,
        headers: Mapping[str, str],
        attempt: int,
        *,
        max_answer_bytes: int,
    ) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=open_socket),
                timeout=self._timeout,
                headers=self._auth_headers,
            )
        url = self._base_url + path
        sent: dict[str, Any] = {"headers": headers}
        if body is not None:
            sent = {"headers": {**headers, **body.headers}, "data": body.content}
            if len(body.content) > _PIECE_BYTES:
                sent["headers"]["Content-Length"] = str(len(body.content))
                sent["data"] = pieces(body.content, num_bytes=_PIECE_BYTES)
        try:
            async with self._session.request(method, url, **sent) as reply:
                too_large = partial(_too_large, method, url, max_answer_bytes, status=reply.status)
                chunks = body_chunks(reply, max_bytes=max_answer_bytes, too_large=too_large)
                content = b"".join([chunk async for chunk in chunks])
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            was_sent = not isinstance(error, aiohttp.ClientConnectorError)
            raise unreachable(method, url, error, attempt=attempt, sent=was_sent) from None
        read = partial(
            read_answer,
            method,
            url,
            status=reply.status,
            headers=reply.headers,
            content=content,
            attempt=attempt,
            secrets=self._auth_headers,
        )
        answer = read() if len(content) <= _MAX_INLINE_BYTES else await asyncio.to_thread(read)
        self.traits.learn(path, reply.headers)
        return answer


def _too_large(method: str, url: str, max_bytes: int, *, status: int) -> TrajectoryApiError:
    fault = f"the response is larger than {max_bytes} bytes; use smaller batches"
    return _failed(method, url, fault, status=status)


_T = TypeVar("_T")
_SECONDS_BETWEEN_LOG_LINES = 30.0


class SyncClient:
    """A connection pool to the trajectory service; thread-safe.

    Its methods wait for the service and raise `TrajectoryApiError` if it rejects the request or
    cannot be reached.

    Args:
        base_url: address of the service, e.g. `http://localhost:8000`.
        timeout_s: limit on connecting, and on every pause while a response arrives.
        retry: when failed requests are retried.
        token: bearer token, sent to the service; never logged.
        max_answer_bytes: limit on the size of a response after decompression.
        answer_limit_s: limit on the time until a response is complete, in addition to the time for
            which the service may wait.
        sleep: waits; replaced in tests.
        clock: monotonic seconds; replaced in tests.

    Raises:
        ConfigError: the address or the token cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        retry: RetryRule | None = None,
        token: str | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        answer_limit_s: float = 600.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._answer_limit_s = answer_limit_s
        self.base_url = service_address(base_url)
        self._timeout_s = timeout_s
        self._auth_headers = auth_headers(token)
        hide_secrets_of_requests()
        # A proxy of the environment variables is used by the default transport only.
        transport = None
        if not may_use_proxy(self.base_url):
            transport = httpx.HTTPTransport(socket_options=socket_options())
        self._client = httpx.Client(
            timeout=timeout_s, headers=self._auth_headers, transport=transport
        )
        self._retry = retry or RetryRule()
        self._sleep = sleep
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used again."""
        self._client.close()

    def set_retry(self, rule: RetryRule) -> None:
        """Use another retry rule from now on."""
        self._retry = rule

    def status(self) -> dict[str, Any]:
        """Return the response of `GET /status`: `current_step`, `queue_size` (groups) and more."""
        return object_of(self._ask("GET", "/status"), "GET", f"{self.base_url}/status")

    def info(self) -> dict[str, Any]:
        """Return `batch_size` and `max_token_len`, -1 before a trainer registered."""
        return object_of(self._ask("GET", "/info"), "GET", f"{self.base_url}/info")

    def _ask(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Any:
        """Send until there is a response; return it decoded.

        Arguments are those of `AsyncTransport.send`; `wait_s`, the time for which the service may
        wait, is added to the timeout.
        """

        def attempt_once(attempt: int) -> Any:
            reply = self._attempt(
                method, path, body, headers=headers, wait_s=wait_s, attempt=attempt
            )
            return self._read(reply, method, path, attempt=attempt)

        return self._repeat(attempt_once)

    def _fetch(self, path: str, *, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Send a GET until it succeeds; return the raw response."""
        return self._repeat(
            lambda attempt: self._attempt("GET", path, headers=headers, attempt=attempt)
        )

    def _repeat(self, attempt_once: Callable[[int], _T]) -> _T:
        """Call with attempt number 1, 2, ... until it succeeds or the rule gives up.

        All requests of the synchronous clients may be retried: reading changes nothing, and a batch
        that was lost in transit is redelivered.
        """
        started = self._clock()
        waits = WaitLog(self._clock)
        attempt = 1
        while True:
            try:
                answer = attempt_once(attempt)
            except TrajectoryApiError as error:
                delay_s = self._retry.delay_s(
                    error,
                    attempt=attempt,
                    is_repeatable=True,
                    passed_s=self._clock() - started,
                )
                if delay_s is None:
                    raise
                if self._retry.attempts is None and (text := waits.due(error)):
                    limit_s = self._retry.deadline_s
                    logger.warning("%s; retrying for up to %g s in total", text, limit_s)
            else:
                if waits.end():
                    logger.info("the trajectory service has answered; going on")
                return answer
            self._sleep(delay_s)
            attempt += 1

    def _attempt(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        attempt: int = 1,
    ) -> httpx.Response:
        """Send once; return a successful response, raise on any other."""
        url = self.base_url + path
        ends_at = self._clock() + wait_s + self._answer_limit_s
        try:
            with self._client.stream(
                method,
                url,
                content=body.content if body else None,
                headers={
                    "Accept-Encoding": "gzip",
                    **(headers or {}),
                    **(body.headers if body else {}),
                },
                timeout=httpx.Timeout(self._timeout_s, read=self._timeout_s + wait_s),
            ) as arriving:
                reply = self._received(arriving, ends_at)
        except httpx.HTTPError as error:
            sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            raise unreachable(method, url, error, attempt=attempt, sent=sent) from None
        if not reply.is_success:
            self._read(reply, method, path, attempt=attempt)
        return reply

    def _received(self, arriving: httpx.Response, ends_at: float) -> httpx.Response:
        """Read a response within the limits; return it decompressed."""
        method, url = arriving.request.method, str(arriving.request.url)
        status = arriving.status_code
        failed = partial(_failed, method, url)

        chunks = arriving.iter_raw()
        # httpx would decompress zstd and Brotli too, which make gigabytes of one piece.
        encoding = arriving.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding == "gzip":
            chunks = gunzipped(chunks, failed)
        elif encoding != "identity":
            fault = f"the response is encoded as {encoding!a:.80}, expected gzip"
            raise failed(fault, status=status)
        parts: list[bytes] = []
        num_bytes = 0
        next_log_at = self._clock() + _SECONDS_BETWEEN_LOG_LINES
        for part in chunks:
            parts.append(part)
            num_bytes += len(part)
            if num_bytes > self._max_answer_bytes:
                raise _too_large(method, url, self._max_answer_bytes, status=status)
            now = self._clock()
            if now > ends_at:
                raise failed(
                    f"the response is not complete after {self._answer_limit_s:g} s, {num_bytes} "
                    "bytes have arrived; check the connection to the service"
                )
            if now >= next_log_at:
                shown = f"{method} {without_secrets(url)}"
                logger.info("%s: %d bytes of the response have arrived", shown, num_bytes)
                next_log_at = now + _SECONDS_BETWEEN_LOG_LINES
        headers = httpx.Headers(arriving.headers)
        for name in ("Content-Encoding", "Content-Length", "Transfer-Encoding"):
            headers.pop(name, None)
        return httpx.Response(status, headers=headers, content=b"".join(parts))

    def _read(self, reply: httpx.Response, method: str, path: str, *, attempt: int = 1) -> Any:
        return read_answer(
            method,
            self.base_url + path,
            status=reply.status_code,
            headers=reply.headers,
            content=reply.content,
            attempt=attempt,
            secrets=self._auth_headers,
        )
