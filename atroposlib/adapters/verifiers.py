"""Environments for Prime Intellect's verifiers: its own loop, tools and rubric, our tokens.

    installed package ─► tasks ─► item ─► rollout in verifiers ─► its OpenAI client ─► agent proxy
                                              └─► rewards by name, metrics, truncation

Two interfaces of the library are supported, chosen by the installed version: tasksets and
harnesses of `verifiers.v1` (0.4), and `load_environment` with rubrics (0.1). An environment that
is written for the other interface is refused before the first rollout. Everything of the library
runs in a loop of its own (`EpisodeLoop`), since scoring functions may block.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import os
import random
import secrets
import signal
import traceback
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import openai
from packaging.version import Version
from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    AgentEndpoint,
    AgentEpisode,
    EpisodeEnd,
    EpisodeLoop,
    Item,
    finite_reward,
)
from atroposlib.envs.reporting import Reward
from atroposlib.envs.server_handling.engine_http import make_http_client
from atroposlib.errors import ConfigError, EpisodeFailedError, EpisodeRewardError
from atroposlib.utils.text import near_name

__all__ = ["VerifiersAdapter", "VerifiersArgs", "VerifiersEpisode"]

CLOUD_RUNTIMES = ("prime", "modal", "e2b")
CLOUD_CLASSES = ("SandboxEnv", "PythonEnv", "CliAgentEnv", "BrowserEnv", "HarborEnv", "RLMEnv")
"""Environments of the 0.1 line that start sandboxes of Prime Intellect."""


class VerifiersArgs(AdapterArgs):
    """Arguments of the environment, and of how verifiers plays it."""

    env_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the environment: fields of its taskset's configuration (0.4), or "
        "arguments of load_environment (0.1).",
    )
    eval_args: dict[str, Any] | None = Field(
        None,
        description="Arguments that differ for evaluations, such as {split: test}; None: the "
        "evaluation data set of the package (0.1), or tasks held out.",
    )
    env_settings: dict[str, Any] = Field(
        default_factory=dict,
        description="Further fields of the environment's configuration (0.4), as in its own "
        "--env.* flags, such as {agent: {max_turns: 4}}.",
    )
    harness: str | None = Field(
        None,
        description="Harness that plays the tasks (0.4); None: that of the package, else `null`, "
        "a chat with the tools of the task.",
    )
    runtime: Literal["subprocess", "docker", "podman", "apptainer", "prime", "modal", "e2b"] = (
        Field("subprocess", description="Where the harness runs (0.4).")
    )
    allow_cloud: bool = Field(
        False, description="Whether sandboxes and tunnels of a cloud provider may be used."
    )
    max_turns: int | None = Field(
        None, ge=1, le=10_000, description="Limit of turns; None: that of the environment."
    )
    max_tasks: int = Field(
        100_000, ge=1, le=10_000_000, description="Number of tasks that are read at most."
    )
    held_out: int = Field(
        0, ge=0, le=1_000_000, description="Number of training tasks kept for evaluations only."
    )
    shuffle: bool = Field(True, description="Whether the order of tasks is shuffled by the seed.")
    tool_parser: str = Field("hermes", description="Format of the model's tool calls.")


class Source(ABC):
    """The tasks of one environment, and how one of them is played."""

    def __init__(self, name: str, args: VerifiersArgs) -> None:
        self.name = name
        self.args = args

    @abstractmethod
    def load(self) -> None:
        """Import the package and read its tasks.

        Raises:
            ConfigError: the package is missing, or cannot be played here.
        """

    @abstractmethod
    def num_tasks(self, split: str) -> int:
        """Return the number of tasks of `train` or `eval`; 0 if there is no such split."""

    async def open(self) -> None:
        """Start what all rollouts share; called in the loop of the library."""
        return

    async def close(self) -> None:
        """Release what `open` started; called in the loop of the library."""
        return

    @abstractmethod
    async def play(self, split: str, index: int, endpoint: AgentEndpoint) -> EpisodeEnd:
        """Play one task; called in the loop of the library."""


class VerifiersEpisode(AgentEpisode):
    """One rollout, played by verifiers."""

    def __init__(self, adapter: VerifiersAdapter, item: Item) -> None:
        self._adapter = adapter
        self._item = item
        self.tool_parser = adapter.args.tool_parser

    async def run(self, endpoint: AgentEndpoint) -> EpisodeEnd:
        source = await self._adapter.opened_source()
        return await self._adapter.loop.call(
            source.play, self._item["split"], self._item["index"], endpoint
        )


class VerifiersAdapter(Adapter):
    """One installed environment; an item is the index of a task."""

    args_cls = VerifiersArgs
    default_settings: ClassVar[Mapping[str, Any]] = {"max_token_length": 4096}
    args: VerifiersArgs

    def __init__(self, name: str, args: VerifiersArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.loop = EpisodeLoop(f"verifiers:{name}")
        self._source: Source | None = None
        self._generation = 0
        self._opening = asyncio.Lock()
        self._order: tuple[int, list[int]] = (-1, [])

    async def open(self) -> None:
        await self.opened_source()

    async def close(self) -> None:
        if self._source is not None and self._generation == self.loop.generation:
            await self.loop.call(self._source.close)
        await self.loop.close()

    async def opened_source(self) -> Source:
        """Return the loaded environment; it is loaded again if a rollout blocked its loop."""
        async with self._opening:
            if self._source is None or self._generation != self.loop.generation:
                source_cls = TasksetSource if has_tasksets() else RubricSource
                source = source_cls(self.name, self.args)
                with kept_signal_handlers():
                    source.load()
                self._check_size(source)
                self._generation = self.loop.generation
                await self.loop.call(source.open)
                self._source = source
            return self._source

    async def item(self, index: int) -> Item:
        count = self._source_now().num_tasks("train") - self.args.held_out
        epoch, position = divmod(index, count)
        if self._order[0] != epoch:
            order = list(range(count))
            if self.args.shuffle:
                random.Random(f"{self.seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return {"split": "train", "index": self._order[1][position]}

    async def eval_items(self, limit: int) -> Sequence[Item]:
        source = self._source_now()
        count = source.num_tasks("eval")
        if count:
            return [{"split": "eval", "index": i} for i in range(min(limit, count))]
        total, held_out = source.num_tasks("train"), self.args.held_out
        first = total - held_out if held_out else 0
        return [{"split": "train", "index": i} for i in range(first, total)][:limit]

    def start(self, item: Item) -> VerifiersEpisode:
        return VerifiersEpisode(self, item)

    def _source_now(self) -> Source:
        if self._source is None:
            raise RuntimeError(f"verifiers:{self.name} is not open; call `open` first")
        return self._source

    def _check_size(self, source: Source) -> None:
        count = source.num_tasks("train")
        if count <= self.args.held_out:
            raise ConfigError(
                f"verifiers:{self.name} has {count} training tasks, {self.args.held_out} of them "
                "held out; expected at least one to train on"
            )


def has_tasksets() -> bool:
    """Whether the installed verifiers has the interface of 0.4."""
    return Version(importlib.metadata.version("verifiers")) >= Version("0.4.dev0")


def import_package(name: str, *, interface: str) -> Any:
    """Import the module of an environment, named as verifiers names it.

    Args:
        name: name of the package, such as `my-env`, also with its owner (`owner/my-env`).
        interface: what the installed verifiers expects, for the error message.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise ConfigError(f"verifiers:{name} needs the package {error.name!r}") from error
        hint = near_name(name, installed_environments())
        raise ConfigError(
            f"verifiers:{name}: there is no module {module!r}{hint or '; install its package'}; "
            f"expected {interface}"
        ) from error
    except Exception as error:  # the module is foreign code
        raise ConfigError(
            f"verifiers:{name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def installed_environments() -> list[str]:
    """Return the installed packages that depend on verifiers."""
    found = set()
    for distribution in importlib.metadata.distributions():
        needs = distribution.requires or ()
        if any(need.replace(" ", "").startswith("verifiers") for need in needs):
            found.add(distribution.metadata["Name"])
    return sorted(found)


@contextlib.contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore SIGINT and SIGTERM: environments of the 0.1 line replace their handlers."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


class TasksetSource(Source):
    """An environment of `verifiers.v1`: a taskset, and a harness that plays its tasks.

    A plain taskset is played by one `Agent` per rollout. A package with an environment class of
    its own is started once per rollout; one of its agents is the policy, and the others need a
    model of their own.
    """

    def __init__(self, name: str, args: VerifiersArgs) -> None:
        super().__init__(name, args)
        self._tasks: dict[str, list[Any]] = {}
        self._configs: dict[str, Any] = {}
        self._policy = ""
        self._is_plain = True
        self._shared: dict[str, Mapping[str, Any]] = {}
        self._stack = contextlib.AsyncExitStack()

    def load(self) -> None:
        self._check_interface()
        splits = {"train": self.args.env_args}
        if self.args.eval_args is not None:
            splits["eval"] = {**self.args.env_args, **self.args.eval_args}
        for split, env_args in splits.items():
            config = self._config(env_args)
            self._configs[split] = config
            self._policy = self._policy_of(config)
            self._check_placement(config)
            self._tasks[split] = self._read_tasks(config)

    def num_tasks(self, split: str) -> int:
        return len(self._tasks.get(split, ()))

    async def open(self) -> None:
        import verifiers.v1 as vf

        if not self._is_plain:
            return
        async with contextlib.AsyncExitStack() as opening:  # ends those of train if eval's fail
            for split, config in self._configs.items():
                env = vf.load_environment(config)
                self._shared[split] = await opening.enter_async_context(env.shared_tools())
            self._stack = opening.pop_all()

    async def close(self) -> None:
        await self._stack.aclose()

    async def play(self, split: str, index: int, endpoint: AgentEndpoint) -> EpisodeEnd:
        import verifiers.v1 as vf

        task, config = self._tasks[split][index], self._configs[split]
        sampling = vf.SamplingConfig(
            temperature=endpoint.temperature, max_tokens=endpoint.max_tokens
        )
        with key_in_environment(endpoint.api_key) as variable:
            client = vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)
            if self._is_plain:
                identity = {"model": endpoint.model, "client": client, "sampling": sampling}
                agent = self._agent(config, identity)
                trace = await agent.run(task, tools=self._shared[split])
            else:
                env = vf.load_environment(config)
                context = vf.ModelContext(model=endpoint.model, client=client, sampling=sampling)
                async with env.serving():
                    episode = await env.run_episode(task, context)
                trace = self._trace_of(episode)
        return end_of_trace(trace, f"verifiers:{self.name}")

    def _agent(self, config: Any, identity: Mapping[str, Any]) -> Any:
        import verifiers.v1 as vf

        seat = getattr(config, self._policy)
        harness = seat.harness or vf.default_agent_harness(config.taskset.id)
        agent = vf.Agent(seat.model_copy(update={"harness": harness, **identity}))
        if harness.id == "null" and seat.runtime.type == "subprocess":
            agent.harness = chat_harness_cls()(harness)
        return agent

    def _trace_of(self, episode: Any) -> Any:
        """Return the trace of the policy."""
        if not episode.ok and episode.errors:
            error = episode.errors[-1]
            raise EpisodeFailedError(f"verifiers:{self.name}: {error.type}: {error.message[:500]}")
        traces = episode.by_agent.get(self._policy, [])
        if len(traces) != 1:
            raise EpisodeFailedError(
                f"verifiers:{self.name} ran its agent {self._policy!r} {len(traces)} times in one "
                "rollout; expected once, since a rollout has one reward"
            )
        return traces[0]

    def _check_interface(self) -> None:
        from verifiers.v1.utils.loaders import taskset_class

        interface = "a package that exports a Taskset of verifiers.v1"
        namespaced = f"verifiers.v1.tasksets.{self.name.replace('-', '_')}"
        module = None
        if "." in self.name or importlib.util.find_spec(namespaced) is None:
            module = import_package(self.name, interface=interface)
        try:
            taskset_class(self.name)
        except Exception as error:  # foreign code, and three kinds of errors of the library
            if "load_environment" in vars(module or object):
                raise ConfigError(
                    f"verifiers:{self.name} is written for verifiers 0.1 (load_environment), and "
                    f"{importlib.metadata.version('verifiers')} is installed: "
                    "pip install 'verifiers<0.2' in a virtual environment of its own"
                ) from error
            raise ConfigError(f"verifiers:{self.name}: {error}") from error

    def _config(self, env_args: Mapping[str, Any]) -> Any:
        """Return the environment's configuration, with our defaults where nothing is set."""
        import verifiers.v1 as vf

        raw = dict(self.args.env_settings)
        taskset = {**dict(raw.get("taskset") or {}), **env_args, "id": self.name}
        try:
            config_cls = vf.env_config_type(self.name, raw.get("id") or "")
            self._is_plain = vf.environment_class(self.name, raw.get("id") or "") is (
                vf.SingleAgentEnv
            )
            for field, info in config_cls.model_fields.items():
                if isinstance(info.default, vf.AgentConfig):
                    raw[field] = self._seat(info.default, raw.get(field) or {})
            return vf.resolve_env_config({**raw, "taskset": taskset})
        except Exception as error:  # the library validates with errors of several kinds
            raise ConfigError(f"verifiers:{self.name}: {error}") from error

    def _seat(self, declared: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as vf

        seat = dict(given)
        if "runtime" not in seat and "runtime" not in declared.model_fields_set:
            seat["runtime"] = {"type": self.args.runtime}
        if self.args.harness is not None:
            seat.setdefault("harness", {"id": self.args.harness})
        elif declared.harness is None and vf.default_harness_id(self.name) == "bash":
            seat.setdefault("harness", {"id": "null"})
        if self.args.max_turns is not None:
            seat.setdefault("max_turns", self.args.max_turns)
        return seat

    def _policy_of(self, config: Any) -> str:
        import verifiers.v1 as vf

        seats = {name: seat for name, seat in config if isinstance(seat, vf.AgentConfig)}
        open_seats: list[str] = [name for name, seat in seats.items() if seat.client is None]
        if len(open_seats) != 1:
            raise ConfigError(
                f"verifiers:{self.name} has {len(open_seats)} agents without a model of their own "
                f"({', '.join(open_seats) or 'none'}); expected one, the policy: give the others a "
                "client and a model with env_settings"
            )
        return open_seats[0]

    def _check_placement(self, config: Any) -> None:
        """Refuse runtimes of a cloud, and harnesses that run the model's commands on the host."""
        import verifiers.v1 as vf

        taskset = vf.load_taskset(config.taskset)
        task_cls = type(taskset).task_type()
        seats = [seat for _, seat in config if isinstance(seat, vf.AgentConfig)]
        tools = [
            *type(taskset).toolsets(taskset.config),
            *task_cls.toolsets(taskset.config.task),
        ]
        runtimes = {seat.runtime.type for seat in seats}
        runtimes |= {tool.config.runtime.type for tool in tools if not tool.config.url}
        cloud = sorted(runtimes.intersection(CLOUD_RUNTIMES))
        if cloud and not self.args.allow_cloud:
            raise ConfigError(
                f"verifiers:{self.name} uses sandboxes of {cloud[0]}, a paid service; set "
                "allow_cloud=true to use it, or runtime=docker"
            )
        if "subprocess" not in {seat.runtime.type for seat in seats}:
            return
        for seat in seats:
            harness = vf.load_harness(seat.harness or vf.default_agent_harness(self.name))
            if harness.EXECUTES_CODE and seat.runtime.type == "subprocess":
                raise ConfigError(
                    f"verifiers:{self.name}: the harness {harness.config.id!r} runs commands of "
                    "the model on this machine; set runtime=docker, podman or apptainer"
                )
        if task_cls.NEEDS_CONTAINER:
            raise ConfigError(
                f"verifiers:{self.name}: its tasks need a container; set runtime=docker, podman "
                "or apptainer"
            )

    def _read_tasks(self, config: Any) -> list[Any]:
        import verifiers.v1 as vf

        try:
            tasks = list(itertools.islice(vf.load_taskset(config.taskset), self.args.max_tasks))
        except Exception as error:  # loading tasks is foreign code
            raise ConfigError(
                f"verifiers:{self.name}: its tasks cannot be loaded: {type(error).__name__}: "
                f"{error}"
            ) from error
        imaged = next((task for task in tasks if task.data.image is not None), None)
        if imaged is not None and getattr(config, self._policy).runtime.type == "subprocess":
            raise ConfigError(
                f"verifiers:{self.name}: its tasks need the image {imaged.data.image!r}; set "
                "runtime=docker, podman or apptainer"
            )
        return tasks


@contextlib.contextmanager
def key_in_environment(api_key: str) -> Iterator[str]:
    """Put a rollout's key where clients of verifiers 0.4 read it, and yield the variable's name.

    Its subprocesses do not inherit variables whose names contain `API_KEY`.
    """
    name = f"ATROPOS_{secrets.token_hex(8).upper()}_API_KEY"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]


@functools.cache
def chat_harness_cls() -> Any:
    """Return the library's `null` harness with its chat program run in this process.

    The library starts an interpreter per rollout, with packages that uv downloads; it depends on
    the same packages, so they are installed here.
    """
    from verifiers.v1.harnesses.null import NullHarness

    class LocalChatHarness(NullHarness):  # type: ignore[misc, unused-ignore]  # no types
        async def setup(self, runtime: Any) -> None:
            return

        async def launch(self, ctx: Any, trace: Any, runtime: Any, *rest: Any, **named: Any) -> Any:
            return await super().launch(ctx, trace, ThisProcess(runtime), *rest, **named)

    return LocalChatHarness


_words: contextvars.ContextVar[Sequence[str]] = contextvars.ContextVar("words", default=())


class WordsParser(argparse.ArgumentParser):
    """Reads the command line of the chat program of the calling task."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(list(_words.get()) if args is None else args, namespace)


@functools.cache
def chat_program(source: str) -> Any:
    """Return the library's chat program as a module that takes its arguments from `_words`."""
    program = types.ModuleType("chat_program")
    exec(compile(source, "chat_program.py", "exec"), vars(program))  # the installed library's own
    vars(program)["argparse"] = types.SimpleNamespace(
        ArgumentParser=WordsParser, Namespace=argparse.Namespace
    )
    return program


class ThisProcess:
    """A runtime of verifiers whose chat program runs in this process."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._source = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def prepare_uv_script(self, script: str, *_: Any, **__: Any) -> list[str]:
        self._source = script
        return []

    async def run_program(self, argv: Sequence[str], env: Mapping[str, str]) -> Any:
        import verifiers.v1 as vf

        flag = "--initial-messages-file="
        folder = Path(self._runtime.workdir)
        _words.set([f"{flag}{folder / w[len(flag) :]}" if w.startswith(flag) else w for w in argv])
        try:
            await chat_program(self._source).main()
        except SystemExit as error:
            return vf.ProgramResult(exit_code=int(error.code or 0), stdout="", stderr="")
        except Exception:  # noqa: BLE001 - verifiers reports what its program prints
            text = traceback.format_exc()
            return vf.ProgramResult(exit_code=1, stdout="", stderr=text)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def end_of_trace(trace: Any, where: str) -> EpisodeEnd:
    """Convert a finished trace of verifiers 0.4.

    Raises:
        EpisodeFailedError: the rollout failed.
        EpisodeRewardError: nothing was scored, or a reward is not finite.
    """
    from verifiers.v1.dialects.chat import message_to_wire

    if not trace.ok:
        error = trace.last_error
        text = "no error was recorded" if error is None else f"{error.type}: {error.message[:500]}"
        raise EpisodeFailedError(f"{where}: {text}")
    rewards = {
        name: finite_reward(reward.value, f"{where}: {name}")
        for name, reward in trace.rewards.items()
        if reward is not None
    }
    if not rewards:
        raise EpisodeRewardError(f"{where} gave no reward: its task has no reward function")
    metrics = {name: float(v) for name, v in trace.metrics.items() if v is not None}
    metrics["num_turns"] = float(trace.num_turns)
    if trace.stop_condition is not None:
        metrics[f"stop/{trace.stop_condition}"] = 1.0
    is_truncated = bool(trace.is_truncated or trace.is_timeout)
    metrics["truncated"] = float(is_truncated)
    return EpisodeEnd(
        rewards,
        metrics=metrics,
        messages=[message_to_wire(message) for message in trace.messages],
        is_truncated=is_truncated,
    )


_scoring_errors: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "scoring_errors", default=None
)


class RubricSource(Source):
    """An environment of verifiers 0.1: `load_environment`, its data sets, loop and rubric."""

    def __init__(self, name: str, args: VerifiersArgs) -> None:
        super().__init__(name, args)
        self._env: Any = None
        self._eval_env: Any = None
        self._rows: dict[str, Any] = {}

    def load(self) -> None:
        self._env = self._load(self.args.env_args)
        self._rows["train"] = self._env.get_dataset()
        if self.args.eval_args is not None:
            self._eval_env = self._load({**self.args.env_args, **self.args.eval_args})
            self._rows["eval"] = self._eval_env.get_dataset()
        elif self._env.eval_dataset is not None or getattr(self._env, "eval_dataset_source", None):
            self._rows["eval"] = self._env.get_eval_dataset()

    def num_tasks(self, split: str) -> int:
        return min(len(self._rows.get(split, ())), self.args.max_tasks)

    async def play(self, split: str, index: int, endpoint: AgentEndpoint) -> EpisodeEnd:
        env = self._eval_env if split == "eval" and self._eval_env is not None else self._env
        row = {"answer": "", "info": {}, **self._rows[split][index]}
        if not has_clients():
            row.setdefault("task", "default")
        sampling = {
            **env.sampling_args,
            "temperature": endpoint.temperature,
            "max_completion_tokens": endpoint.max_tokens,
        }
        errors: list[str] = []
        _scoring_errors.set(errors)
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url,
            api_key=endpoint.api_key,
            max_retries=0,
            timeout=None,
            http_client=make_http_client(endpoint.base_url),
        ) as client:
            state = await env.rollout(row, chat_client(client), endpoint.model, sampling)
            is_empty = type(state.get("error")).__name__ == "EmptyModelResponseError"
            if state.get("error") is not None and not is_empty:
                raise EpisodeFailedError(f"verifiers:{self.name}: {described(state['error'])}")
            await score(env.rubric, state)
        if errors and not is_empty:  # an empty answer is the policy's; functions may not expect it
            raise EpisodeFailedError(f"verifiers:{self.name}: {errors[0]}")
        return self._end(env, state)

    def _end(self, env: Any, state: Any) -> EpisodeEnd:
        where = f"verifiers:{self.name}"
        total = finite_reward(state.get("reward"), where)
        metrics = {name: float(v) for name, v in (state.get("metrics") or {}).items()}
        reward: Reward = total
        parts = {n: w * metrics[n] for n, w in weights_of(env.rubric) if w and n in metrics}
        if parts and abs(sum(parts.values()) - total) < 1e-9 * max(1.0, abs(total)):
            reward = parts
        metrics["num_turns"] = float(len(state.get("trajectory") or ()))
        if state.get("stop_condition"):
            metrics[f"stop/{state['stop_condition']}"] = 1.0
        is_truncated = bool(state.get("is_truncated") or state.get("timed_out"))
        metrics["truncated"] = float(is_truncated)
        chat = [*as_messages(state.get("prompt")), *as_messages(state.get("completion"))]
        return EpisodeEnd(reward, metrics=metrics, messages=chat, is_truncated=is_truncated)

    def _load(self, env_args: Mapping[str, Any]) -> Any:
        import verifiers

        interface = "a package with load_environment"
        module = import_package(self.name, interface=interface)
        if not callable(getattr(module, "load_environment", None)):
            raise ConfigError(
                f"verifiers:{self.name} has no load_environment, and verifiers "
                f"{verifiers.__version__} is installed; if it is written for verifiers.v1: "
                "pip install 'verifiers>=0.4,<0.5'"
            )
        loader = module.load_environment
        try:
            inspect.signature(loader).bind(**env_args)
        except TypeError as error:
            raise ConfigError(f"verifiers:{self.name}: env_args: {error}") from error
        try:
            env = verifiers.load_environment(module.__name__, **env_args)
        except Exception as error:  # loading is foreign code
            raise ConfigError(f"verifiers:{self.name} cannot be loaded: {error}") from error
        self._check_env(env)
        if self.args.max_turns is not None:
            env.max_turns = self.args.max_turns
        note_scoring_errors(env.rubric)
        return env

    def _check_env(self, env: Any) -> None:
        names = {cls.__name__ for cls in type(env).__mro__}
        cloud = sorted(names.intersection(CLOUD_CLASSES))
        if cloud and not self.args.allow_cloud:
            raise ConfigError(
                f"verifiers:{self.name} is a {cloud[0]}, which uses sandboxes of Prime Intellect, "
                "a paid service; set allow_cloud=true to use it"
            )
        if getattr(env, "requires_group_rollouts", False):
            raise ConfigError(
                f"verifiers:{self.name} scores the rollouts of a group together; only rewards of "
                "single rollouts are supported"
            )
        if env.dataset is None and not getattr(env, "dataset_source", None):
            raise ConfigError(f"verifiers:{self.name} has no training data set")


def has_clients() -> bool:
    """Whether the installed 0.1 version wraps OpenAI's client in one of its own."""
    return importlib.util.find_spec("verifiers.clients") is not None


def chat_client(client: openai.AsyncOpenAI) -> Any:
    """Return what environments of the installed 0.1 version take as their client."""
    if not has_clients():
        return client
    from verifiers.clients import OpenAIChatCompletionsClient

    return OpenAIChatCompletionsClient(client)


async def score(rubric: Any, state: Any) -> None:
    """Score a state; versions before 0.1.10 want a semaphore."""
    named = {}
    if "score_sem" in inspect.signature(rubric.score_rollout).parameters:
        named["score_sem"] = contextlib.AsyncExitStack()
    await rubric.score_rollout(state, **named)
    cleanup = getattr(rubric, "cleanup", None)
    if cleanup is not None:
        await cleanup(state)


def rubrics_of(rubric: Any) -> list[Any]:
    """Return a rubric, or the rubrics of a group of them."""
    inner = getattr(rubric, "rubrics", None)
    return [rubric] if inner is None else [leaf for r in inner for leaf in rubrics_of(r)]


def weights_of(rubric: Any) -> list[tuple[str, float]]:
    """Return the name and the weight of each reward function."""
    return [
        (function.__name__, float(weight))
        for leaf in rubrics_of(rubric)
        for function, weight in zip(functions_of(leaf), leaf.weights or (), strict=False)
    ]


def functions_of(rubric: Any) -> list[Any]:
    funcs: list[Any] = rubric.funcs if hasattr(rubric, "funcs") else rubric.reward_funcs
    return funcs


def note_scoring_errors(rubric: Any) -> None:
    """Let exceptions of reward functions fail the rollout; the library counts them as 0.

    Functions of weight 0 only measure, so theirs remain 0.
    """
    for leaf in rubrics_of(rubric):
        functions = functions_of(leaf)
        for index, weight in enumerate(leaf.weights or ()):
            if weight:
                functions[index] = noting_errors(functions[index])


def noting_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its exceptions noted for the rollout that it scores."""

    @functools.wraps(function)
    async def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            noted = _scoring_errors.get()
            if noted is not None:
                noted.append(f"{noting.__name__} raised {described(error)}")
            raise

    return noting


def described(error: Any) -> str:
    """Return an exception and its causes in one line."""
    texts: list[str] = []
    while error is not None and len(texts) < 4:
        texts.append(f"{type(error).__name__}: {error}"[:300])
        error = getattr(error, "__cause__", None)
    return "; caused by ".join(texts)


def as_messages(chat: Any) -> list[dict[str, Any]]:
    """Return the messages of a prompt or completion of verifiers 0.1 in OpenAI's form."""
    if chat is None:
        return []
    if isinstance(chat, str):
        return [{"role": "user", "content": chat}]
    plain = [m if isinstance(m, dict) else m.model_dump(exclude_none=True) for m in chat]
    return [as_openai_message(message) for message in plain]


def as_openai_message(message: dict[str, Any]) -> dict[str, Any]:
    named = {**message, "role": "user" if message["role"] == "text" else message["role"]}
    if named.get("tool_calls"):
        named["tool_calls"] = [
            call
            if "function" in call
            else {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in named["tool_calls"]
        ]
    return named
