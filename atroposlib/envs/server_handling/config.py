"""Settings of inference servers, their reasoning options, and the choice of servers.

config_init, YAML section `openai`, `--openai.*` flags
    └─► resolve_openai_configs ─► one server, a list of servers, or a baseline for discovery
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atroposlib.errors import ConfigError
from atroposlib.utils.cli import UsageError, refused_values
from atroposlib.utils.starting import vllm_command
from atroposlib.utils.text import without_secrets

ServerType = Literal["openai", "trl", "sglang", "vllm"]

LOCAL_API_KEY = "x"
"""Placeholder key for servers that need none: the OpenAI client refuses to start without a key."""

VALID_REASONING_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh"})

LOOPBACK = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_START_COMMANDS = {
    "openai": "vllm serve",
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model-path",
    "trl": "trl vllm-serve --model",
}

_SECTION = "openai"
_PREFIX = f"{_SECTION}."


class ServerBaseline(BaseModel):
    """Settings shared by every inference server; used alone, it requests URL discovery."""

    model_config = ConfigDict(protected_namespaces=())  # `model_name` is a field of the contract

    timeout: int = Field(
        default=1200, gt=0, description="Timeout of one request to the server, in seconds."
    )
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Maximum number of training requests in flight per server."
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Maximum number of evaluation requests in flight per server."
    )
    model_name: str = Field(
        default="default", description="Name under which the server serves the model."
    )
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="Number of recent requests that the metrics cover."
    )
    server_type: ServerType = Field(
        default="openai",
        description="Engine at the URL. openai: any provider; its texts are tokenized locally. "
        "vllm, sglang, and trl versions that start vLLM's server return the exact token ids and "
        "logprobs that a policy gradient needs.",
    )
    tokenizer_name: str = Field(
        default="none",
        description="Tokenizer of the served model: a hub name or a directory; "
        "'none' uses model_name.",
    )


class APIServerConfig(ServerBaseline):
    """One inference server; an empty `api_key` or `base_url` means *not set*, exactly like None."""

    api_key: str | None = Field(
        default="",
        repr=False,
        description="API key of the server. If empty, OPENAI_API_KEY is used for the official "
        "endpoint and a placeholder for any other base_url.",
    )
    base_url: str | None = Field(
        default="",
        description="URL ending in /v1. If empty, the environment variable OPENAI_BASE_URL is "
        "used, else the official OpenAI endpoint.",
    )
    n_kwarg_is_ignored: bool = Field(
        default=False,
        description="Whether the server ignores n and returns one choice; n requests are sent "
        "instead.",
    )
    health_check: bool = Field(
        default=True,
        description="Whether to probe the server at start and after failures, and to hold "
        "requests while it is down.",
    )

    startup_timeout: float = Field(
        default=600.0,
        ge=0,
        description="Maximum wait for a server that has never answered, in seconds; after that, "
        "requests fail with a hint about what to check. For a server that answered before, the "
        "limit is engine_timeout.",
    )

    @property
    def known_base_url(self) -> str | None:
        return self.base_url or None

    @property
    def shown_base_url(self) -> str:
        """URL for messages, without user and password."""
        return without_secrets(self.known_base_url or "at the official endpoint")

    @property
    def key_for_client(self) -> str | None:
        """Key for an OpenAI client; None lets the client read its environment variables."""
        if self.api_key:
            return self.api_key
        return LOCAL_API_KEY if self.known_base_url else None


OpenaiConfig = APIServerConfig
"""Name of `APIServerConfig` in version 0.1."""


class ServerManagerConfig(BaseModel):
    """Settings of `ServerManager`."""

    slurm: bool = Field(
        default=False,
        description="Whether to use the servers on the nodes of the current Slurm job.",
    )
    testing: bool = Field(
        default=False,
        description="Whether to use the scripted test server instead of real ones; it has only the "
        "answers that a test sets on it. To try an environment without a model, use `check`.",
    )
    max_n_completions: int = Field(
        default=8,
        ge=1,
        description="Maximum number of completions per request; a larger n is split.",
    )
    proxy_url: str | None = Field(
        default=None,
        description="URL of a managed-server proxy. If empty, the environment variable "
        "ATROPOS_PROXY_URL is used; without either, no proxy is used.",
    )


def is_official_openai(base_url: str | None) -> bool:
    """Whether requests to `base_url` reach OpenAI itself, whose reasoning fields differ."""
    return base_url is not None and "api.openai.com" in base_url


@dataclass
class ReasoningConfig:
    """Reasoning requested from the model; an effort or a token limit enables it.

    Attributes:
        enabled: Whether requests carry reasoning fields.
        effort: One of `VALID_REASONING_EFFORTS`; takes precedence over `max_tokens`.
        max_tokens: Maximum number of reasoning tokens.
    """

    enabled: bool = False
    effort: str | None = None
    max_tokens: int | None = None

    EFFORT_TO_MAX_TOKENS: ClassVar[dict[str, int]] = {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }

    def __post_init__(self) -> None:
        if self.effort is not None and self.effort not in VALID_REASONING_EFFORTS:
            raise ConfigError(
                f"Invalid reasoning_effort {self.effort!r}; "
                f"expected one of {', '.join(self.EFFORT_TO_MAX_TOKENS)}"
            )
        if self.effort is not None or self.max_tokens is not None:
            self.enabled = True

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(
        self, base_url: str | None = None, use_max_tokens: bool = False
    ) -> dict[str, Any] | None:
        """Return the request fields for this reasoning, or None if it is disabled.

        Args:
            base_url: URL of the request; OpenAI itself has one flat field.
            use_max_tokens: Whether to convert an effort to its token limit in
                `EFFORT_TO_MAX_TOKENS`, for providers that accept only limits.
        """
        if not self.enabled:
            return None
        if is_official_openai(base_url):
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = self.EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}

    def add_to(self, kwargs: dict[str, Any], *, base_url: str | None) -> dict[str, Any]:
        """Return the arguments of a chat with the provider's reasoning fields added.

        For OpenAI itself, temperature is set to 1, the only value that its reasoning models accept,
        and `max_tokens` becomes `max_completion_tokens`.
        """
        body = self.build_extra_body(base_url)
        if body is None:
            return kwargs
        kwargs = {**kwargs, "extra_body": {**(kwargs.get("extra_body") or {}), **body}}
        if is_official_openai(base_url):
            kwargs["temperature"] = 1.0
            if kwargs.get("max_tokens"):
                kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return kwargs

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """Read `thinking_mode`, `reasoning_effort` and `max_reasoning_tokens` of any object.

        Missing attributes count as disabled.
        """
        return cls(
            enabled=bool(getattr(env_config, "thinking_mode", False)),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )


def _start_command(server_type: str) -> str:
    command = _START_COMMANDS[server_type]
    if command == "vllm serve" and importlib.util.find_spec("vllm") is None:
        return "python -m example_trainer.torch_engine --model"
    return vllm_command() if command == "vllm serve" else command


def how_to_start(config: APIServerConfig) -> str:
    """Return the remedy for a server that has never answered, with a command if it is local."""
    address = urlsplit(config.known_base_url or "")
    start = "start it"
    if address.hostname in LOOPBACK:
        with contextlib.suppress(ValueError):  # the port is not a number
            command = _start_command(config.server_type)
            start += f" ({command} {config.model_name} --port {address.port or 80})"
    return (
        f"{start}, or set base_url (--openai.base_url) to its address, such as "
        "http://localhost:9001/v1"
    )


ServerConfigs = ServerBaseline | APIServerConfig | Sequence[ServerBaseline | APIServerConfig]
"""Second value returned by `config_init`: a baseline, one server, or a list of servers."""


def server_entries(section: Any) -> list[dict[str, Any]]:
    """Return the servers of a YAML section: one for a mapping, or one per entry of a list.

    Raises:
        UsageError: the section or one of its entries has another type.
    """
    if not section:
        return []
    entries = [section] if isinstance(section, Mapping) else section
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise UsageError(f"{_SECTION}: expected one server or a list of servers, got {section!r}")
    for position, entry in enumerate(entries):
        if entry is not None and not isinstance(entry, Mapping):
            raise UsageError(f"{_SECTION}.{position}: expected the settings of a server")
    return [dict(entry or {}) for entry in entries]


def resolve_openai_configs(
    default_server_configs: ServerConfigs,
    openai_config_dict: Mapping[str, Any],
    yaml_config: Mapping[str, Any],
    cli_passed_flags: Mapping[str, Any],
    logger: logging.Logger,
) -> ServerConfigs:
    """Choose the servers from the environment's defaults, the YAML file and the command line.

    Several servers, from the YAML file or from `config_init`, are used unchanged: a flag cannot
    name one of them. One server, or none, is merged with the YAML entry and the flags. A
    `ServerBaseline` (URLs are discovered) stays a baseline if only its own fields are overridden; a
    URL or a key converts it to one server.

    Args:
        default_server_configs: Server settings returned by `config_init`.
        openai_config_dict: Settings of the single server, all layers merged.
        yaml_config: Parsed YAML file; its `openai` entry is used.
        cli_passed_flags: Flags given by the user; names that begin with `openai.` are used.
        logger: Receives a warning about a default of an unexpected type.

    Returns:
        A list of configs, one bare config if the default was bare, or a baseline.

    Raises:
        UsageError: flags or a YAML mapping are given for several servers, or a value is invalid.
    """
    entries = server_entries(yaml_config.get(_SECTION))
    flags = [name for name in cli_passed_flags if name.startswith(_PREFIX)]
    defaults = default_server_configs
    server_class = server_class_of(defaults)
    if len(entries) >= 2 or _is_list(defaults, at_least=2):
        _refuse_overrides_of_several(entries, flags)
        if len(entries) < 2:
            return defaults
        return [_build(server_class, entry, f"{_PREFIX}{i}.") for i, entry in enumerate(entries)]
    overridden = {key for entry in entries for key in entry}
    overridden |= {name[len(_PREFIX) :] for name in flags}
    if isinstance(defaults, ServerBaseline) and not isinstance(defaults, APIServerConfig):
        if not overridden:
            return defaults
        if overridden <= set(type(defaults).model_fields):
            changes = {
                key: openai_config_dict[key] for key in overridden & openai_config_dict.keys()
            }
            return _build(type(defaults), {**defaults.model_dump(), **changes}, _PREFIX)
        return _build(server_class, openai_config_dict, _PREFIX)
    server = _build(server_class, openai_config_dict, _PREFIX)
    if isinstance(defaults, APIServerConfig):
        return server
    if not _is_list(defaults):
        logger.warning(
            "config_init returned %s where server settings were expected; using one server",
            type(defaults).__name__,
        )
    return [server]


def _is_list(configs: Any, *, at_least: int = 0) -> bool:
    return isinstance(configs, list | tuple) and len(configs) >= at_least


def server_class_of(configs: ServerConfigs) -> type[APIServerConfig]:
    """Return the class of the environment's server settings, which may have added fields."""
    first = next(iter(configs), None) if isinstance(configs, list | tuple) else configs
    return type(first) if isinstance(first, APIServerConfig) else APIServerConfig


def _refuse_overrides_of_several(entries: list[dict[str, Any]], flags: list[str]) -> None:
    if flags:
        raise UsageError(
            f"--{flags[0]} is ambiguous: several servers are configured; "
            "list every server with its settings under openai: in the YAML file"
        )
    if len(entries) == 1 and entries[0]:
        raise UsageError(
            "openai: holds one server, but this environment uses several; list all of them"
        )


def _build(
    server_class: type[ServerBaseline], settings: Mapping[str, Any], prefix: str
) -> ServerBaseline:
    try:
        return server_class(**settings)
    except ValidationError as error:
        raise refused_values(error, prefix) from error
