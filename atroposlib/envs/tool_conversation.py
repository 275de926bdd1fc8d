"""Former path of `ToolConversation`, which is defined in `atroposlib.envs.tools`."""

from __future__ import annotations

from atroposlib.envs.tools import ToolConversation

__all__ = ["ToolConversation"]
