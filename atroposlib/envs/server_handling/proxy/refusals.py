"""Convert every error to `ProxyRefusal`, which each dialect renders in its own format.

raised anywhere ── as_refusal ──► ProxyRefusal ── the dialect's `error_body` ──► HTTP response
"""

from __future__ import annotations

from typing import Any, NoReturn

from atroposlib.envs.server_handling.retry import (
    RetriesExhaustedError,
    ServerDownError,
    http_status,
)
from atroposlib.errors import (
    AtroposError,
    ConfigError,
    ContextOverflowError,
    MissingExtraError,
    PromptError,
)

_RETRY_SOON_S = 5
_FINAL = frozenset({424, 501})
_OWN_CREDENTIALS = frozenset({401, 403, 407})


class ProxyRefusal(AtroposError):
    """A request the proxy refuses or could not complete.

    Attributes:
        status: HTTP status.
        kind: Error type in OpenAI's vocabulary, such as `invalid_request_error`.
        code: Specific error code, such as `context_length_exceeded`; agents may branch on it.
        param: Invalid field of the request; None if it is not a single field.
        retry_after_s: Seconds for a Retry-After header; None leaves it out.
        details: One entry per invalid field of a body, in FastAPI's format.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str = "invalid_request_error",
        code: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        details: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.details = details

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response; those of a final refusal prevent retries of clients."""
        if self.retry_after_s is not None:
            return {"Retry-After": str(self.retry_after_s)}
        return {"x-should-retry": "false"} if self.status in _FINAL else {}


def openai_error_body(refusal: ProxyRefusal) -> dict[str, Any]:
    """Return `{"error": {"message", "type", "code", "param"}}`, with `detail` for a wrong body."""
    body: dict[str, Any] = {
        "error": {
            "message": str(refusal),
            "type": refusal.kind,
            "code": refusal.code,
            "param": refusal.param,
        }
    }
    return body if refusal.details is None else {"detail": refusal.details, **body}


def bad_request(
    message: str, *, code: str = "invalid_value", param: str | None = None
) -> ProxyRefusal:
    """Return the refusal of a well-formed request that cannot be fulfilled (400)."""
    return ProxyRefusal(message, status=400, code=code, param=param)


def refuse(path: str, message: str) -> NoReturn:
    """Raise the refusal of one field of a body (400); `path` is like `input[2].content`."""
    raise bad_request(f"{path}: {message}", param=path)


def invalid_body(details: list[dict[str, Any]]) -> ProxyRefusal:
    """Return the refusal of a body with missing or mistyped fields (422).

    `details` are pydantic's errors with `loc`, `msg` and `type`; at least one.
    """
    places = [".".join(str(part) for part in entry["loc"]) for entry in details]
    problems = "; ".join(
        f"{place or 'body'}: {entry['msg']}"
        for place, entry in list(zip(places, details, strict=True))[:5]
    )
    more = f" (and {len(details) - 5} more)" if len(details) > 5 else ""
    return ProxyRefusal(
        problems + more, status=422, code="invalid_body", param=places[0] or None, details=details
    )


def session_not_found() -> ProxyRefusal:
    """Return the refusal for an unknown, deleted or expired session (404)."""
    return ProxyRefusal(
        "there is no such session; it may have been deleted, or have expired after being idle",
        status=404,
        code="session_not_found",
    )


def wrong_key() -> ProxyRefusal:
    """Return the refusal for a missing or unknown key, or one of another session (401)."""
    return ProxyRefusal(
        "the key is missing or does not belong to an open session; send the api_key of the "
        "session as `Authorization: Bearer` or `x-api-key`",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def upstream_unavailable(reason: str) -> ProxyRefusal:
    """Return the refusal while the inference server is down or failing (503); a retry may work."""
    return ProxyRefusal(
        f"the inference server did not answer: {reason}",
        status=503,
        kind="server_error",
        code="upstream_unavailable",
        retry_after_s=_RETRY_SOON_S,
    )


def wrong_setup(reason: str) -> ProxyRefusal:
    """Return the refusal for a wrong setup of the environment (424), which clients do not retry."""
    return ProxyRefusal(reason, status=424, code="environment_setup")


def as_refusal(error: Exception) -> ProxyRefusal:
    """Return the refusal that reports an error to the agent.

    Error texts of the engine are passed on, except those about the proxy's own credentials.
    """
    if isinstance(error, ProxyRefusal):
        return error
    if isinstance(error, ContextOverflowError):
        return bad_request(str(error), code="context_length_exceeded", param="messages")
    if isinstance(error, PromptError):
        return bad_request(str(error), code="render_failed", param="messages")
    if isinstance(error, (ConfigError, MissingExtraError)):
        return wrong_setup(str(error))
    status = http_status(error)
    if status in _OWN_CREDENTIALS:
        return upstream_unavailable("it refused the key of the proxy")
    if status is not None and 400 <= status < 500:
        return bad_request(f"the inference server refused the request: {error}", code="refused")
    if isinstance(error, (RetriesExhaustedError, ServerDownError)):
        return upstream_unavailable(str(error))
    if isinstance(error, NotImplementedError):
        return ProxyRefusal(str(error), status=501, kind="server_error", code="not_implemented")
    return ProxyRefusal(
        f"the request failed inside the proxy ({type(error).__name__}); see its log for details",
        status=500,
        kind="server_error",
        code="internal_error",
    )
