"""Prefixes of the command-line flags and YAML sections of an environment."""

from __future__ import annotations

__all__ = ["ENV_NAMESPACE", "NAMESPACE_SEP", "OPENAI_NAMESPACE", "SERVER_MANAGER_NAMESPACE"]

ENV_NAMESPACE = "env"
"""Settings of the environment: `--env.group_size`, YAML section `env:`."""

OPENAI_NAMESPACE = "openai"
"""Settings of the inference server: `--openai.base_url`, YAML section `openai:`."""

SERVER_MANAGER_NAMESPACE = "server"
"""Reserved for the server manager; its flags have no prefix at present."""

NAMESPACE_SEP = "."
"""Separator of prefix and field name."""
