"""Settings of one trajectory service."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["ApiSettings"]


class ApiSettings(BaseModel):
    """How the service treats bodies and browsers; fixed once the application is built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_body_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1,
        description="Largest request body after decompression, in bytes; above it: 413.",
    )
    gzip_min_bytes: int = Field(
        default=1000, ge=0, description="Smallest response body worth compressing, in bytes."
    )
    gzip_level: int = Field(
        default=1, ge=1, le=9, description="Compression level of responses, 1 (fastest) to 9."
    )
    cors_origins: tuple[str, ...] = Field(
        default=("*",), description="Origins whose pages may call the service; `*` is every one."
    )
