r"""Interleaved thinking: tools are called inside the thinking of one assistant message.

    <think> … <tool_call>{…}</tool_call>        generation stops
    <tool_response>{…}</tool_response>          written by the environment, masked
    … </think> \boxed{42}                       the same message continues, up to its end

The tools are a calculator and, where a sandbox is available, a Python interpreter in it.

    python environments/tool_use_interleaved_thinking.py process --env.total_steps 4 \
        --env.dataset_path environments/data/interleaved_thinking_sample
"""

from __future__ import annotations

import ast
import json
import logging
import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.dataset_items import DatasetItems, HubItemsConfig
from atroposlib.envs.multi_turn_env import (
    MultiTurnEnv,
    MultiTurnEnvConfig,
    Rollout,
    TokenSequence,
    TurnSpan,
    play,
)
from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.server_handling.turn_recording import SequenceNode
from atroposlib.envs.single_turn_env import RESERVED_TOKENS
from atroposlib.envs.tools import Tool, parse_tool_calls, run_tool_calls, tool_instructions
from atroposlib.errors import ConfigError, NoTextCompletionsError
from atroposlib.sandbox import (
    Sandbox,
    SandboxLimits,
    SandboxUnavailableError,
    open_sandbox,
    run_python,
)
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.code_tests import is_same_output
from atroposlib.tasks.eval_answers import extract_boxed_answers

__all__ = [
    "InlinePolicy",
    "InterleavedConversation",
    "InterleavedInlineConfig",
    "InterleavedInlineEnv",
    "NumberProblem",
    "calculate",
    "score_message",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="mathematics with tools called inside the thinking",
    turns="1 message with up to 2 calls, more by configuration",
    reward="+1 right, -1 wrong; +0.2 if right with a tool",
    data="AceReason-Math from the hub, or `--env.dataset_path`",
    needs="core install; a sandbox for the Python tool",
    command="process --env.dataset_path environments/data/interleaved_thinking_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "interleaved_thinking_sample"

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
CLOSE_THOUGHT = "</think>"
TOOL_TAG = re.compile(r"</?tool_(?:call|response)>")
RESPONSE_TAG = re.compile(r"</?tool_response>")

MAX_EXPRESSION_CHARACTERS = 400
MAX_BITS = 20_000
"""Size of the integers of the calculator."""
MAX_FACTORIAL = 1000
MAX_ROUNDED_DIGITS = 400
"""Digits of `round`: with many negative ones, Python computes the power of ten first."""

OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
CONSTANTS = {"pi": math.pi, "e": math.e}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "exp", "log", "log2", "log10")},
    **{name: getattr(math, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name: getattr(math, name) for name in ("floor", "ceil", "gcd", "degrees", "radians")},
    "abs": abs,
    "round": round,
    "min": min,
    "max": max,
}


def calculate(expression: str) -> int | float:
    """Return the value of an arithmetic expression; it is parsed, never executed.

    Raises:
        ValueError: the expression is not arithmetic, or its value is too large or undefined.
    """
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"expected at most {MAX_EXPRESSION_CHARACTERS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise ValueError(f"expected an arithmetic expression: {error}") from error
    except ArithmeticError as error:
        raise ValueError(f"undefined or too large: {error}") from error


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in OPERATORS:
            return _bounded(OPERATORS[type(node.op)](left, right))
    name = _name(node)
    if name in CONSTANTS:
        return CONSTANTS[name]
    if isinstance(node, ast.Call) and not node.keywords and (called := _name(node.func)):
        return _bounded(_call(called, [_value(argument) for argument in node.args]))
    raise ValueError(f"expected numbers, operators and functions, got {type(node).__name__}")


def _name(node: ast.expr) -> str:
    """Return the name of a constant or function, with or without `math.`; empty for others."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "math" else ""
    return node.id if isinstance(node, ast.Name) else ""


def _call(name: str, values: Sequence[Any]) -> Any:
    if name == "factorial" and len(values) == 1:
        if not (isinstance(values[0], int) and 0 <= values[0] <= MAX_FACTORIAL):
            raise ValueError(f"factorial takes an integer from 0 to {MAX_FACTORIAL}")
        return math.factorial(values[0])
    if name == "round" and len(values) > 1 and abs(values[1]) > MAX_ROUNDED_DIGITS:
        raise ValueError(f"round takes at most {MAX_ROUNDED_DIGITS} digits")
    if name not in FUNCTIONS:
        raise ValueError(f"unknown function {name!r}; expected factorial, {', '.join(FUNCTIONS)}")
    return FUNCTIONS[name](*values)


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and isinstance(exponent, int) and exponent >= 0:
        if base.bit_length() * exponent > MAX_BITS:
            raise OverflowError(f"the power has more than {MAX_BITS} bits")
        return int(base**exponent)
    return _bounded(base**exponent)


def _bounded(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the value is not a real number: {value!r:.50}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError(f"the value has more than {MAX_BITS} bits")
    return value


class NumberProblem(NamedTuple):
    """One item."""

    question: str
    answer: str
    """A number, as text."""


NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(?:/\d+)?")


def read_problem(row: Mapping[str, Any]) -> NumberProblem | None:
    """Return the problem of a row; None if its answer is not a number."""
    given = (row.get("answer"), row.get("expected_answer"))
    answer = next((str(value).strip() for value in given if value not in (None, "")), "")
    return NumberProblem(str(row["problem"]), answer) if NUMBER.fullmatch(answer) else None


def score_message(pieces: Sequence[str], answer: str, *, num_results: int) -> dict[str, float]:
    """Return the parts `answer` and `tool` of the reward of one message.

    The message is malformed, and its answer wrong, unless it has one `</think>`, every call was
    answered before the text continued, and no tag of a tool follows the thought. A response
    written by the policy itself is malformed too.

    Args:
        pieces: texts of the policy, without the responses in between.
        answer: the expected number.
        num_results: number of calls that were executed without an error.
    """
    sampled = "".join(pieces)
    _, closed, visible = sampled.partition(CLOSE_THOUGHT)
    is_malformed = (
        not closed
        or CLOSE_THOUGHT in visible
        or TOOL_TAG.search(visible) is not None
        or RESPONSE_TAG.search(sampled) is not None
        or any(OPEN_CALL in piece for piece in pieces[-1:])
        or any(piece.count(OPEN_CALL) != 1 for piece in pieces[:-1])
    )
    boxes = [] if is_malformed else extract_boxed_answers(visible)
    is_right = bool(boxes) and is_same_output(_plain(boxes[-1]), _plain(answer))
    bonus = TOOL_BONUS if is_right and num_results > 0 else 0.0
    return {"answer": 1.0 if is_right else -1.0, "tool": bonus}


FRACTION = re.compile(r"\\[dt]?frac\{(\d{1,40})\}\{(\d{1,40})\}")


def _plain(number: str) -> str:
    plain = re.sub(r"[\s$]|\{?,\}?|\\[,! ]", "", number).replace("\N{MINUS SIGN}", "-")
    return FRACTION.sub(r"\1/\2", plain)


TOOL_BONUS = 0.2
MALFORMED = {"answer": -1.0, "tool": 0.0}
MAX_RESULT_CHARACTERS = 2000
MAX_CODE_CHARACTERS = 20_000

SYSTEM_PROMPT = (
    "You solve problems of mathematics. Reason inside <think> </think> tags. Whenever it helps, "
    "call a tool in the middle of your reasoning: write the call, stop, read the result that "
    "follows between <tool_response> </tool_response> tags, and go on reasoning. Call tools only "
    "before </think>, one at a time, and never write a response yourself. After </think> give "
    "the final answer, a number in \\boxed{}, without any call."
)
EXAMPLE_QUESTION = "What is the remainder when 2^20 is divided by 1000?"
EXAMPLE_MESSAGE = (
    "<think>The power is easy to get with a tool.\n"
    '<tool_call>\n{"name": "calculator", "arguments": {"expr": "2**20 % 1000"}}\n</tool_call>\n'
    '<tool_response>\n{"name": "calculator", "content": "576"}\n</tool_response>\n'
    "So the remainder is 576; indeed 2^20 = 1048576.</think>\nThe remainder is \\boxed{576}."
)


def calculator(expr: str) -> str:
    """Evaluate an arithmetic expression, such as "(2**20 - 1) % 7" or "sqrt(2)/factorial(5)".

    Args:
        expr: Numbers, + - * / // % **, parentheses, pi, e and common functions.
    """
    return repr(calculate(expr))


class PythonTool:
    """A Python interpreter in the sandbox; each call is a new program.

    Args:
        sandbox: where programs run.
        timeout_s: time limit of a program in seconds.
    """

    def __init__(self, sandbox: Sandbox, *, timeout_s: float) -> None:
        self._sandbox = sandbox
        self._limits = SandboxLimits(
            wall_s=timeout_s,
            cpu_s=math.ceil(timeout_s),
            memory_bytes=256 * 2**20,
            output_bytes=64 * 2**10,
        )

    async def python_interpreter(self, code: str, input: str = "") -> str:
        """Run a Python program and return what it prints; it must print its results.

        Args:
            code: The program; it may use the standard library.
            input: Its standard input.
        """
        if len(code) + len(input) > MAX_CODE_CHARACTERS:
            raise ValueError(f"expected at most {MAX_CODE_CHARACTERS} characters")
        result = await run_python(self._sandbox, code, stdin=input, limits=self._limits)
        if result.is_success:
            return result.stdout.strip()[:MAX_RESULT_CHARACTERS] or "the program printed nothing"
        reason = result.stderr.strip()[-MAX_RESULT_CHARACTERS:] or f"ended by {result.ended_by}"
        raise RuntimeError(reason)


class InterleavedConversation(Conversation):
    """One message of the policy, in pieces; each piece but the last ends with a call.

    Attributes:
        pieces: texts of the policy so far.
        num_results: calls executed without an error.
        num_errors: calls that failed.
    """

    unfinished_reward = MALFORMED

    def __init__(self, problem: NumberProblem, tools: Sequence[Tool], *, timeout_s: float) -> None:
        self.problem = problem
        self.pieces: list[str] = []
        self.num_results = 0
        self.num_errors = 0
        self._tools = tools
        self._timeout_s = timeout_s

    def opening(self) -> list[ChatMessage]:
        return [
            {"role": "system", "content": f"{SYSTEM_PROMPT}\n\n{tool_instructions(self._tools)}"},
            {"role": "user", "content": EXAMPLE_QUESTION},
            {"role": "assistant", "content": EXAMPLE_MESSAGE},
            {"role": "user", "content": self.problem.question},
        ]

    async def reply(self, turn: Turn) -> Reply:
        """Run the call with which a piece ends; score a piece without one."""
        self.pieces.append(turn.text)
        _, opened, call = turn.text.rpartition(OPEN_CALL)
        is_over = CLOSE_THOUGHT in turn.text or not opened
        if is_over or turn.text.count(OPEN_CALL) > 1 or RESPONSE_TAG.search(turn.text):
            reward = score_message(self.pieces, self.problem.answer, num_results=self.num_results)
            return Reply(reward=reward, is_done=True)
        content, closed, _ = call.partition(CLOSE_CALL)
        calls = parse_tool_calls(f"{OPEN_CALL}{content}{CLOSE_CALL}")
        [result] = await run_tool_calls(calls, self._tools, timeout_s=self._timeout_s)
        self.num_results += not result.is_error
        self.num_errors += result.is_error
        key = "error" if result.is_error else "content"
        shown = json.dumps(
            {"name": result.name, key: result.content[:MAX_RESULT_CHARACTERS]}, ensure_ascii=False
        )
        # A result must not contain a tag, such as one that closes the thought.
        shown = shown.replace("<", "\\u003c").encode("utf-8", "replace").decode()
        tag = "" if closed else CLOSE_CALL  # some servers omit the stop string
        return Reply(
            [
                {
                    "role": "tool",
                    "content": f"{tag}\n<tool_response>\n{shown}\n</tool_response>\n",
                }
            ]
        )


class _Piece(NamedTuple):
    text: str
    is_cut: bool


class InlinePolicy:
    """Continues one assistant message; generation stops after each tool call.

    A server that only answers chats cannot continue a message: there, each piece is a message, and
    responses are messages of the user.

    Args:
        server: a server, or a managed server for this message only.
        tokenizer: tokenizer for rendering the prompt.
        is_managed: Whether `server` records tokens.
        sampling: further parameters of each request, such as `temperature`.
    """

    def __init__(self, server: Any, tokenizer: Any, *, is_managed: bool, **sampling: Any) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self._is_managed = is_managed
        self._sampling = {"n": 1, "stop": [CLOSE_CALL], **sampling}
        self._is_chat_only = False
        self._chat: list[ChatMessage] = []
        self._num_opening = 0
        self._prompt = ""
        self._text = ""
        self._num_tokens = 0
        self._node: SequenceNode | None = None
        self._spans: list[TurnSpan] = []

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        added = self._added(chat)
        num_added = len(self._tokenizer.encode(added, add_special_tokens=not self._text))
        return max_tokens - self._num_tokens - num_added - RESERVED_TOKENS

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> _Piece:
        added = self._added(chat)
        if not self._text:
            self._num_opening, self._prompt = len(chat), added
        prompt = self._text + added
        piece = await self._sample(prompt, chat, max_tokens=max_tokens)
        self._text = prompt + piece.text
        self._chat = [*chat, {"role": "assistant", "content": piece.text}]
        if self._is_managed:
            self._note_node(known_length=len(self._node.tokens) if self._node else 0)
        else:
            self._num_tokens = len(self._tokenizer.encode(self._text))
        return piece

    def sequences(self) -> list[TokenSequence]:
        node = self._node
        if node is None:
            return []
        written = {"role": "assistant", "content": self._text[len(self._prompt) :]}
        is_one_message = not self._is_chat_only
        return [
            TokenSequence(
                tokens=node.tokens,
                masks=node.masked_tokens,
                inference_logprobs=node.logprobs,
                messages=[*self._chat[: self._num_opening], written]
                if is_one_message
                else _as_turns(self._chat),
                spans=list(self._spans),
                finish_reason=(node.metadata or {}).get("finish_reason"),
            )
        ]

    async def _sample(self, prompt: str, chat: Sequence[ChatMessage], *, max_tokens: int) -> _Piece:
        sampling = {**self._sampling, "max_tokens": max_tokens}
        if not self._is_chat_only:
            try:
                answer = await self._server.completion(prompt=prompt, **sampling)
                [choice] = answer.choices
                return _Piece(choice.text, choice.finish_reason == "length")
            except NoTextCompletionsError:
                self._is_chat_only = True
        answer = await self._server.chat_completion(messages=_as_turns(chat), **sampling)
        [choice] = answer.choices
        return _Piece(choice.message.content or "", choice.finish_reason == "length")

    def _added(self, chat: Sequence[ChatMessage]) -> str:
        """Return the prompt, or the response to the last call."""
        return str(chat[-1]["content"]) if self._text else render_messages(self._tokenizer, chat)

    def _note_node(self, *, known_length: int) -> None:
        node: SequenceNode = self._server.get_state()["nodes"][-1]
        positions = range(known_length, len(node.tokens))
        sampled = (i for i in positions if node.masked_tokens[i] != IGNORE_INDEX)
        start = next(sampled, known_length)
        self._spans.append(TurnSpan(len(self._spans), start, len(node.tokens)))
        self._node, self._num_tokens = node, len(node.tokens)
        if not self._is_chat_only:
            self._text = node.full_text


def _as_turns(chat: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a chat whose responses of tools are messages of the user."""
    return [{**m, "role": "user"} if m["role"] == "tool" else m for m in chat]


class InterleavedInlineConfig(HubItemsConfig, MultiTurnEnvConfig):
    """Settings of the problems and of the tools."""

    subset_rows: int = Field(
        1000, ge=1, description="Number of rows with a number as answer to take from the hub."
    )
    sandbox: str | None = Field(
        None,
        description="Kind of sandbox: bubblewrap, container or gvisor; None takes the kind in "
        "ATROPOS_SANDBOX, or bubblewrap if it is not set.",
    )
    tool_timeout_s: float = Field(5.0, gt=0, le=600, description="Timeout of a call in seconds.")


class InterleavedInlineEnv(DatasetItems, MultiTurnEnv):
    """Problems with a number as answer; an item is a `NumberProblem`.

    Attributes:
        tools: the calculator and, where a sandbox is available, Python; set by `setup`.
    """

    name = "interleaved_inline"
    columns: ClassVar[Sequence[str]] = ("problem",)
    optional_columns: ClassVar[Sequence[str]] = ("answer", "expected_answer")
    hub_dataset = "nvidia/AceReason-Math"
    env_config_cls = InterleavedInlineConfig
    config: InterleavedInlineConfig
    default_model = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 16,
        "max_turns": 3,
        "max_turn_tokens": 512,
        "max_token_length": 8192,
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    async def setup(self) -> None:
        await super().setup()
        self.train = [problem for row in self.train if (problem := read_problem(row))]  # type: ignore[misc]
        self.test = [problem for row in self.test if (problem := read_problem(row))]  # type: ignore[misc]
        if not self.train:
            raise ConfigError(
                "no row has a number in the column answer or expected_answer; expected at least one"
            )
        self.tools = [Tool.of(calculator)]
        try:
            sandbox = open_sandbox(self.config.sandbox)
        except SandboxUnavailableError as error:
            logger.warning("the tool python_interpreter is left out: %s", error)
            return
        python = PythonTool(sandbox, timeout_s=self.config.tool_timeout_s)
        self.tools.append(Tool.of(python.python_interpreter))

    def start_conversation(self, item: NumberProblem) -> InterleavedConversation:
        # The sandbox ends a program itself; its set-up takes time of its own.
        return InterleavedConversation(item, self.tools, timeout_s=self.config.tool_timeout_s + 30)

    async def collect_trajectory(self, item: Any) -> tuple[Rollout, list[Any]]:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            return await self._play(item, managed, temperature=self.config.temperature), []

    async def play_for_evaluation(self, item: Any) -> Rollout:
        return await self._play(item, None, temperature=self.config.eval_temperature, split="eval")

    async def _play(self, item: NumberProblem, managed: Any, **sampling: Any) -> Rollout:
        policy = InlinePolicy(
            self.server if managed is None else managed,
            self.tokenizer,
            is_managed=managed is not None,
            **sampling,
        )
        return await play(
            self.start_conversation(item),
            policy,
            limits=self.limits(),
            reward_weights=self.config.reward_weights,
        )

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        if not rollouts:
            return {}
        played = [r.conversation for r in rollouts]
        talks = [talk for talk in played if isinstance(talk, InterleavedConversation)]
        return {
            **super().metrics_of(rollouts, area),
            f"{area}/percent_correct": statistics.fmean(
                bool(parts) and parts[-1].get("answer", 0.0) > 0
                for parts in (rollout.reward_parts for rollout in rollouts)
            ),
            f"{area}/calls": statistics.fmean(t.num_results + t.num_errors for t in talks),
            f"{area}/failed_calls": statistics.fmean(talk.num_errors for talk in talks),
        }

    def check_gold_answer(self, item: NumberProblem) -> str:
        return f"<think>That is known.</think>\nIt is \\boxed{{{item.answer}}}."

    def _read_hub(self) -> tuple[Any, Any]:
        """Stream rows until there are enough with a number as answer."""
        import datasets

        source = self._hub_source()
        try:
            rows = datasets.load_dataset(
                source["path"], source["subset"], split=source["split"], streaming=True
            )
            found: list[dict[str, Any]] = []
            for row in rows:
                if read_problem(row) is not None:
                    found.append(dict(row))
                if len(found) == self.config.subset_rows:
                    break
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{source['path']} cannot be read from the hub ({error!r}); expected the columns "
                "problem and answer; --env.dataset_path takes local files instead"
            ) from error
        num_test = max(1, round(self.test_fraction * len(found)))
        return found[num_test:], found[:num_test]


if __name__ == "__main__":
    InterleavedInlineEnv.cli()
