"""Formats of tool calls by name."""

from __future__ import annotations

import difflib

from atroposlib.envs.server_handling.tool_formats.calls import ToolCallFormat
from atroposlib.envs.server_handling.tool_formats.hermes import HermesFormat
from atroposlib.envs.server_handling.tool_formats.llama3_json import Llama3JsonFormat
from atroposlib.envs.server_handling.tool_formats.mistral import MistralFormat
from atroposlib.envs.server_handling.tool_formats.qwen import QwenFormat

__all__ = ["ToolFormatRegistry", "registry"]


class ToolFormatRegistry:
    """Finds formats by name; upper case, `-`, `.` and `_` make no difference."""

    def __init__(self) -> None:
        self._formats: dict[str, ToolCallFormat] = {}
        self._names: list[str] = []

    def register(self, tool_format: ToolCallFormat, *names: str) -> None:
        """Let a format answer to `names`; a name given before now means this one."""
        for name in names:
            self._names = [known for known in self._names if _key(known) != _key(name)]
            self._names.append(name)
            self._formats[_key(name)] = tool_format

    def find(self, name: str) -> ToolCallFormat | None:
        """Return the format of that name, None if there is none."""
        return self._formats.get(_key(name))

    def names(self) -> list[str]:
        """Return every name in alphabetical order."""
        return sorted(self._names)

    def nearest(self, name: str) -> str | None:
        """Return the known name most like `name`, None if none is like it."""
        near = difflib.get_close_matches(name.lower(), self.names(), n=1)
        return near[0] if near else None


def _key(name: str) -> str:
    return name.lower().translate({ord(mark): None for mark in "-._"})


registry = ToolFormatRegistry()
registry.register(HermesFormat(), "hermes")
registry.register(Llama3JsonFormat(), "llama3_json", "llama3", "llama4_json")
registry.register(QwenFormat(), "qwen", "qwen2.5", "qwen3", "qwen3_json")
registry.register(QwenFormat(writes_elements=True), "qwen3_coder", "qwen3_xml")
registry.register(MistralFormat(), "mistral")
registry.register(MistralFormat(writes_names=True), "mistral_v11")
