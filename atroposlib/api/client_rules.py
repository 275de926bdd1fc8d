"""What all clients agree on: retries, defaults, and errors that say what to do; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from atroposlib.api.client_bodies import answer_lane, decode_answer
from atroposlib.errors import ConfigError, TrajectoryApiError
from atroposlib.utils.io import retry_after_s
from atroposlib.utils.secret_masking import hide_secrets, without_secrets

__all__ = [
    "POST_RETRY",
    "LeasedBatch",
    "NoServiceError",
    "NotReachedError",
    "RetryRule",
    "ack_path",
    "auth_headers",
    "batch_path",
    "delivered_groups",
    "leased_batch",
    "read_answer",
    "says_unregistered",
    "unreachable",
    "with_status_defaults",
]

_MAX_QUOTED_CHARS = 500
_BUSY_STATUSES = (429, 503)
_STATUS_ENV_DEFAULTS = {"self_queue_size": 0, "max_group_size": 1, "unallocated_fraction": 1.0}
_REMEDIES = {
    401: "the service asks for a token: set ATROPOS_API_TOKEN, or give the client its `token`",
    403: "the token is not for this: take one of the right role (environment, trainer or admin)",
    404: "the service was reset or replaced: register again, or check the address",
    413: "post fewer groups at a time",
    422: "the request is malformed; repeating it will not help",
    503: "the service is busy; wait and repeat",
}
_COMMON_ROUTES = ("/register", "/register-env", "/batch", "/info", "/status", "/wandb_info")
"""Routes that every service has, whatever its age."""
_MISSING_ROUTE_STATUSES = (404, 405, 501)
_CONFLICT_REMEDIES = {
    "/register": "use the settings of the running run, or take it over with --replace-run",
    "/ack": "its groups may be trained on twice; ask for longer leases",
}


class LeasedBatch(NamedTuple):
    """A batch that is the trainer's until its lease runs out."""

    groups: list[dict[str, Any]]
    """Decoded groups, oldest first; `policy_version` is the service's where the body has none."""
    batch_id: str | None
    """What `ack` and `nack` take; None from a service without leases, where it is taken already."""


class RetryRule(NamedTuple):
    """How often, when and for how long a failed request is repeated."""

    attempts: int | None = 3
    """Attempts in all, None for as many as fit into `deadline_s`."""
    first_delay_s: float = 0.2
    """Pause after the first failure; every further one is four times as long."""
    max_delay_s: float = 10.0
    """Longest pause of our own choice."""
    deadline_s: float = 120.0
    """No attempt starts later than this after the first one."""

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
            is_repeatable: whether doing the request twice is the same as doing it once. If not,
                only failures after which the service certainly did nothing are repeated.
            passed_s: seconds since the first attempt began.
            jitter: 0 to 1, lengthens the pause by up to a quarter: spreads many clients out.
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
    """There is no trajectory service at the address, or it never came up."""


def _may_repeat(error: TrajectoryApiError, *, is_repeatable: bool) -> bool:
    if isinstance(error, NoServiceError):
        return False
    was_not_sent = isinstance(error, NotReachedError)
    was_put_off = error.status in _BUSY_STATUSES and error.retry_after_s is not None
    may_be_passing = error.status is None or error.status >= 500 or error.status == 408
    return was_not_sent or was_put_off or (is_repeatable and may_be_passing)


def auth_headers(token: str | None) -> dict[str, str]:
    """Return the header that carries a token, none without one.

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
    """Describe a request that got no answer."""
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
    """Return what a good answer holds, in either lane.

    Args:
        method: of the request.
        url: of the request.
        status: of the answer.
        headers: of the answer.
        content: of the answer.
        attempt: how many attempts were made, from 1.
        secrets: request headers whose values no error may repeat.

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
    if _lacks_common_route(status, url):  # the body, maybe a page of HTML, says nothing more
        raise NoServiceError(
            f"{method} {shown_url} answered {status} (attempt {attempt}): what answers there is "
            "no trajectory service; check the address, `run-api` starts a service",
            status=status,
        )
    detail = answer.get("detail", answer) if isinstance(answer, dict) else None
    said = _spell(detail) if detail else content[: 4 * _MAX_QUOTED_CHARS].decode(errors="replace")
    for secret in (secrets or {}).values():
        said = said.replace(secret, "***").replace(secret.removeprefix("Bearer "), "***")
    remedy = _remedy(status, url)
    if "--replace-run" in said:  # a service of today says so itself
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
    """Write the service's reasons in a line: `path: message; path: message`."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(
        str(entry.get("msg", entry)) if isinstance(entry, dict) else str(entry) for entry in detail
    )


def with_status_defaults(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what older services leave out of `GET /status-env`."""
    return {**_STATUS_ENV_DEFAULTS, **answer}


def batch_path(*, lease_s: float | None, wait_s: float | None, consumer: int | None = None) -> str:
    """Return the path that asks for a batch; older services ignore what follows `?`."""
    numbers = {"lease": lease_s, "wait": wait_s}
    wishes = {name: f"{value:g}" for name, value in numbers.items() if value is not None}
    if consumer is not None:
        wishes["consumer"] = str(consumer)
    query = "&".join(f"{name}={value}" for name, value in wishes.items())
    return f"/batch?{query}" if query else "/batch"


def ack_path(batch_id: str, *, steps_done: int | None) -> str:
    """Return the path that acknowledges a batch; older services ignore what follows `?`."""
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
    """Tell whether an error means that the service has forgotten the trainer, or never knew it."""
    # The service answers 200 with status "error"; the client passes its sentence on.
    return "not registered" in str(error).lower()


def leased_batch(answer: Mapping[str, Any], url: str) -> LeasedBatch | None:
    """Return the batch of `GET /batch?lease=`, None when none is ready; raises as above."""
    groups = delivered_groups(answer, url)
    if groups is None:
        return None
    batch_id = answer.get("batch_id")
    versions = answer.get("policy_versions")  # an older service does not say
    if isinstance(versions, list) and len(versions) == len(groups):
        for group, version in zip(groups, versions, strict=True):
            if version is not None and group.get("policy_version") is None:
                group["policy_version"] = version
    return LeasedBatch(groups, None if batch_id is None else str(batch_id))
