"""How models write tool calls: one file per format, and a registry to add more.

    completion ─► ToolCallFormat.find_calls ─► FoundCall, ...
    calls made elsewhere ─► ToolCallFormat.render ─► the text the model would have written

A format of your own is a subclass of `ToolCallFormat` given to `registry.register`; the name then
works as `tool_parser`.
"""

from atroposlib.envs.server_handling.tool_formats.calls import (
    FoundCall,
    FunctionCall,
    ToolCall,
    ToolCallFormat,
)
from atroposlib.envs.server_handling.tool_formats.hermes import HermesFormat
from atroposlib.envs.server_handling.tool_formats.llama3_json import Llama3JsonFormat
from atroposlib.envs.server_handling.tool_formats.mistral import MistralFormat
from atroposlib.envs.server_handling.tool_formats.qwen import QwenFormat
from atroposlib.envs.server_handling.tool_formats.registry import ToolFormatRegistry, registry

__all__ = [
    "FoundCall",
    "FunctionCall",
    "HermesFormat",
    "Llama3JsonFormat",
    "MistralFormat",
    "QwenFormat",
    "ToolCall",
    "ToolCallFormat",
    "ToolFormatRegistry",
    "registry",
]
