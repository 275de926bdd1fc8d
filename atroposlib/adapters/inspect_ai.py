"""Tasks of Inspect: its solvers, tools and scorers run unmodified, the model is our policy.

    item ─► Worker (a process) ─► inspect's eval of one sample ─► its OpenAI client ─► agent proxy
                                       └─► scores, limits, messages ─► reward, metrics, truncation

Inspect runs one evaluation per process at a time, so rollouts are spread over `num_workers`
processes, each of which loads the task once. A worker that is cancelled, or that crashes, is
ended with everything it started, and replaced. It ends itself when this process does.

Run as a program, this module is the worker: requests and replies are lines of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    AgentEndpoint,
    AgentEpisode,
    EpisodeEnd,
    Item,
    finite_reward,
)
from atroposlib.errors import (
    ConfigError,
    EpisodeFailedError,
    EpisodeRewardError,
)
from atroposlib.utils.text import near_name

__all__ = ["InspectAdapter", "InspectArgs", "InspectEpisode", "Worker", "main"]

MODEL_RETRIES = 0
"""Retries by inspect of a request to the policy; its default has no limit. Its client retries, and
the proxy waits for the engine."""
MODEL_GRADED = ("model_graded_qa", "model_graded_fact")
"""Scorers of inspect that ask a model."""
MAX_LINE_BYTES = 64 * 2**20
"""Limit of one reply of a worker."""
END_S = 5.0
"""Time a worker has to end its sandboxes."""


class InspectArgs(AdapterArgs):
    """Arguments of the task, and of how its samples become rollouts."""

    task_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the task, as `-T` of inspect eval."
    )
    reward: list[str] = Field(
        default_factory=list,
        description="Names of the scores whose sum is the reward, SCORER or SCORER/KEY; none: "
        "those of the first scorer.",
    )
    grader: str | None = Field(
        None,
        description="Model of scorers that ask one, as inspect names it, such as openai/gpt-4o; "
        "its key is read from the variable that inspect documents.",
    )
    grader_args: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the grader, such as base_url."
    )
    sandbox: str | None = Field(
        None,
        description="Sandbox of tasks that need one: task for that of the task, docker, or local, "
        "which runs the model's commands on this machine; None refuses such tasks.",
    )
    message_limit: int | None = Field(
        None, ge=1, le=100_000, description="Limit of messages; None: that of the task."
    )
    token_limit: int | None = Field(
        None, ge=1, le=10_000_000, description="Limit of tokens; None: that of the task."
    )
    num_workers: int = Field(
        4, ge=1, le=256, description="Number of processes, and of rollouts at the same time."
    )
    max_samples: int = Field(
        100_000, ge=1, le=10_000_000, description="Number of samples that are read at most."
    )
    held_out: int = Field(
        0, ge=0, le=1_000_000, description="Number of samples kept for evaluations only."
    )
    shuffle: bool = Field(True, description="Whether the order of samples is shuffled by the seed.")
    tool_parser: str = Field("hermes", description="Format of the model's tool calls.")


class Worker:
    """A process that evaluates one sample at a time.

    Args:
        where: start of error messages, such as `inspect_ai:gsm8k`.
        task: the request that loads the task; see `load_task`.
    """

    def __init__(self, where: str, task: Mapping[str, Any]) -> None:
        self.where = where
        self.task = task
        self.summary: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._ending = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and load the task in it.

        Raises:
            ConfigError: inspect cannot load the task.
        """
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        reply = await self.ask(self.task)
        if "error" in reply:
            await self.end()
            raise ConfigError(f"{self.where}: {reply['error']}")
        self.summary = reply

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply; cancelling ends the process.

        Raises:
            EpisodeFailedError: the process ended.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise EpisodeFailedError(f"{self.where}: the worker has ended")
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (ConnectionError, ValueError) as error:
            await self.end()
            raise EpisodeFailedError(f"{self.where}: the worker ended: {error}") from error
        except asyncio.CancelledError:
            await self.end()
            raise
        if not line.endswith(b"\n"):
            await self.end()
            raise EpisodeFailedError(
                f"{self.where}: the worker ended with code {process.returncode}"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def end(self) -> None:
        """End the process and what it started; returns when it has ended.

        One with sandboxes is interrupted first, so that inspect can release them.
        """
        process, self._process = self._process, None
        if process is not None and self.task["sandbox"] is None:
            kill_group(process.pid)  # at once, also if the event loop ends before the next line
        async with self._ending:
            if process is None:
                return
            if self.task["sandbox"] is not None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGINT)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.wait(), END_S)
                kill_group(process.pid)
            await process.wait()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class InspectEpisode(AgentEpisode):
    """One sample, evaluated by inspect in a worker."""

    def __init__(self, adapter: InspectAdapter, item: Item) -> None:
        self._adapter = adapter
        self._item = item
        self.tool_parser = adapter.args.tool_parser

    async def run(self, endpoint: AgentEndpoint) -> EpisodeEnd:
        args = self._adapter.args
        request = {
            "sample": self._item["index"],
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "settings": {
                "temperature": endpoint.temperature,
                "max_tokens": endpoint.max_tokens,
                "message_limit": args.message_limit,
                "token_limit": args.token_limit,
            },
        }
        async with self._adapter.worker() as worker:
            reply = await worker.ask(request)
        return end_of_sample(reply, args.reward, self._adapter.where)


class InspectAdapter(Adapter):
    """One task; an item is the index of a sample."""

    args_cls = InspectArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_token_length": 4096}
    args: InspectArgs

    def __init__(self, name: str, args: InspectArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.where = f"inspect_ai:{name}"
        self.max_concurrent = args.num_workers
        self._idle: list[Worker] = []
        self._workers: set[Worker] = set()
        self._count = 0
        self._order: tuple[int, list[int]] = (-1, [])

    async def open(self) -> None:
        async with self.worker() as worker:
            self._check(worker.summary)
            self._count = min(worker.summary["num_samples"], self.args.max_samples)
        if self._count <= self.args.held_out:
            raise ConfigError(
                f"{self.where} has {self._count} samples, {self.args.held_out} of them held out; "
                "expected at least one to train on"
            )

    async def close(self) -> None:
        workers, self._workers, self._idle = self._workers, set(), []
        await asyncio.gather(*(worker.end() for worker in workers))

    @contextlib.asynccontextmanager
    async def worker(self) -> Any:
        """Yield a worker for one request; one that failed is replaced."""
        worker = self._idle.pop() if self._idle else Worker(self.where, self._load_request())
        self._workers.add(worker)
        try:
            if not worker.is_running:
                await worker.start()
            yield worker
        except BaseException:
            await worker.end()
            self._workers.discard(worker)
            raise
        if worker in self._workers:
            self._idle.append(worker)

    async def item(self, index: int) -> Item:
        count = self._count - self.args.held_out
        epoch, position = divmod(index, count)
        if self._order[0] != epoch:
            order = list(range(count))
            if self.args.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return {"index": self._order[1][position]}

    async def eval_items(self, limit: int) -> Sequence[Item]:
        first = self._count - self.args.held_out if self.args.held_out else 0
        return [{"index": i} for i in range(first, self._count)][:limit]

    def start(self, item: Item) -> InspectEpisode:
        return InspectEpisode(self, item)

    def _load_request(self) -> dict[str, Any]:
        args = self.args
        return {
            "task": self.name,
            "task_args": args.task_args,
            "grader": args.grader,
            "grader_args": args.grader_args,
            "sandbox": args.sandbox,
        }

    def _check(self, summary: Mapping[str, Any]) -> None:
        if not summary["scorers"]:
            raise ConfigError(f"{self.where} has no scorer; there is nothing to reward")
        graded = [name for name in summary["scorers"] if name.rpartition("/")[2] in MODEL_GRADED]
        if graded and self.args.grader is None:
            raise ConfigError(
                f"{self.where}: its scorer {graded[0]} asks a model; name one with the argument "
                "grader, such as grader=openai/gpt-4o"
            )
        if summary["sandboxes"] and self.args.sandbox is None:
            raise ConfigError(
                f"{self.where} runs commands in a sandbox ({', '.join(summary['sandboxes'])}); set "
                "sandbox=task to use it, or sandbox=local to run them on this machine"
            )


def end_of_sample(reply: Mapping[str, Any], wanted: Sequence[str], where: str) -> EpisodeEnd:
    """Convert the reply of a worker.

    Args:
        reply: scores, limits and messages of the sample.
        wanted: names of the scores that make up the reward; none: those of the first scorer.
        where: start of error messages.

    Raises:
        EpisodeFailedError: inspect reports an error.
        EpisodeRewardError: a score is missing or not finite.
    """
    if "error" in reply:
        raise EpisodeFailedError(f"{where}: {reply['error'][:500]}")
    scores: dict[str, float | None] = reply["scores"]
    first = reply["first_scorer"]
    names = list(wanted) or [n for n in scores if n == first or n.startswith(f"{first}/")]
    unknown = [name for name in names if name not in scores]
    if unknown or not names:
        raise EpisodeRewardError(
            f"{where} gave no score {unknown[0] if unknown else first}; its scores are: "
            f"{', '.join(scores) or 'none'}"
        )
    metrics = {name: v for name, v in scores.items() if v is not None and math.isfinite(v)}
    metrics["num_turns"] = float(reply["num_turns"])
    metrics["truncated"] = float(reply["is_truncated"])
    if reply["limit"]:
        metrics[f"limit/{reply['limit']}"] = 1.0
    return EpisodeEnd(
        {name: finite_reward(scores[name], f"{where}: {name}") for name in names},
        metrics=metrics,
        messages=reply["messages"],
        is_truncated=reply["is_truncated"],
    )


def main() -> None:
    """Answer requests until standard input ends; then end, whatever is running."""
    # Inspect and tasks may print; replies have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: list[str] = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        for line in sys.stdin:
            requests.append(line)
            arrived.release()
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    task: LoadedTask | None = None
    while True:
        arrived.acquire()
        request = json.loads(requests.pop(0))
        try:
            if task is None:
                task = LoadedTask(request)
                reply = task.summary()
            else:
                reply = task.evaluate(request)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code; it is reported
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


class LoadedTask:
    """The task of a worker, and the evaluation of one of its samples."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        # The loader that `inspect eval` uses; the public `eval` gives no access to samples.
        from inspect_ai._eval.loader import load_tasks

        os.environ.setdefault("INSPECT_LOG_LEVEL", "error")
        name = request["task"]
        tasks = load_tasks([name], dict(request["task_args"]))
        if len(tasks) != 1:
            raise ValueError(
                f"{name} names {len(tasks)} tasks; expected one, such as {name}@NAME of the task"
            )
        self.task = tasks[0]
        check_task_args(self.task, request["task_args"])
        self.samples = list(self.task.dataset)
        self.request = request

    def summary(self) -> dict[str, Any]:
        sandboxes = [self.task.sandbox, *(sample.sandbox for sample in self.samples)]
        return {
            "num_samples": len(self.samples),
            "scorers": self.scorers(),
            "sandboxes": sorted({box.type for box in sandboxes if box is not None}),
        }

    def scorers(self) -> list[str]:
        """Return the names of the scorers, with those of their packages."""
        from inspect_ai.util import registry_info

        scorers = self.task.scorer or []
        listed = scorers if isinstance(scorers, list | tuple) else [scorers]
        return [registry_info(scorer).name for scorer in listed]

    def evaluate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        import inspect_ai
        from inspect_ai.dataset import MemoryDataset
        from inspect_ai.model import GenerateConfig, get_model

        sample = copy.deepcopy(self.samples[request["sample"]])
        task = copy.copy(self.task)
        task.dataset = MemoryDataset([sample], name=self.task.dataset.name)
        task.model = None  # one of the task would be asked in place of the policy
        model = get_model(
            f"openai-api/policy/{request['model']}",
            base_url=request["base_url"],
            api_key=request["api_key"],
            config=GenerateConfig(max_retries=MODEL_RETRIES),
            memoize=False,
        )
        with tempfile.TemporaryDirectory(prefix="inspect-") as folder:
            [log] = inspect_ai.eval(task, model=model, **self._settings(request, folder))
            samples = log.samples or ()  # read from the folder on access
            errors = [log.error, *(sample.error for sample in samples)]
            error = next((error.message for error in errors if error is not None), None)
            if error is not None or not samples:
                return {"error": error or f"inspect ended as {log.status}"}
            first_scorer = self.scorers()[0].rpartition("/")[2]
            return reply_of_sample(samples[0], str(model), first_scorer)

    def _settings(self, request: Mapping[str, Any], folder: str) -> dict[str, Any]:
        """Return the arguments of `eval` that the installed version has."""
        import inspect_ai
        from inspect_ai.model import get_model

        settings: dict[str, Any] = {
            "display": "none",
            "log_dir": folder,
            "log_level": "error",
            "log_realtime": False,
            "log_images": False,
            "score_display": False,
            "ctl_server": False,
            "epochs": 1,
            "fail_on_error": True,
            "retry_on_error": 0,
            "max_tasks": 1,
        }
        known = inspect.signature(inspect_ai.eval).parameters
        settings = {name: value for name, value in settings.items() if name in known}
        settings.update({n: v for n, v in request["settings"].items() if v is not None})
        if self.request["grader"] is not None:
            grader = get_model(self.request["grader"], **self.request["grader_args"])
            settings["model_roles"] = {"grader": grader}
        if self.request["sandbox"] not in (None, "task"):
            settings["sandbox"] = self.request["sandbox"]
        return settings


def check_task_args(task: Any, given: Mapping[str, Any]) -> None:
    """Raise `ValueError` for arguments that the task does not take; inspect only logs them."""
    from inspect_ai.util import registry_info

    try:
        from inspect_ai._util.registry import registry_params
    except ImportError:  # not public, so that a later version may not have it
        return
    for name in given:
        if name not in registry_params(task):
            known = registry_info(task).metadata.get("params") or ()
            hint = near_name(name, known) or f"; it has {', '.join(known) or 'none'}"
            raise ValueError(f"task_args: the task has no argument {name!r}{hint}")


def reply_of_sample(sample: Any, policy: str, first_scorer: str) -> dict[str, Any]:
    """Return what the parent process needs of an evaluated sample."""
    if asks_policy_in_scoring(sample, policy):
        return {
            "error": "its scorer asks the policy for a grade; name another model with the argument "
            "grader, if the scorer uses the role `grader`"
        }
    scores: dict[str, float | None] = {}
    for name, score in (sample.scores or {}).items():
        scores.update(as_numbers(name, score.value))
    length = sample.output.stop_reason in ("max_tokens", "model_length")
    return {
        "scores": scores,
        "first_scorer": first_scorer,
        "num_turns": sum(message.role == "assistant" for message in sample.messages),
        "limit": sample.limit.type if sample.limit is not None else None,
        "is_truncated": sample.limit is not None or length,
        "messages": [as_chat_message(message) for message in sample.messages],
    }


def asks_policy_in_scoring(sample: Any, policy: str) -> bool:
    """Whether the policy was asked after scoring began."""
    scoring = False
    for event in sample.events:
        if event.event == "span_begin" and event.name == "scorers":
            scoring = True
        elif scoring and event.event == "model" and event.model == policy:
            return True
    return False


def as_numbers(name: str, value: Any) -> dict[str, float | None]:
    """Return the value of a score as numbers by name; None stands for a missing value."""
    from inspect_ai.scorer import value_to_float

    if isinstance(value, Mapping):
        named = list(value.items())
    elif isinstance(value, list | tuple):
        named = list(enumerate(value))
    else:
        return {name: None if value is None else float(value_to_float()(value))}
    numbers: dict[str, float | None] = {}
    for key, part in named:
        numbers.update(as_numbers(f"{name}/{key}", part))
    return numbers


def as_chat_message(message: Any) -> dict[str, Any]:
    """Return a message of inspect in OpenAI's form."""
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    calls = getattr(message, "tool_calls", None)
    if calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in calls
        ]
    if message.role == "tool":
        entry["tool_call_id"] = message.tool_call_id
    return entry


if __name__ == "__main__":
    main()
