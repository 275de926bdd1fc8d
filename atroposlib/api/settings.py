"""Settings of one trajectory service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from atroposlib.api.store.open import check_run_name, check_store_url
from atroposlib.errors import ConfigError
from atroposlib.utils.text import without_secrets
from atroposlib.utils.web_pages import check_allowed_host

_MIB = 1024 * 1024
_MAX_URL_CHARACTERS = 2048


def _check_run_name(name: str | None) -> str | None:
    return None if name is None else check_run_name(name)


def _check_engine_url(url: str) -> str:
    """Return the base URL of an engine, without a slash or `/v1` at its end."""
    try:
        parsed = urlsplit(url)
        is_usable = parsed.scheme in ("http", "https") and bool(parsed.hostname)
        is_usable = is_usable and parsed.port != 0 and not parsed.query and not parsed.fragment
    except ValueError:
        is_usable = False
    if not is_usable or len(url) > _MAX_URL_CHARACTERS:
        raise ConfigError(
            f"engine {without_secrets(url)[:100]!r} is not the address of an inference server; "
            "expected one such as http://node:9001"
        )
    return url.rstrip("/").removesuffix("/v1")


class ApiSettings(BaseModel):
    """Store, limits and access rules of one service; immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    store: Annotated[str, AfterValidator(check_store_url)] = Field(
        default="memory",
        description="Store of the run: `memory` (lost when the process ends), `sqlite` (a file "
        "under `data_dir`) or the URL of a Redis server such as "
        "`redis://host:6379/0`, which several services may share.",
    )
    data_dir: Path = Field(
        default=Path("atropos_runs"), description="Directory of the `sqlite` files, one per run."
    )
    run_name: Annotated[str | None, AfterValidator(_check_run_name)] = Field(
        default=None,
        description="Name of the run to create or resume; None creates one with a new name.",
    )
    fsync: bool = Field(
        default=False,
        description="Whether `sqlite` waits for the disk at every write, so that a run also "
        "survives a power failure, not only the end of the process.",
    )
    max_body_bytes: int = Field(
        default=128 * _MIB,
        ge=1,
        description="Maximum size of a request body after decompression, in bytes; larger ones "
        "are rejected with 413.",
    )
    max_buffered_bytes: int = Field(
        default=512 * _MIB,
        ge=1,
        description="Maximum size of all request bodies in memory, in bytes; further bodies are "
        "read once there is room.",
    )
    max_queue_sequences: int = Field(
        default=0,
        ge=0,
        description="Maximum number of sequences that wait for a trainer; further groups are "
        "rejected with 503 and Retry-After. 0: no limit.",
    )
    max_queue_bytes: int = Field(
        default=0,
        ge=0,
        description="Maximum size of groups that wait for a trainer, in bytes; further groups are "
        "rejected with 503 and Retry-After. 0: no limit.",
    )
    max_waiting_requests: int = Field(
        default=4096,
        ge=0,
        description="Maximum number of requests that wait for a batch (`?wait=`); further ones "
        "are rejected with 503 and Retry-After. 0: no limit.",
    )
    max_batches_in_flight: int = Field(
        default=1024,
        ge=0,
        description="Maximum number of unacknowledged batches; further requests are rejected with "
        "429 and Retry-After. 0: no limit.",
    )
    max_staleness_steps: int = Field(
        default=0,
        ge=0,
        description="Maximum staleness of a group when it is delivered, in trainer steps; limits "
        "how many groups environments may start. 0: no limit.",
    )
    engines: tuple[Annotated[str, AfterValidator(_check_engine_url)], ...] = Field(
        default=(),
        max_length=256,
        description="Inference servers to share among environments, such as `http://node:9001`; "
        "the service polls their metrics and limits how many sequences environments generate. "
        "An empty list sets no limit.",
    )
    engine_poll_s: float = Field(
        default=1.0, ge=0.1, le=60.0, description="Seconds between two polls of the engines."
    )
    engine_window_s: float = Field(
        default=10.0,
        ge=1.0,
        le=3600.0,
        description="Seconds of metrics of an engine on which each change of its limit is based.",
    )
    max_engine_sequences: int = Field(
        default=4096,
        ge=8,
        le=1_000_000,
        description="Maximum number of sequences that environments generate on one engine.",
    )
    env_expiry_s: float = Field(
        default=600.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds without a request after which an environment counts as disconnected, "
        "until its next request. 0: never.",
    )
    keep_past_groups: int = Field(
        default=256, ge=0, description="Maximum number of delivered groups kept for inspection."
    )
    keep_past_bytes: int = Field(
        default=256 * _MIB,
        ge=0,
        description="Maximum size of delivered groups kept for inspection, in bytes.",
    )
    ordered_envs: int = Field(
        default=0,
        ge=0,
        le=4096,
        description="Number of environments whose groups are admitted in the order in which their "
        "rollouts were started, so that a run can be repeated. 0: in the order of arrival.",
    )
    ordered_wait_s: float = Field(
        default=1800.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that groups are held for an earlier rollout with `ordered_envs`, "
        "before they are admitted without it. 0: no limit.",
    )
    gzip_min_bytes: int = Field(
        default=1000, ge=0, description="Minimum size of a response body to compress, in bytes."
    )
    gzip_level: int = Field(
        default=1, ge=1, le=9, description="Compression level of responses, 1 (fastest) to 9."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose pages may call the service from a browser; `*` allows all, an "
        "empty list none.",
    )
    allowed_hosts: tuple[Annotated[str, AfterValidator(check_allowed_host)], ...] = Field(
        default=(),
        description="Additional host names accepted in requests, as forwarded by a reverse proxy "
        "or a tunnel, such as `runs.example.org`; with a token file every name is "
        "accepted.",
    )
    token_file: Path | None = Field(
        default=None,
        description="File with the bearer tokens of environments, trainers and administrators; "
        "None disables authentication.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Format of log lines: text, or one JSON object per line."
    )
