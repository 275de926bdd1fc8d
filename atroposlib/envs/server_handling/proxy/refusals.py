"""The one error that every dialect answers in its own shape, and how other errors become it.

raised anywhere ── as_refusal ──► ProxyRefusal ── the dialect's `error_body` ──► HTTP response
"""

from __future__ import annotations

from typing import Any

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

__all__ = [
    "ProxyRefusal",
    "as_refusal",
    "bad_request",
    "invalid_body",
    "openai_error_body",
    "session_not_found",
    "upstream_unavailable",
    "wrong_key",
    "wrong_setup",
]

_RETRY_SOON_S = 5
_FINAL = frozenset({424, 501})
_OWN_CREDENTIALS = frozenset({401, 403, 407})


class ProxyRefusal(AtroposError):
    """A request the proxy refuses or could not complete.

    Attributes:
        status: HTTP status.
        kind: Class of the error in OpenAI's vocabulary, as `invalid_request_error`.
        code: What exactly, as `context_length_exceeded`; agents may branch on it.
        param: Field of the request that is wrong, None when it is not one field.
        retry_after_s: Seconds for a Retry-After header, None for none.
        details: One entry per wrong field of a body, as FastAPI lists them.
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
        """Headers of the response; clients do not repeat what will be refused again."""
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
    """A request that is understood and cannot be met (400)."""
    return ProxyRefusal(message, status=400, code=code, param=param)


def invalid_body(details: list[dict[str, Any]]) -> ProxyRefusal:
    """A body with missing or mistyped fields (422).

    Args:
        details: pydantic's errors: `loc`, `msg` and `type` each; at least one.
    """
    places = [".".join(str(part) for part in entry["loc"]) for entry in details]
    told = "; ".join(
        f"{place or 'body'}: {entry['msg']}"
        for place, entry in list(zip(places, details, strict=True))[:5]
    )
    more = f" (and {len(details) - 5} more)" if len(details) > 5 else ""
    return ProxyRefusal(
        told + more, status=422, code="invalid_body", param=places[0] or None, details=details
    )


def session_not_found() -> ProxyRefusal:
    """An unknown, deleted or expired session (404)."""
    return ProxyRefusal(
        "there is no such session; it may have been deleted, or expired while nobody used it",
        status=404,
        code="session_not_found",
    )


def wrong_key() -> ProxyRefusal:
    """A missing, unknown or foreign key (401)."""
    return ProxyRefusal(
        "the key is missing, or not that of a session that is open; give the api_key of the "
        "session as `Authorization: Bearer` or `x-api-key`",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def upstream_unavailable(reason: str) -> ProxyRefusal:
    """The inference server is down or keeps failing (503); the same request may work later."""
    return ProxyRefusal(
        f"the inference server did not answer: {reason}",
        status=503,
        kind="server_error",
        code="upstream_unavailable",
        retry_after_s=_RETRY_SOON_S,
    )


def wrong_setup(reason: str) -> ProxyRefusal:
    """The environment is set up in a way that no request can be answered (424).

    Not 5xx: clients repeat those, and the same request fails until a person changes the setup.
    """
    return ProxyRefusal(reason, status=424, code="environment_setup")


def as_refusal(error: Exception) -> ProxyRefusal:
    """Return the refusal that tells an agent what happened to its request.

    Texts of the engine are passed on, but those about the proxy's own credentials are not.
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
        return upstream_unavailable("it refused the key that the proxy has for it")
    if status is not None and 400 <= status < 500:
        return bad_request(f"the inference server refused the request: {error}", code="refused")
    if isinstance(error, (RetriesExhaustedError, ServerDownError)):
        return upstream_unavailable(str(error))
    if isinstance(error, NotImplementedError):
        return ProxyRefusal(str(error), status=501, kind="server_error", code="not_implemented")
    return ProxyRefusal(
        f"the request failed inside of the proxy ({type(error).__name__}); its log says more",
        status=500,
        kind="server_error",
        code="internal_error",
    )
