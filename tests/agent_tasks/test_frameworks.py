"""The program that runs agents of frameworks, with the framework replaced."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from atroposlib.agent_tasks.programs import shell


class GraphRecursionError(Exception):
    pass


class Graph:
    """An agent of LangGraph that never ends: one step for the model, one for its tools."""

    def __init__(self) -> None:
        self.num_requests = 0

    def invoke(self, chat: Any, config: Mapping[str, int]) -> Any:
        for step in range(config["recursion_limit"]):
            self.num_requests += step % 2 == 0
        raise GraphRecursionError("the limit of steps is reached")


@pytest.mark.parametrize("max_turns", [1, 3])
def test_langgraph_asks_the_model_at_most_max_turns_times(
    max_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph()
    modules: dict[str, dict[str, Any]] = {
        "langchain.agents": {"create_agent": lambda *args, **kwargs: graph},
        "langchain_core.tools": {"tool": lambda function: function},
        "langchain_openai": {"ChatOpenAI": lambda **kwargs: None},
        "langgraph.errors": {"GraphRecursionError": GraphRecursionError},
    }
    monkeypatch.setitem(sys.modules, "shell", shell)  # which is next to it in a box
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name))
        monkeypatch.setitem(sys.modules, name, module)
    frameworks = importlib.import_module("atroposlib.agent_tasks.programs.frameworks")
    words = argparse.Namespace(model="m", max_turns=max_turns, max_tokens=8, temperature=1.0)

    answer = frameworks.langgraph("Do it.", words)

    assert isinstance(answer, GraphRecursionError)
    assert graph.num_requests == max_turns
