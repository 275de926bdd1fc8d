"""Which class speaks to which engine, and the servers made from configs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence

from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.discovery import configs_from_baseline, configs_on_slurm
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError

__all__ = ["find_configs", "make_server"]

_ENGINES: Mapping[str, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
}


def find_configs(
    configs: ServerBaseline | Sequence[APIServerConfig], *, slurm: bool
) -> list[APIServerConfig]:
    """Return one config per server: as listed, or found in the cluster job."""
    if isinstance(configs, APIServerConfig):
        configs = [configs]
    if isinstance(configs, ServerBaseline):
        return configs_from_baseline(configs, os.environ)
    if not configs:
        raise ConfigError("no inference server is configured; give at least one server config")
    return configs_on_slurm(configs, os.environ) if slurm else list(configs)


def make_server(
    config: APIServerConfig,
    server_class: type[APIServer],
    reasoning_config: ReasoningConfig | None,
) -> APIServer:
    """Build the server of one config; an abstract class lets `server_type` decide.

    Raises:
        ConfigError: this version has no class for the config's `server_type`.
    """
    if inspect.isabstract(server_class):
        if config.server_type not in _ENGINES:
            raise ConfigError(
                f"server_type {config.server_type!r} is not supported by this version; "
                f"expected one of {', '.join(_ENGINES)}"
            )
        server_class = _ENGINES[config.server_type]
    return server_class(config, reasoning_config=reasoning_config)
