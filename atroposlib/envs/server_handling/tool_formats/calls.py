"""What a tool call is, and what a format of tool calls must offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

__all__ = ["FoundCall", "FunctionCall", "ToolCall", "ToolCallFormat", "parameter_schemas"]


class FunctionCall(BaseModel):
    """The function a model asks for."""

    name: str
    """Name of the function."""
    arguments: str
    """JSON text of an object, as the chat APIs have it."""


class ToolCall(BaseModel):
    """One call in the form of the chat APIs.

    `ToolCall(id="a1B2c3D4e", function=FunctionCall(name="add", arguments='{"a": 1}'))`
    """

    id: str
    """Names the call in the message that answers it."""
    type: Literal["function"] = "function"
    """The only kind there is."""
    function: FunctionCall
    """What is called, and with what."""


class FoundCall(NamedTuple):
    """A call read from a completion."""

    name: str
    """Name of the function, never empty."""
    arguments: str
    """JSON text of an object."""
    start: int
    """Index in the completion where the call begins, its tag included."""
    end: int
    """Index behind the call."""
    call_id: str | None = None
    """Id the model wrote itself, None in most formats."""


class ToolCallFormat(ABC):
    """How one family of models writes tool calls. Implementations hold no state.

    Attributes:
        trigger: Text that begins every call and nothing else; None where there is none.
        separator: Text between calls.
    """

    trigger: str | None = None
    separator: str = "\n"

    @abstractmethod
    def find_calls(self, text: str, start: int, tools: Sequence[Any]) -> list[FoundCall]:
        """Return the calls of a completion in their order.

        All or nothing: one broken call makes the list empty, so that nobody acts on part of what
        the model meant. Text that is no call never raises.

        Args:
            text: The completion.
            start: Index where the search begins; thinking lies before it.
            tools: Tool definitions of the request, as its caller gave them.
        """

    def frame_of(self, name: str) -> tuple[str, str] | None:
        """Return the text around the arguments of a call, which stand as a JSON object between.

        Args:
            name: Of the function.

        Returns:
            What stands before and behind them; None in a format that writes them otherwise.
        """
        return None

    @abstractmethod
    def render(self, calls: Sequence[FunctionCall]) -> str:
        """Return the text of calls; `find_calls` reads the same calls from it."""


def parameter_schemas(tools: Sequence[Any]) -> dict[str, Mapping[str, Any]]:
    """Map the name of every tool to the JSON schemas of its parameters by their names.

    Definitions of another shape are left out: they are the caller's and were never checked.
    """
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas
