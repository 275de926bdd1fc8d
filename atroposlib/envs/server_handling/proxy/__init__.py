"""The agent proxy: tracked sessions at OpenAI-style URLs, for unmodified agents."""

from atroposlib.envs.server_handling.proxy.app import (
    AgentProxy,
    AgentSession,
    AgentTrajectory,
    group_of_agents,
)
from atroposlib.envs.server_handling.proxy.sessions import AgentTurn, ProxySettings

__all__ = [
    "AgentProxy",
    "AgentSession",
    "AgentTrajectory",
    "AgentTurn",
    "ProxySettings",
    "group_of_agents",
]
