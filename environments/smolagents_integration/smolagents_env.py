r"""smolagents: a code agent, unmodified, on questions in the form of GAIA.

    session of the agent proxy ◄── completions ── agent process (smolagents.CodeAgent)
                                                     │ code of each step
                                   sandbox ◄─────────┘ ──► output, error or final answer

Each rollout has a process and a session of its own. The agent's code runs in the sandbox only,
without network; its variables live on because each step runs after all earlier ones again, with
recorded results of tools. Needs smolagents, here or in a virtual environment of its own
(`--env.agent_python`), and a sandbox:

    pip install '.[smolagents]'
    python environments/smolagents_integration/smolagents_env.py process --env.total_steps 4 \
        --env.dataset_path environments/data/smolagents_sample
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
from atroposlib.envs.dataset_items import DatasetItems, LocalItemsConfig
from atroposlib.envs.server_handling.proxy import AgentProxy, AgentTrajectory, group_of_agents
from atroposlib.envs.tools import Tool
from atroposlib.errors import AtroposError, ConfigError, MissingExtraError
from atroposlib.sandbox import Sandbox, SandboxLimits, open_sandbox
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.web_search import LocalCorpus, SearchSource, TavilySearch, inert
from atroposlib.utils.aio import all_results
from atroposlib.utils.local_records import find_split, read_records, require_data

__all__ = [
    "AgentProcessError",
    "AgentRun",
    "AgentTimeoutError",
    "GaiaQuestion",
    "ReplayedSteps",
    "SmolagentsEnv",
    "SmolagentsEnvConfig",
    "StepResult",
    "is_right_answer",
    "score_parts",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="questions and files in the form of GAIA, answered by a code agent of smolagents",
    turns="up to 12",
    reward="0.5 right, 0.2 form, 0.1 each for final_answer, few errors and few steps",
    data="GAIA or other files at `--env.dataset_path`",
    needs="`pip install '.[smolagents]'`, bubblewrap",
    command="process --env.dataset_path environments/data/smolagents_sample --env.total_steps 4",
)

FOLDER = Path(__file__).resolve().parent
SAMPLE = FOLDER.parent / "data" / "smolagents_sample"
CORPUS = FOLDER.parent / "data" / "deep_research_sample" / "corpus.jsonl"
AGENT_PROGRAM = FOLDER / "agent_process.py"
MAX_FILE_BYTES = 8 * 2**20
MAX_MESSAGE_BYTES = 16 * 2**20
MAX_TOOL_CALLS = 40
"""Maximum number of tool calls of one rollout."""
MAX_CODE_CHARACTERS = 100_000
FILE_NOTE = "\n\nThe file {name} is in the working folder; read it with open({name!r})."
IMPORTS = ["csv", "json", "pathlib", "string", "decimal", "fractions"]


class AgentProcessError(AtroposError, RuntimeError):
    """The agent of a rollout failed, or did not end in time."""


class AgentTimeoutError(AgentProcessError, TimeoutError):
    """The agent of a rollout did not end in time."""


class GaiaQuestion(NamedTuple):
    """One item."""

    question: str
    answer: str
    task_id: str
    level: str
    files: dict[str, bytes]
    """Contents of the attached file, by name; empty without one."""


class AgentRun(NamedTuple):
    """The record of one agent."""

    answer: str
    texts: list[str]
    """Texts of the model, step by step."""
    num_errors: int
    """Number of steps that failed or had no code."""
    is_own_answer: bool
    """Whether the agent ended by itself, with `final_answer`."""


THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?!\d|,)", re.ASCII)


def normalized_number(text: str) -> float | None:
    """Return a number without `$`, `%` and thousands commas; None if the text is not a number."""
    plain = re.sub(r"[$%]", "", text).strip()
    if "," in plain and not THOUSANDS.match(plain):
        return None
    plain = plain.replace(",", "")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", plain, re.ASCII):
        return None
    number = float(plain)
    return number if math.isfinite(number) else None


def _normalized_text(text: str) -> str:
    return re.sub(r"[\W_]", "", text.casefold())


def _is_same_entry(answer: str, gold: str) -> bool:
    number = normalized_number(gold)
    if number is not None:
        return normalized_number(answer) == number
    wanted = _normalized_text(gold)
    return _normalized_text(answer) == wanted if wanted else answer.strip() == gold.strip()


def is_right_answer(answer: str, gold: str) -> bool:
    """Compare an answer by the rules of GAIA: as a number, as a list, or as plain text.

    Numbers lose `$`, `%` and commas; lists are compared entry by entry in order; texts without
    case, spaces and punctuation.
    """
    if not answer.strip():
        return False
    if not re.search(r"[,;]", gold):
        return _is_same_entry(answer, gold)
    entries, golds = (
        [entry.strip() for entry in re.split(r"[,;]", text)] for text in (answer, gold)
    )
    if normalized_number(gold) is not None:  # 132,133 may also be a list
        return entries == golds or _is_same_entry(answer, gold)
    return len(entries) == len(golds) and all(map(_is_same_entry, entries, golds))


MAX_NEAR_CHARACTERS = 300
NEAR = 0.01
"""Relative difference of a number that is nearly right."""


def is_near_answer(answer: str, gold: str) -> bool:
    """Whether a number is off by 1 % at most, or a short text contains the whole gold answer."""
    number, wanted = normalized_number(answer), normalized_number(gold)
    if number is not None and wanted is not None:
        return math.isclose(number, wanted, rel_tol=NEAR)
    if len(answer) > MAX_NEAR_CHARACTERS:
        return False
    words, wanted_words = _words(answer), _words(gold)
    return bool(wanted_words.strip()) and wanted_words in words


def _words(text: str) -> str:
    """Return the words of a text, each between spaces."""
    found = re.findall(r"[^\W_]+", text.casefold())
    return f" {' '.join(found)} "


def score_parts(
    run: AgentRun, gold: str, *, max_steps: int, length_penalty_weight: float
) -> dict[str, float]:
    """Return the parts of the score of a run, of which the sum is at most 1.

    Args:
        run: the record of the agent.
        gold: the expected answer.
        max_steps: step limit of the agent.
        length_penalty_weight: penalty for each 1,000 characters of the last step over 2,000.
    """
    correctness = 1.0 if is_right_answer(run.answer, gold) else 0.0
    if not correctness and is_near_answer(run.answer, gold):
        correctness = 0.5
    steps = len(run.texts)
    extra = max(0, len(run.texts[-1]) - 2000) / 1000 if run.texts else 0.0
    return {
        "correctness": 0.5 * correctness,
        "format": 0.2 * (statistics.fmean(map(_form, run.texts)) if steps else 0.0),
        "final_answer": 0.1 * any("final_answer(" in text for text in run.texts),
        "execution": 0.1 * (1 - run.num_errors / steps) if steps else 0.0,
        "efficiency": 0.1 * _efficiency(steps, max_steps) if run.is_own_answer else 0.0,
        "length": -min(0.3, length_penalty_weight * extra),
    }


def _form(text: str) -> float:
    """Return 1.0 for a thought and a closed code block, 0.5 for one of them."""
    thought, opened, code = text.partition("<code>")
    has_code = bool(opened) and "</code>" in code and bool(code.partition("</code>")[0].strip())
    return (bool(thought.strip()) and bool(opened)) / 2 + has_code / 2


def _efficiency(steps: int, max_steps: int) -> float:
    """Return 1.0 up to 75 % of the steps, then linearly down to 0.5."""
    free = 0.75 * max_steps
    return 1.0 if steps <= free else max(0.5, 1 - 0.5 * (steps - free) / (max_steps - free))


class StepResult(BaseModel):
    """The result of one step, as the sandbox or the environment reports it."""

    output: str = ""
    """Value of the last expression, or the final answer."""
    logs: str = ""
    error: str | None = None
    is_final: bool = False
    call: tuple[str, list[Any], dict[str, Any]] | None = None
    """Tool call without a recorded result: name, arguments by position and by name."""
    num_used: int = Field(0, ge=0)
    """Number of recorded results before that call."""


class ReplayedSteps:
    """Runs the steps of one agent in a sandbox, each after all earlier ones.

    A program in the sandbox cannot talk to its environment. When a step calls a tool, its program
    ends with the call; the tool runs here, and the program runs again with the result. Programs
    are deterministic: their hashes and the random generator start with the same seed.

    Args:
        sandbox: where programs run.
        tools: tools that steps may call.
        files: contents of files in the working folder.
        timeout_s: time limit of one program, which includes all earlier steps.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        tools: Sequence[Tool],
        files: Mapping[str, bytes],
        *,
        timeout_s: float,
    ) -> None:
        self._sandbox = sandbox
        self._tools = {tool.name: tool for tool in tools}
        self._files = dict(files)
        self._timeout_s = timeout_s
        self._limits = SandboxLimits(wall_s=timeout_s, cpu_s=math.ceil(timeout_s))
        self._steps: list[str] = []
        self._records: list[dict[str, Any]] = []
        self._num_calls = 0

    async def run(self, code: str) -> StepResult:
        """Run a step; one that exceeds a limit has no effect on later ones."""
        if len(code) > MAX_CODE_CHARACTERS:
            return StepResult(error=f"a step may have {MAX_CODE_CHARACTERS} characters")
        while True:
            result, is_complete = await self._run_program([*self._steps, code])
            if result.call is None:
                if is_complete:
                    self._steps.append(code)
                return result
            self._num_calls += 1
            if self._num_calls > MAX_TOOL_CALLS:
                return StepResult(
                    logs=result.logs, error=f"a task may have {MAX_TOOL_CALLS} tool calls"
                )
            name, args, kwargs = result.call
            answered = await self._call(name, args, kwargs)
            self._records[result.num_used :] = [{"call": [name, args, kwargs], **answered}]

    async def _run_program(self, steps: Sequence[str]) -> tuple[StepResult, bool]:
        """Return the result of the last step, and whether its program ran to the end."""
        work = {"steps": steps, "records": self._records, "tools": list(self._tools)}
        finished = await self._sandbox.run(
            ["/usr/bin/env", "PYTHONHASHSEED=0", "/usr/bin/python3", "-s", "-B", MAIN],
            files={**self._files, MAIN: RUNNER, WORK: json.dumps(work)},
            limits=self._limits,
        )
        if not finished.is_success:
            reason = "" if finished.ended_by == "exit" else f" ({finished.ended_by})"
            detail = finished.stderr.strip()[-500:]
            return StepResult(error=f"the program was ended{reason} {detail}".strip()), False
        try:
            return StepResult.model_validate_json(finished.stdout), True
        except ValidationError:  # the program wrote to the result itself
            return StepResult(error="the program gave no result"), False

    async def _call(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        tool = self._tools.get(name)
        if tool is None:
            return {"value": None, "error": f"there is no tool {name!r:.100}"}
        names = list(tool.arguments_cls.model_fields)
        if len(args) > len(names):
            return {"value": None, "error": f"{name} takes {len(names)} arguments"}
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        result = await tool.run(given, timeout_s=self._timeout_s)
        if result.is_error:
            return {"value": None, "error": result.content}
        return {"value": result.content, "error": None}


MAIN, WORK = ".main.py", ".work.json"

RUNNER = """
import ast, io, json, os, random, sys

out, MAX_LOG, MAX_VALUE = os.dup(1), 20_000, 20_000
os.dup2(2, 1)
with open("/box/.work.json") as file:
    work = json.load(file)
records, used, is_last = work["records"], 0, False


class Log(io.TextIOBase):
    def __init__(self):
        self.text = ""

    def writable(self):
        return True

    def write(self, text):
        self.text += str(text)[: max(0, MAX_LOG - len(self.text))]
        return len(text)


def finish(**result):
    data = json.dumps({"logs": log.text, **result}).encode()
    while data:
        data = data[os.write(out, data) :]
    os._exit(0)


def shown(value):
    try:
        return str(value)[:MAX_VALUE]
    except Exception as error:
        return f"a value that cannot be shown: {error}"


def final_answer(*args, **kwargs):
    value = [*args, *kwargs.values(), None][0]
    finish(output=shown(value), is_final=True)


def tool(name):
    def call(*args, **kwargs):
        global used
        wanted = [name, list(args), kwargs]
        try:
            wanted = json.loads(json.dumps(wanted))
        except (TypeError, ValueError):
            raise TypeError(f"{name} takes numbers, texts and lists") from None
        if used < len(records) and records[used]["call"] == wanted:
            used += 1
            if records[used - 1]["error"] is not None:
                raise RuntimeError(records[used - 1]["error"])
            return records[used - 1]["value"]
        finish(call=wanted, num_used=used)

    call.__name__ = name
    return call


def run(code):
    tree = ast.parse(code, "step")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "step", "exec"), space)
    if last is not None:
        return eval(compile(ast.Expression(last.value), "step", "eval"), space)


def reason(error):
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "step":
            line = trace.tb_lineno
        trace = trace.tb_next
    place = "" if line is None else f"line {line}: "
    return f"{place}{type(error).__name__}: {shown(error)[:2000]}"


space = {"__name__": "__main__", "final_answer": final_answer}
space.update({name: tool(name) for name in work["tools"]})
random.seed(0)
for number, code in enumerate(work["steps"], start=1):
    log = sys.stdout = Log()
    is_last = number == len(work["steps"])
    try:
        value = run(code)
    except BaseException as error:
        if is_last:
            finish(error=reason(error))
    else:
        if is_last:
            finish(output=shown(value))
"""
"""Program of the sandbox: runs all steps, writes the result of the last one as JSON."""


class PageTools:
    """Tools that find and open pages of a corpus or of the web.

    Args:
        source: where pages come from.
    """

    def __init__(self, source: SearchSource) -> None:
        self._source = source
        self._found: set[str] = set()

    async def search_pages(self, query: str) -> str:
        """Search for pages; returns their names, titles and beginnings.

        Args:
            query: Words to look for.
        """
        hits = await self._source.search(query[:400], num_results=5)
        self._found.update(hit.page for hit in hits)
        lines = [f"[{hit.page}] {inert(hit.title)}: {inert(hit.snippet)}" for hit in hits]
        return "\n".join(lines) or "no page was found; try other words"

    async def open_page(self, page: str) -> str:
        """Return the text of a page that a search has found.

        Args:
            page: Its name, as the search gave it.
        """
        if page not in self._found:
            raise ValueError("no search has found this page; search first")
        return inert((await self._source.fetch(page)).text[:MAX_PAGE_CHARACTERS])


MAX_PAGE_CHARACTERS = 20_000


@contextlib.asynccontextmanager
async def agent_process(
    python: str, environment: Mapping[str, str], *, is_verbose: bool
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the process of one agent; it and its children are killed at the end of the block.

    Args:
        python: interpreter with smolagents.
        environment: variables of the process; of ours it gets PATH, HOME and LANG only.
        is_verbose: Whether its log is shown.

    Raises:
        ConfigError: the interpreter cannot be started.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            str(AGENT_PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if is_verbose else asyncio.subprocess.DEVNULL,
            env={**kept, "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,
            limit=MAX_MESSAGE_BYTES,
        )
    except OSError as error:
        raise ConfigError(
            f"the agent cannot be started with {python} ({error.strerror}); set "
            "--env.agent_python to a Python interpreter with smolagents"
        ) from error
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if process.stdin is not None:
            process.stdin.close()


async def run_agent(
    process: asyncio.subprocess.Process, task: Mapping[str, Any], steps: ReplayedSteps
) -> AgentRun:
    """Send a task to an agent's process and run its steps until it is done.

    Raises:
        MissingExtraError: the interpreter has no smolagents.
        AgentProcessError: the agent failed, or no completion was given.
    """
    await _send(process, task)
    while True:
        message = await _receive(process)
        if message["kind"] != "step":
            break
        result = await steps.run(str(message["code"]))
        await _send(process, result.model_dump(include={"output", "logs", "error", "is_final"}))
    if message["kind"] == "missing":
        raise MissingExtraError(str(message["answer"]), extra="smolagents")
    if message["kind"] not in ("done", "context_full"):
        raise AgentProcessError(f"the agent failed: {str(message['answer'])[:500]}")
    return AgentRun(
        message["answer"], message["texts"], message["num_errors"], message["is_own_answer"]
    )


async def _send(process: asyncio.subprocess.Process, message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
    with contextlib.suppress(ConnectionError):  # the next read reports the end of the process
        await process.stdin.drain()


async def _receive(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        message: dict[str, Any] = json.loads(line) if line else {}
    except ValueError as error:
        raise AgentProcessError(f"the agent sent an invalid message: {error}") from error
    if not message:
        raise AgentProcessError("the process of the agent ended without a result")
    return message


class SmolagentsEnvConfig(LocalItemsConfig):
    """Settings of the questions, of the agent and of the score."""

    dataset_path: str = Field(
        "data/gaia",
        description="Folder of GAIA, or JSONL, JSON or Parquet file, or folder with a train and a "
        "test file, with the columns Question and Final answer.",
    )
    split: str = Field("validation", description="Split of GAIA.")
    use_chat_completion: Literal[True] = Field(
        True, description="Whether the agent uses chat completions; it has no other way."
    )
    max_steps: int = Field(12, ge=1, le=100, description="Maximum number of steps of an agent.")
    max_turn_tokens: int = Field(1024, ge=1, description="Token limit of one step.")
    agent_verbosity: int = Field(
        2, ge=0, le=3, description="Log level of smolagents; 0 shows none of its log."
    )
    scoring_strategy: Literal["combined", "correctness"] = Field(
        "combined", description="Score: all parts, or 1 for a right answer and 0 otherwise."
    )
    length_penalty_weight: float = Field(
        0.1, ge=0, description="Penalty for each 1,000 characters of the last step over 2,000."
    )
    save_full_traces: bool = Field(
        True, description="Whether groups contain the answers and the parts of their scores."
    )
    max_concurrent_processes: int = Field(
        5, ge=1, le=1024, description="Maximum number of agents that run at the same time."
    )
    process_timeout: float = Field(240.0, gt=0, description="Time limit of one agent in seconds.")
    step_timeout_s: float = Field(
        10.0, gt=0, description="Time limit in seconds of a step, including the earlier ones."
    )
    debug_scoring: bool = Field(False, description="Whether to log the parts of each score.")
    agent_python: str | None = Field(
        None,
        description="Python interpreter with smolagents; None takes that of the environment.",
    )
    sandbox: str | None = Field(
        None,
        description="Kind of sandbox: bubblewrap, container or gvisor; None takes the kind in "
        "ATROPOS_SANDBOX, or bubblewrap if it is not set.",
    )
    search_provider: Literal["none", "local", "tavily"] = Field(
        "none",
        description="Source of the tools search_pages and open_page: none, local is the corpus, "
        "tavily the web, with the key in TAVILY_API_KEY.",
    )
    corpus_path: str = Field(
        str(CORPUS),
        description="JSONL, JSON or Parquet file of pages, with the columns id, title, text.",
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")


class AgentRollout(NamedTuple):
    """Sequences and score of one agent."""

    trajectory: AgentTrajectory
    parts: dict[str, float]
    answer: str
    duration_s: float


class EvaluatedAgent(NamedTuple):
    """The result of one agent in an evaluation."""

    answer: str
    score: float
    parts: dict[str, float]
    duration_s: float
    is_late: bool = False
    """Whether it did not end in time."""


class SmolagentsEnv(DatasetItems, BaseEnv):
    """Questions for a code agent; an item is a `GaiaQuestion`.

    Attributes:
        durations: seconds of each agent since the last log.
    """

    name = "smolagents"
    columns: ClassVar[Sequence[str]] = ("Question", "Final answer")
    optional_columns: ClassVar[Sequence[str]] = ("task_id", "Level", "file_name")
    test_fraction = 0.1
    env_config_cls = SmolagentsEnvConfig
    config: SmolagentsEnvConfig  # type: ignore[assignment]
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {"group_size": 8, "max_token_length": 32768}
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE), "max_steps": 2}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.durations: list[float] = []
        self.scores_since_log: list[float] = []
        self._agents = AgentProxy(self.server, self.tokenizer)
        self._slots = asyncio.Semaphore(self.config.max_concurrent_processes)

    @classmethod
    def check_inputs(cls, config: BaseEnvConfig) -> None:
        if isinstance(config, SmolagentsEnvConfig) and _gaia_folder(config) is None:
            require_data(Path(config.dataset_path), cls.columns)

    async def setup(self) -> None:
        self._sandbox = open_sandbox(self.config.sandbox)
        self._source = await asyncio.to_thread(self._open_source)
        await super().setup()
        await self._agents.start()

    async def close(self) -> None:
        await self._agents.close()
        if self._source is not None:
            await self._source.close()

    async def get_next_item(self) -> GaiaQuestion:  # type: ignore[override]
        return await asyncio.to_thread(self._question, await super().get_next_item())

    async def collect_trajectory(self, item: GaiaQuestion) -> tuple[AgentRollout, list[Any]]:
        """Run one agent; it is ended after `process_timeout`."""
        return await self._roll_out(item, temperature=self.config.temperature), []

    async def postprocess_histories(
        self, trajectories: Sequence[AgentRollout]
    ) -> ScoredDataGroup | None:
        group = group_of_agents([rollout.trajectory for rollout in trajectories])
        self.scores_since_log += [rollout.trajectory.score for rollout in trajectories]
        if group is not None and self.config.save_full_traces:
            rows = [r for r in trajectories for _ in r.trajectory.nodes]
            group["reward_parts"] = [rollout.parts for rollout in rows]
        return group

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Run one agent for each test question and log the fraction of right answers.

        An agent that does not end in time scores 0.

        Raises:
            AgentTimeoutError: no agent ended in time.
        """
        started_at = time.time()
        questions = [await asyncio.to_thread(self._question, row) for row in self.test]
        results = await all_results(self._evaluated(question) for question in questions)
        if not results:
            logger.info("no evaluation: the data has no test questions")
            return
        if all(result.is_late for result in results):
            raise AgentTimeoutError(
                f"none of {len(results)} agents ended within {self.config.process_timeout:g} s "
                "(--env.process_timeout)"
            )
        metrics = {
            "eval/success_rate": statistics.fmean(
                is_right_answer(result.answer, question.answer)
                for result, question in zip(results, questions, strict=True)
            ),
            "eval/avg_score": statistics.fmean(result.score for result in results),
            "eval/num_examples": len(results),
            "eval/avg_execution_time": statistics.fmean(result.duration_s for result in results),
            "eval/timed_out_rate": statistics.fmean(result.is_late for result in results),
        }
        await self.evaluate_log(
            metrics=metrics,
            samples=[
                {
                    "messages": [
                        {"role": "user", "content": question.question},
                        {"role": "assistant", "content": result.answer},
                    ],
                    "score": result.score,
                    "reward_parts": result.parts,
                    "task_id": question.task_id,
                }
                for result, question in zip(results, questions, strict=True)
            ],
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={"temperature": self.config.eval_temperature},
        )
        await self.wandb_log(metrics)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.durations:
            metrics["agent/mean_execution_time"] = statistics.fmean(self.durations)
            metrics["agent/max_execution_time"] = max(self.durations)
        if self.scores_since_log:
            metrics["train/mean_score"] = statistics.fmean(self.scores_since_log)
        self.durations, self.scores_since_log = [], []
        await super().wandb_log(metrics)

    async def _evaluated(self, question: GaiaQuestion) -> EvaluatedAgent:
        try:
            rollout = await self._roll_out(question, temperature=self.config.eval_temperature)
        except AgentTimeoutError as error:
            logger.warning("task %s: %s", question.task_id, error)
            return EvaluatedAgent("", 0.0, {}, self.config.process_timeout, is_late=True)
        return EvaluatedAgent(
            rollout.answer, rollout.trajectory.score, rollout.parts, rollout.duration_s
        )

    def check_gold_answer(self, item: GaiaQuestion) -> str:
        return f"Thought: it is known.\n<code>\nfinal_answer({item.answer!r})\n</code>"

    async def _roll_out(self, item: GaiaQuestion, *, temperature: float) -> AgentRollout:
        tools = self._tools()
        steps = ReplayedSteps(
            self._sandbox, tools, item.files, timeout_s=self.config.step_timeout_s
        )
        async with self._slots, self._agents.session() as agent:
            started_at = time.monotonic()
            task = self._task(item, tools, model=agent.model, temperature=temperature)
            async with agent_process(
                self.config.agent_python or sys.executable,
                agent.environment,
                is_verbose=self.config.agent_verbosity > 0,
            ) as running:
                try:
                    run = await asyncio.wait_for(
                        run_agent(running, task, steps), self.config.process_timeout
                    )
                except (TimeoutError, asyncio.TimeoutError) as error:
                    raise AgentTimeoutError(
                        f"the agent did not end within {self.config.process_timeout:g} s"
                    ) from error
            duration_s = time.monotonic() - started_at
            self.durations.append(duration_s)
            parts = self._parts(run, item)
            trajectory = agent.trajectory(sum(parts.values()))
        return AgentRollout(trajectory, parts, run.answer, duration_s)

    def _task(
        self, item: GaiaQuestion, tools: Sequence[Tool], *, model: str, temperature: float
    ) -> dict[str, Any]:
        notes = [FILE_NOTE.format(name=name) for name in item.files]
        return {
            "question": item.question + "".join(notes),
            "model": model,
            "max_steps": self.config.max_steps,
            "verbosity": self.config.agent_verbosity,
            "timeout_s": self.config.process_timeout,
            "sampling": {"temperature": temperature, "max_tokens": self.config.max_turn_tokens},
            "tools": [_tool_definition(tool) for tool in tools],
            "imports": IMPORTS,
        }

    def _parts(self, run: AgentRun, item: GaiaQuestion) -> dict[str, float]:
        if self.config.scoring_strategy == "correctness":
            return {"correctness": float(is_right_answer(run.answer, item.answer))}
        parts = score_parts(
            run,
            item.answer,
            max_steps=self.config.max_steps,
            length_penalty_weight=self.config.length_penalty_weight,
        )
        if self.config.debug_scoring:
            logger.info("task %s: %s", item.task_id, parts)
        return parts

    def _tools(self) -> list[Tool]:
        if self._source is None:
            return []
        pages = PageTools(self._source)
        return [Tool.of(pages.search_pages), Tool.of(pages.open_page)]

    def _open_source(self) -> SearchSource | None:
        if self.config.search_provider == "none":
            return None
        if self.config.search_provider == "local":
            return LocalCorpus.load(Path(self.config.corpus_path))
        return TavilySearch(os.environ, base_url="https://api.tavily.com", timeout_s=15.0)

    def _read(self) -> tuple[Any, Any]:
        folder = _gaia_folder(self.config)
        if folder is None:
            return super()._read()
        path = find_split(folder, ["metadata"])
        rows = read_records(path, self.columns, optional=self.optional_columns)
        num_test = max(1, round(self.test_fraction * len(rows)))
        return rows[num_test:] or rows, rows[:num_test]

    def _question(self, row: Mapping[str, Any]) -> GaiaQuestion:
        name = str(row.get("file_name") or "")
        files = {name: _read_attachment(self._data_folder, name)} if name else {}
        return GaiaQuestion(
            str(row["Question"]),
            str(row["Final answer"]),
            str(row.get("task_id") or ""),
            str(row.get("Level") or ""),
            files,
        )

    @property
    def _data_folder(self) -> Path:
        path = Path(self.config.dataset_path)
        return _gaia_folder(self.config) or (path if path.is_dir() else path.parent)


def _gaia_folder(config: SmolagentsEnvConfig) -> Path | None:
    """Return the folder of a split in the layout of GAIA; None for other files."""
    folder = Path(config.dataset_path) / "2023" / config.split
    return folder if folder.is_dir() else None


def _read_attachment(folder: Path, name: str) -> bytes:
    """Return the content of an attached file.

    Raises:
        ConfigError: it is missing, too large, or not in the folder of the data.
    """
    path = folder / name
    if Path(name).name != name or name in (MAIN, WORK) or not path.is_file():
        raise ConfigError(f"attached file {name!r}: expected a file in {folder}")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"attached file {path}: expected at most {MAX_FILE_BYTES} bytes")
    return path.read_bytes()


def _tool_definition(tool: Tool) -> dict[str, Any]:
    """Return name, description and inputs of a tool in the form of smolagents."""
    function = tool.definition()["function"]
    properties = function["parameters"]["properties"]
    inputs = {
        name: {"type": schema["type"], "description": schema.get("description", name)}
        for name, schema in properties.items()
    }
    return {"name": tool.name, "description": tool.description, "inputs": inputs}


if __name__ == "__main__":
    SmolagentsEnv.cli()
