"""Environments of other libraries as ours: `atropos-env KIND:NAME`; `interface` is for authors."""

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    AgentEndpoint,
    AgentEpisode,
    Episode,
    EpisodeEnd,
)
from atroposlib.adapters.registry import KINDS, Kind, make_adapter

__all__ = [
    "KINDS",
    "Adapter",
    "AdapterArgs",
    "AgentEndpoint",
    "AgentEpisode",
    "Episode",
    "EpisodeEnd",
    "Kind",
    "make_adapter",
]
