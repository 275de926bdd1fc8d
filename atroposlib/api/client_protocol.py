"""Rules that all clients share: addresses, body formats, retries, and errors with a remedy; pure.

`ServiceTraits` holds what a client has learned about its service, and chooses the format of bodies:

| service | format of posted groups |
|---|---|
| sends `Accept-Post: ... application/msgpack` | binary; honors `Idempotency-Key` |
| any other | JSON, gzip if that saves time |
| rejected gzip, accepted the same content plain | plain JSON |

`WaitNotes` decides when a wait for the service is logged: at the first failure, then at growing
intervals.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec

from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.io import retry_after_s
from atroposlib.utils.text import hide_secrets, without_secrets
from atroposlib.wire import MEDIA_TYPES, Lane, decode_batch

__all__ = [
    "BINARY_LANE_HEADERS",
    "POST_RETRY",
    "Body",
    "Format",
    "LeasedBatch",
    "NoServiceError",
    "NotReachedError",
    "RetryRule",
    "ServiceTraits",
    "WaitNotes",
    "ack_path",
    "answer_lane",
    "auth_headers",
    "batch_path",
    "decode_answer",
    "delivered_groups",
    "encode_body",
    "is_on_this_machine",
    "leased_batch",
    "plain",
    "read_answer",
    "says_unregistered",
    "service_address",
    "unreachable",
    "with_status_defaults",
]

_MIN_GZIP_BYTES = 1024
_ADVERTISING_PATHS = frozenset({"/info", "/wandb_info", "/register", "/register-env"})
_FORMAT_REFUSALS = (400, 415, 422)

BINARY_LANE_HEADERS = {"Accept": f"{MEDIA_TYPES['msgpack']}; zstd=1, {MEDIA_TYPES['json']};q=0.5"}
"""Headers that request groups in the binary format; services without it send JSON."""


class Encoder(Protocol):
    """`wire.encode_group` or `wire.encode_groups`."""

    def __call__(self, value: Any, /, lane: Lane, *, zstd: bool) -> bytes:
        """Encode a group or groups; compression applies to the binary format only."""


class Format(NamedTuple):
    """Encoding of a request body."""

    lane: Lane
    is_gzip_wanted: bool = False


_BINARY = Format("msgpack")
_GZIP = Format("json", is_gzip_wanted=True)
_PLAIN = Format("json")


class Body(NamedTuple):
    """A request body and the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]

    @property
    def is_compressed(self) -> bool:
        """Whether the content is gzip."""
        return "Content-Encoding" in self.headers

    @property
    def is_plain(self) -> bool:
        """Whether every version of the service can read it."""
        return not self.is_compressed and self.headers["Content-Type"] == MEDIA_TYPES["json"]


class ServiceTraits:
    """Traits of a service, learned from its responses; the latest response counts.

    Attributes:
        honours_keys: Whether a repeated `Idempotency-Key` stores nothing twice. True for services
            that have the binary format.
    """

    def __init__(self) -> None:
        self.honours_keys = False
        self._takes_binary = False
        self._takes_gzip = True

    def learn(self, path: str, headers: Mapping[str, str]) -> None:
        """Update from the `Accept-Post` header of a successful response.

        A service with the binary format always sends it; its absence means that an older service
        has taken over.
        """
        offer = headers.get("Accept-Post", "")
        if offer or path in _ADVERTISING_PATHS:
            self._takes_binary = self.honours_keys = MEDIA_TYPES["msgpack"] in offer.lower()

    def formats(self) -> list[Format]:
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
                self._takes_binary = self.honours_keys = False


def is_on_this_machine(url: str) -> bool:
    """Whether an address is on this machine, where compression only costs time."""
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def encode_body(encode: Encoder, value: Any, form: Format, *, zstd: bool = False) -> Body:
    """Encode a group or groups.

    Args:
        encode: writes `value` in a format.
        value: the group or groups to post.
        form: the format.
        zstd: Whether groups are compressed in the binary format.

    Raises:
        GroupError: a group is malformed.
    """
    content = encode(value, form.lane, zstd=zstd)
    if form.is_gzip_wanted and len(content) >= _MIN_GZIP_BYTES:
        # Level 1: token ids shrink well already, and higher levels cost more than they save.
        packed = gzip.compress(content, compresslevel=1)
        if len(packed) < len(content):
            headers = {"Content-Type": MEDIA_TYPES["json"], "Content-Encoding": "gzip"}
            return Body(packed, headers)
    return Body(content, {"Content-Type": MEDIA_TYPES[form.lane]})


def plain(request: Mapping[str, Any]) -> Body:
    """Encode a small request."""
    return Body(msgspec.json.encode(request), {"Content-Type": MEDIA_TYPES["json"]})


def answer_lane(headers: Mapping[str, str]) -> Lane:
    """Return the format of a response."""
    media_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return "msgpack" if media_type == MEDIA_TYPES["msgpack"] else "json"


def decode_answer(content: bytes, headers: Mapping[str, str]) -> Any:
    """Decode a response in its own format.

    Raises:
        ValueError: it cannot be decoded.
    """
    if answer_lane(headers) == "msgpack":
        return decode_batch(content, "msgpack")
    return msgspec.json.decode(content)


_MAX_QUOTED_CHARS = 500
_BUSY_STATUSES = (429, 503)
_STATUS_ENV_DEFAULTS = {"self_queue_size": 0, "max_group_size": 1, "unallocated_fraction": 1.0}
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
        """Return the seconds to wait before the next attempt, None to give up.

        Args:
            error: why the attempt failed.
            attempt: how many attempts were made, from 1.
            is_repeatable: Whether the request is idempotent. If not, it is retried only after
                failures in which the service did nothing.
            passed_s: seconds since the first attempt began.
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
    was_put_off = error.status in _BUSY_STATUSES and error.retry_after_s is not None
    may_be_passing = error.status is None or error.status >= 500 or error.status == 408
    return was_not_sent or was_put_off or (is_repeatable and may_be_passing)


def auth_headers(token: str | None) -> dict[str, str]:
    """Return the header that carries a token; empty without a token.

    Raises:
        ConfigError: the token cannot be sent; the message does not show it.
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
    """Describe a request that received no response."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    what = hide_secrets(what)
    message = (
        f"{method} {without_secrets(url)} got no answer (attempt {attempt}): {what}; "
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

    Args:
        method: of the request.
        url: of the request.
        status: of the answer.
        headers: of the answer.
        content: of the answer.
        attempt: how many attempts were made, from 1.
        secrets: request headers whose values are removed from error messages.

    Raises:
        NoServiceError: a route that every service has is missing.
        TrajectoryApiError: the status is not 2xx, or the body cannot be decoded.
    """
    try:
        answer = decode_answer(content, headers)
    except (msgspec.DecodeError, ValueError):
        answer = None
    is_null = answer_lane(headers) == "json" and content.strip() == b"null"
    if 200 <= status < 300 and (answer is not None or is_null):
        return answer
    shown_url = without_secrets(url)
    if _lacks_common_route(status, url):  # the body, possibly an HTML page, adds nothing
        raise NoServiceError(
            f"{method} {shown_url} answered {status} (attempt {attempt}): the server at this "
            "address is not a trajectory service; check the address, `run-api` starts a service",
            status=status,
        )
    detail = answer.get("detail", answer) if isinstance(answer, dict) else None
    said = _spell(detail) if detail else content[: 4 * _MAX_QUOTED_CHARS].decode(errors="replace")
    for secret in (secrets or {}).values():
        said = said.replace(secret, "***").replace(secret.removeprefix("Bearer "), "***")
    remedy = _remedy(status, url)
    if "--replace-run" in said:  # a current service includes the remedy
        remedy = None
    raise TrajectoryApiError(
        f"{method} {shown_url} answered {status} (attempt {attempt}): {said[:_MAX_QUOTED_CHARS]}"
        + (f"; {remedy}" if remedy else ""),
        status=status,
        retry_after_s=retry_after_s(headers),
    )


def _lacks_common_route(status: int, url: str) -> bool:
    path = url.partition("?")[0]
    return status in _MISSING_ROUTE_STATUSES and path[path.rfind("/") :] in _COMMON_ROUTES


def _remedy(status: int, url: str) -> str | None:
    if status == 409:
        path = url.partition("?")[0]
        return _CONFLICT_REMEDIES.get(path[path.rfind("/") :])
    return _REMEDIES.get(status)


def _spell(detail: Any) -> str:
    """Join the reasons of the service: `path: message; path: message`."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(
        str(entry.get("msg", entry)) if isinstance(entry, dict) else str(entry) for entry in detail
    )


def with_status_defaults(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in fields that older services leave out of `GET /status-env`."""
    return {**_STATUS_ENV_DEFAULTS, **answer}


def batch_path(*, lease_s: float | None, wait_s: float | None, consumer: int | None = None) -> str:
    """Return the path that requests a batch; older services ignore the query."""
    numbers = {"lease": lease_s, "wait": wait_s}
    wishes = {name: f"{value:g}" for name, value in numbers.items() if value is not None}
    if consumer is not None:
        wishes["consumer"] = str(consumer)
    query = "&".join(f"{name}={value}" for name, value in wishes.items())
    return f"/batch?{query}" if query else "/batch"


def ack_path(batch_id: str, *, steps_done: int | None) -> str:
    """Return the path that acknowledges a batch; older services ignore the query."""
    query = "" if steps_done is None else f"?steps_done={steps_done}"
    return f"/batch/{batch_id}/ack{query}"


def delivered_groups(answer: Mapping[str, Any], url: str) -> list[dict[str, Any]] | None:
    """Return the groups of `GET /batch`, None when no batch is ready.

    Raises:
        TrajectoryApiError: no trainer is registered.
    """
    if answer.get("status") == "error":
        raise TrajectoryApiError(
            f"GET {without_secrets(url)}/batch: {answer.get('message')}; "
            "the service was reset or restarted: register the trainer again",
            status=200,
        )
    batch: list[dict[str, Any]] | None = answer.get("batch")
    return batch


def says_unregistered(error: TrajectoryApiError) -> bool:
    """Whether an error means that no trainer is registered at the service."""
    # The service responds 200 with status "error"; the client repeats its message.
    return "not registered" in str(error).lower()


def leased_batch(answer: Mapping[str, Any], url: str) -> LeasedBatch | None:
    """Return the batch of `GET /batch?lease=`, None if none is ready.

    Raises:
        TrajectoryApiError: no trainer is registered.
    """
    groups = delivered_groups(answer, url)
    if groups is None:
        return None
    batch_id = answer.get("batch_id")
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
    if not _is_http(address):
        raise ConfigError(
            f"the address of the trajectory service is {text!r}; expected an address such as "
            "http://localhost:8000"
        )
    return address


def _is_http(address: str) -> bool:
    if not address.lower().startswith(("http://", "https://")):
        return False
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 host
        return False


_FIRST_REPEAT_S = 30.0


class WaitNotes:
    """Decides when a wait is logged: at the first failure, after 30 s, then at doubling intervals.

    Each kind of failure is logged separately. Not thread-safe.

    Args:
        clock: monotonic seconds.
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
        was_told = bool(self._due_s)
        self._first_at.clear()
        self._due_s.clear()
        return was_told
