"""Settings of inference servers and of the manager in front of them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from atroposlib.utils.secret_masking import without_secrets

__all__ = [
    "LOCAL_API_KEY",
    "APIServerConfig",
    "OpenaiConfig",
    "ServerBaseline",
    "ServerManagerConfig",
    "ServerType",
]

ServerType = Literal["openai", "trl", "sglang", "vllm"]

LOCAL_API_KEY = "x"
"""Key sent to a server that asks for none: the OpenAI client refuses to start without one."""


class ServerBaseline(BaseModel):
    """What every inference server has in common; alone, it asks for discovery of the URLs."""

    model_config = ConfigDict(protected_namespaces=())  # `model_name` is a field of the contract

    timeout: int = Field(
        default=1200, gt=0, description="Longest wait for one answer of the server, in seconds."
    )
    num_max_requests_at_once: int = Field(
        default=512, ge=1, description="Training requests in flight at one server."
    )
    num_requests_for_eval: int = Field(
        default=64, ge=1, description="Evaluation requests in flight at one server."
    )
    model_name: str = Field(
        default="default", description="Model name the server knows, sent with every request."
    )
    rolling_buffer_length: int = Field(
        default=1000, ge=1, description="Number of newest requests that the metrics describe."
    )
    server_type: ServerType = Field(
        default="openai",
        description="Engine behind the URL; openai is any provider, whose texts are tokenized. "
        "Exact token ids and logprobs, which a policy gradient needs, come from vllm, "
        "sglang, and trl where it starts vLLM's server.",
    )
    tokenizer_name: str = Field(
        default="none",
        description="Tokenizer of the served model, a hub name or a folder; "
        "'none' means the one of model_name.",
    )


class APIServerConfig(ServerBaseline):
    """One inference server.

    An empty `api_key` or `base_url` means *not set*, exactly like None: see `known_base_url` and
    `key_for_client`.
    """

    api_key: str | None = Field(
        default="",
        repr=False,
        description="Key of the server; empty: the environment's OPENAI_API_KEY for the official "
        "endpoint, a dummy for a server with a URL of its own.",
    )
    base_url: str | None = Field(
        default="",
        description="Address ending in /v1; empty: OPENAI_BASE_URL of the environment, "
        "else the official OpenAI endpoint.",
    )
    n_kwarg_is_ignored: bool = Field(
        default=False,
        description="The server answers one choice whatever n is, so n requests are made instead.",
    )
    health_check: bool = Field(
        default=True,
        description="Probe the server at start and after failures, and hold requests while it "
        "is down.",
    )

    startup_timeout: float = Field(
        default=60.0,
        ge=0,
        description="Longest wait for a server that has never answered, in seconds; then requests "
        "fail and say what to check. One that has answered is waited for, "
        "engine_timeout at longest.",
    )

    @property
    def known_base_url(self) -> str | None:
        """The configured address, None when it is not set."""
        return self.base_url or None

    @property
    def shown_base_url(self) -> str:
        """The address for messages, without user and password."""
        return without_secrets(self.known_base_url or "at the official endpoint")

    @property
    def key_for_client(self) -> str | None:
        """What to hand to an OpenAI client; None lets the client read its environment."""
        if self.api_key:
            return self.api_key
        return LOCAL_API_KEY if self.known_base_url else None


OpenaiConfig = APIServerConfig
"""Name of `APIServerConfig` in version 0.1."""


class ServerManagerConfig(BaseModel):
    """Settings of `ServerManager` itself."""

    slurm: bool = Field(
        default=False, description="Find the servers on the nodes of the current Slurm job."
    )
    testing: bool = Field(
        default=False, description="Use the scripted test server instead of real ones."
    )
    max_n_completions: int = Field(
        default=8,
        ge=1,
        description="Most completions asked for in one request; larger n is split.",
    )
    proxy_url: str | None = Field(
        default=None,
        description="Address of a managed-server proxy; empty: ATROPOS_PROXY_URL of the "
        "environment, else none.",
    )
