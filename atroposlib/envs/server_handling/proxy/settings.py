"""Limits and keys of the proxy."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

from atroposlib.utils.web_pages import check_allowed_host

__all__ = ["ProxySettings"]


class ProxySettings(BaseModel):
    """How much the proxy allows, and who must show a key."""

    session_idle_s: float = Field(
        default=3600.0,
        gt=0,
        description="A session nobody uses for this long is deleted, in seconds. A request in "
        "flight counts as use.",
    )
    max_sessions: int = Field(
        default=4096, ge=1, description="Sessions open at once; more are refused with status 429."
    )
    max_body_bytes: int = Field(
        default=32 * 1024 * 1024, ge=1, description="Largest body of a request, in bytes."
    )
    max_choices: int = Field(
        default=128, ge=1, description="Largest n of one request, several prompts counted."
    )
    upstream_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="How long a request waits for an inference server that is down, in seconds, "
        "before it is answered with status 503.",
    )
    allowed_hosts: tuple[Annotated[str, AfterValidator(check_allowed_host)], ...] = Field(
        default=(),
        description="Names beyond this machine's own that agents reach the proxy by where a "
        "reverse proxy or a tunnel passes them on; with `require_keys` and `admin_key` any name "
        "is served.",
    )
    require_keys: bool = Field(
        default=False,
        description="Ask for the session's own key on every route of the session. Without it the "
        "session's address is enough, as long as no other session's key is shown.",
    )
    admin_key: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="Key that creating, listing and deleting sessions and changing the servers "
        "asks for; None asks for none.",
    )
