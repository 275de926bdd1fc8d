"""What both clients agree on: bodies, retries, defaults, and errors that say what to do; pure."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from atroposlib.errors import TrajectoryApiError
from atroposlib.utils.io import retry_after_s

__all__ = [
    "Body",
    "RetryRule",
    "compressed",
    "delivered_groups",
    "read_answer",
    "unreachable",
    "with_status_defaults",
]

_MIN_GZIP_BYTES = 1024
_MAX_QUOTED_CHARS = 500
_JSON = {"Content-Type": "application/json"}
_STATUS_ENV_DEFAULTS = {"self_queue_size": 0, "max_group_size": 1, "unallocated_fraction": 1.0}
_REMEDIES = {
    404: "the service was reset or replaced: register again, or check the address",
    409: "use the settings of the running run, or replace them",
    413: "post fewer groups at a time",
    422: "the request is malformed; repeating it will not help",
    503: "the service is busy; wait and repeat",
}


class Body(NamedTuple):
    """A request body and the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]

    @property
    def is_compressed(self) -> bool:
        """Whether the content is gzip."""
        return "Content-Encoding" in self.headers


class RetryRule(NamedTuple):
    """How often and when a failed request is repeated."""

    attempts: int = 3
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0

    def delay_s(
        self, error: TrajectoryApiError, *, attempt: int, is_repeatable: bool
    ) -> float | None:
        """Return the seconds to wait before the next attempt, None to give up.

        Args:
            error: why the attempt failed.
            attempt: how many attempts were made, from 1.
            is_repeatable: whether doing the request twice is the same as doing it once. If not,
                only failures after which the service certainly did nothing are repeated.
        """
        if attempt >= self.attempts:
            return None
        was_refused = error.status == 503 and error.retry_after_s is not None
        was_not_sent = isinstance(error, NotReachedError)
        may_be_passing = error.status is None or error.status >= 500
        if not (was_refused or was_not_sent or (is_repeatable and may_be_passing)):
            return None
        if error.retry_after_s is not None:
            return min(error.retry_after_s, self.max_delay_s)
        return float(min(self.first_delay_s * 4 ** (attempt - 1), self.max_delay_s))


class NotReachedError(TrajectoryApiError):
    """No connection could be made: the service has not seen the request."""


def plain(content: bytes) -> Body:
    """Wrap encoded JSON."""
    return Body(content, _JSON)


def compressed(content: bytes) -> Body:
    """Wrap encoded JSON, as gzip where that is worth it."""
    if len(content) >= _MIN_GZIP_BYTES:
        # Level 1: token ids shrink well already, and higher levels cost more than they save.
        packed = gzip.compress(content, compresslevel=1)
        if len(packed) < len(content):
            return Body(packed, {**_JSON, "Content-Encoding": "gzip"})
    return plain(content)


def unreachable(method: str, url: str, error: Exception, *, attempt: int, sent: bool) -> Exception:
    """Describe a request that got no answer."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    message = (
        f"{method} {url} got no answer (attempt {attempt}): {what}; "
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
) -> Any:
    """Return the decoded JSON of a good answer.

    Raises:
        TrajectoryApiError: the status is not 2xx, or the body is not JSON.
    """
    try:
        answer = msgspec.json.decode(content)
    except msgspec.DecodeError:
        answer = None
    if 200 <= status < 300 and (answer is not None or content.strip() == b"null"):
        return answer
    detail = answer.get("detail", answer) if isinstance(answer, dict) else None
    said = _spell(detail) if detail else content.decode(errors="replace")
    remedy = _REMEDIES.get(status)
    raise TrajectoryApiError(
        f"{method} {url} answered {status} (attempt {attempt}): {said[:_MAX_QUOTED_CHARS]}"
        + (f"; {remedy}" if remedy else ""),
        status=status,
        retry_after_s=retry_after_s(headers),
    )


def _spell(detail: Any) -> str:
    """Write the service's reasons in a line: `path: message; path: message`."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(
        str(entry.get("msg", entry)) if isinstance(entry, dict) else str(entry) for entry in detail
    )


def with_status_defaults(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what older services leave out of `GET /status-env`."""
    return {**_STATUS_ENV_DEFAULTS, **answer}


def delivered_groups(answer: Mapping[str, Any], url: str) -> list[dict[str, Any]] | None:
    """Return the groups of `GET /batch`, None when no batch is ready.

    Raises:
        TrajectoryApiError: no trainer is registered.
    """
    if answer.get("status") == "error":
        raise TrajectoryApiError(
            f"GET {url}/batch: {answer.get('message')}; "
            "the service was reset or restarted: register the trainer again",
            status=200,
        )
    batch: list[dict[str, Any]] | None = answer.get("batch")
    return batch
