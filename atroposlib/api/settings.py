"""Settings of one trajectory service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from atroposlib.api.store.open import check_run_name, check_store_url
from atroposlib.utils.web_pages import check_allowed_host

__all__ = ["ApiSettings"]

_MIB = 1024 * 1024


def _check_run_name(name: str | None) -> str | None:
    return None if name is None else check_run_name(name)


class ApiSettings(BaseModel):
    """Where a service keeps its run, what it accepts and what it tells; fixed once it is built."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    store: Annotated[str, AfterValidator(check_store_url)] = Field(
        default="memory",
        description="Where the run lives: `memory` (gone when the process ends), `sqlite` (a file "
        "under `data_dir`) or the address of a Redis server such as `redis://host:6379/0`, which "
        "several services may share.",
    )
    data_dir: Path = Field(
        default=Path("atropos_runs"), description="Folder of the files of `sqlite`, one per run."
    )
    run_name: Annotated[str | None, AfterValidator(_check_run_name)] = Field(
        default=None,
        description="Name of the run to create or resume; None starts a new one under a new name.",
    )
    fsync: bool = Field(
        default=False,
        description="Whether `sqlite` waits for the disk at every write: then a run survives a "
        "power failure, too, and not just the end of the process.",
    )
    max_body_bytes: int = Field(
        default=128 * _MIB,
        ge=1,
        description="Largest request body after decompression, in bytes; above it: 413.",
    )
    max_buffered_bytes: int = Field(
        default=512 * _MIB,
        ge=1,
        description="Request bodies in memory at one time, in bytes; further ones are read when "
        "there is room again.",
    )
    max_queue_sequences: int = Field(
        default=0,
        ge=0,
        description="Sequences that may wait for a trainer; above it groups are answered 503 with "
        "Retry-After. 0: no limit.",
    )
    max_queue_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of groups that may wait for a trainer; above it groups are answered "
        "503 with Retry-After. 0: no limit.",
    )
    max_waiting_requests: int = Field(
        default=4096,
        ge=0,
        description="Requests that may wait for a batch (`?wait=`) at a time; above it: 503 with "
        "Retry-After. 0: no limit.",
    )
    max_batches_in_flight: int = Field(
        default=1024,
        ge=0,
        description="Batches that may be with trainers, unacknowledged, at a time; above it: 429 "
        "with Retry-After. 0: no limit.",
    )
    max_staleness_steps: int = Field(
        default=0,
        ge=0,
        description="Trainer steps a group may be old when it leaves; environments are told to "
        "start no more groups than that allows. 0: no bound.",
    )
    env_expiry_s: float = Field(
        default=600.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds of silence after which an environment counts as disconnected, until "
        "it speaks again. 0: never.",
    )
    keep_past_groups: int = Field(
        default=256, ge=0, description="Delivered groups kept for inspection, at most."
    )
    keep_past_bytes: int = Field(
        default=256 * _MIB, ge=0, description="Bytes of delivered groups kept, at most."
    )
    gzip_min_bytes: int = Field(
        default=1000, ge=0, description="Smallest response body worth compressing, in bytes."
    )
    gzip_level: int = Field(
        default=1, ge=1, le=9, description="Compression level of responses, 1 (fastest) to 9."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose pages may call the service from a browser; `*` is every one, "
        "an empty list none.",
    )
    allowed_hosts: tuple[Annotated[str, AfterValidator(check_allowed_host)], ...] = Field(
        default=(),
        description="Names beyond this machine's own that it is reached by where a reverse proxy "
        "or a tunnel passes them on, such as `runs.example.org`; with a token file any name is "
        "served.",
    )
    token_file: Path | None = Field(
        default=None,
        description="File with the bearer tokens of environments, trainers and administrators; "
        "None lets everybody call everything.",
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Form of log lines: for people, or one JSON object per line."
    )
