"""The program of one rollout: a `CodeAgent` of smolagents, started by `smolagents_env.py`.

    stdin  ─► {"question", "max_steps", "sampling", "tools", …}   first line
    stdout ─► {"kind": "step", "code"}       stdin ─► {"output", "logs", "error", "is_final"}
    stdout ─► {"kind": "done", "answer", "texts", "num_errors", …}   last line

It needs smolagents and openai, but not atroposlib, and may run in a virtual environment of its own.
Code of the model is never executed here: each step is sent to the environment, which runs it in a
sandbox. Requests for completions go to the agent proxy named by `OPENAI_BASE_URL`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

PR_SET_PDEATHSIG = 1
"""Option of `prctl` on Linux: signal this process when its parent ends."""


class StepError(Exception):
    """A step raised; the agent reads the message."""


class EnvironmentChannel:
    """JSON lines to and from the environment."""

    def __init__(self, receiver: TextIO, sender: TextIO) -> None:
        self._receiver = receiver
        self._sender = sender

    def receive(self) -> dict[str, Any]:
        line = self._receiver.readline()
        if not line:
            raise SystemExit("the environment has ended")
        received: dict[str, Any] = json.loads(line)
        return received

    def send(self, **message: Any) -> None:
        self._sender.write(json.dumps(message) + "\n")
        self._sender.flush()


def make_executor(channel: EnvironmentChannel) -> Any:
    """Return an executor that sends each step to the environment."""
    from smolagents.local_python_executor import CodeOutput, PythonExecutor

    class RemoteExecutor(PythonExecutor):  # type: ignore[misc]
        def __init__(self) -> None:
            self.state: dict[str, str] = {}

        def send_tools(self, tools: Mapping[str, Any]) -> None:
            """Do nothing: the sandbox has the tools already."""

        def send_variables(self, variables: Mapping[str, Any]) -> None:
            """Do nothing: rollouts start without variables."""

        def __call__(self, code_action: str) -> Any:
            channel.send(kind="step", code=code_action)
            result = channel.receive()
            self.state["_print_outputs"] = result["logs"]  # shown by the agent after an error
            if result["error"] is not None:
                raise StepError(result["error"])
            return CodeOutput(result["output"], result["logs"], result["is_final"])

    return RemoteExecutor()


def make_tool(definition: Mapping[str, Any]) -> Any:
    """Return a tool for the prompt; its calls happen in the sandbox."""
    from smolagents import Tool

    def forward(self: Any, *args: Any, **kwargs: Any) -> str:
        raise StepError("tools are called in the sandbox only")

    fields = {
        "name": definition["name"],
        "description": definition["description"],
        "inputs": definition["inputs"],
        "output_type": "string",
        "skip_forward_signature_validation": True,
        "forward": forward,
    }
    return type(f"{definition['name']}_tool", (Tool,), fields)()


class StepLimit(Exception):
    """The agent used its steps without a final answer."""


class WrittenSteps:
    """Callback of smolagents after each step.

    Args:
        max_steps: number of steps after which the agent ends, instead of writing an answer
            in a conversation of its own.

    Attributes:
        texts: what the model wrote, step by step.
        num_errors: steps that failed or had no code.
        is_own_answer: Whether the last step called `final_answer`.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps
        self.texts: list[str] = []
        self.num_errors = 0
        self.is_own_answer = False

    def __call__(self, step: Any, agent: Any = None) -> None:
        # smolagents appends a copy of the code to the model's own message. Without it, each
        # request continues the tokens of the last one.
        step.tool_calls = None
        if step.model_output is None:
            return
        self.texts.append(_text_of(step.model_output))
        self.num_errors += step.error is not None or not (step.code_action or "").strip()
        self.is_own_answer = step.is_final_answer
        if len(self.texts) >= self._max_steps and not self.is_own_answer:
            raise StepLimit


def run_task(task: Mapping[str, Any], channel: EnvironmentChannel) -> dict[str, Any]:
    """Run the agent on a task; return the last message to the environment."""
    from smolagents import AgentGenerationError, CodeAgent, OpenAIModel
    from smolagents.memory import ActionStep

    model = OpenAIModel(
        task["model"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        client_kwargs={"max_retries": 0, "timeout": task["timeout_s"]},
        # The closing tag is part of what the model wrote.
        extra_body={"include_stop_str_in_output": True},
        **task["sampling"],
    )
    notes = WrittenSteps(task["max_steps"])
    agent = CodeAgent(
        tools=[make_tool(definition) for definition in task["tools"]],
        model=model,
        executor=make_executor(channel),
        additional_authorized_imports=task["imports"],
        max_steps=task["max_steps"] + 1,
        verbosity_level=task["verbosity"],
        step_callbacks={ActionStep: notes},
    )
    ending = "done"
    answer: Any = ""
    try:
        answer = agent.run(task["question"])
    except StepLimit:
        pass
    except AgentGenerationError as error:
        ending = "context_full" if "context_length_exceeded" in str(error) else "no_completion"
        answer = str(error) if ending == "no_completion" else ""
    return {
        "kind": ending,
        "answer": _text_of(answer),
        "texts": notes.texts,
        "num_errors": notes.num_errors,
        "is_own_answer": notes.is_own_answer,
    }


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(run: Callable[[Mapping[str, Any], EnvironmentChannel], dict[str, Any]] = run_task) -> None:
    """Serve one rollout over standard input and output."""
    _end_with_parent()
    # Anything that a library prints goes to standard error.
    sender = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    channel = EnvironmentChannel(sys.stdin, sender)
    task = channel.receive()
    try:
        result = run(task, channel)
    except ImportError as error:
        result = {"kind": "missing", "answer": str(error.name or error)}
    except Exception as error:  # noqa: BLE001 - the environment counts and logs it
        result = {"kind": "failed", "answer": f"{type(error).__name__}: {error}"}
    channel.send(**result)


if __name__ == "__main__":
    main()
