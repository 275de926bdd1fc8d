"""Public path of the tool-call translator, and names from versions that needed vLLM."""

from atroposlib.envs.server_handling.chat_rendering import ToolCallTranslator
from atroposlib.envs.server_handling.tool_formats import FunctionCall, ToolCall, ToolCallFormat

__all__ = ["VLLM_AVAILABLE", "FunctionCall", "ToolCall", "ToolCallTranslator", "ToolParser"]

VLLM_AVAILABLE = True

# Names imported by users of earlier versions; those without an equivalent are None.
ToolParser = ToolCallFormat
ToolParserManager = None
ChatCompletionRequest = None
ExtractedToolCallInformation = None
