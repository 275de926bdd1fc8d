"""Agents of four frameworks, each as its documentation shows it, with one tool: the shell.

    python frameworks.py smolagents --model NAME --max-turns 30 < instruction.md

Address and key come from OPENAI_BASE_URL and OPENAI_API_KEY. The program runs inside a workspace
with the software of one framework.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Any

from shell import run_command  # type: ignore[import-not-found, unused-ignore]  # next to this file

PROMPT = "You work in a shell. Do the task with the tool `bash`, then say what you did."


def bash(command: str) -> str:
    """Run a shell command and return its exit code and output.

    Args:
        command: The command, for bash.
    """
    return str(run_command(command))


def smolagents(instruction: str, words: argparse.Namespace) -> Any:
    """Run a ToolCallingAgent."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel(
        words.model,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=words.max_tokens,
        temperature=words.temperature,
        # A required call constrains sampling, and the trainer's logprobs know no constraint.
        tool_choice="auto",
    )
    agent = ToolCallingAgent(
        [tool(bash)], model, max_steps=words.max_turns, instructions=PROMPT, verbosity_level=0
    )
    return agent.run(instruction)


def openai_agents(instruction: str, words: argparse.Namespace) -> Any:
    """Run an agent of the OpenAI Agents SDK, through chat completions."""
    from agents import (
        Agent,
        MaxTurnsExceeded,
        ModelSettings,
        Runner,
        function_tool,
        set_default_openai_api,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)  # traces go to OpenAI
    set_default_openai_api("chat_completions")
    agent = Agent(
        name="Shell",
        instructions=PROMPT,
        model=words.model,
        tools=[function_tool(bash)],
        model_settings=ModelSettings(max_tokens=words.max_tokens, temperature=words.temperature),
    )
    try:
        result = asyncio.run(Runner.run(agent, instruction, max_turns=words.max_turns))
    except MaxTurnsExceeded as error:
        return error
    return result.final_output


def pydantic_ai(instruction: str, words: argparse.Namespace) -> Any:
    """Run an agent of Pydantic AI."""
    from pydantic_ai import Agent, UsageLimitExceeded, UsageLimits

    agent = Agent(
        f"openai-chat:{words.model}",
        instructions=PROMPT,
        tools=[bash],
        model_settings={"max_tokens": words.max_tokens, "temperature": words.temperature},
    )
    limits = UsageLimits(request_limit=words.max_turns)
    try:
        return agent.run_sync(instruction, usage_limits=limits).output
    except UsageLimitExceeded as error:
        return error


def langgraph(instruction: str, words: argparse.Namespace) -> Any:
    """Run LangChain's agent, a graph of LangGraph."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.errors import GraphRecursionError

    model = ChatOpenAI(
        model=words.model, max_tokens=words.max_tokens, temperature=words.temperature
    )
    agent = create_agent(model, [tool(bash)], system_prompt=PROMPT)
    chat = {"messages": [{"role": "user", "content": instruction}]}
    try:  # a turn is two steps of the graph: the model, and its tools
        state = agent.invoke(chat, {"recursion_limit": 2 * words.max_turns})
    except GraphRecursionError as error:
        return error
    return state["messages"][-1].text


FRAMEWORKS = {
    "langgraph": langgraph,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "smolagents": smolagents,
}


def main() -> None:
    """Run the agent of one framework on the instruction on standard input."""
    parser = argparse.ArgumentParser(description="Run an agent of a framework on a task.")
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-turns", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    words = parser.parse_args()
    answer = FRAMEWORKS[words.framework](sys.stdin.read().strip(), words)
    print(answer)  # noqa: T201 - a program


if __name__ == "__main__":
    main()
