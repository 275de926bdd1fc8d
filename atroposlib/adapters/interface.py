"""The interface between environments of other libraries and ours.

An `Adapter` stands for one task set of another library: a verifiers package, a server that speaks
the OpenEnv protocol, a Gymnasium environment. It yields items, and starts an episode for each
rollout of an item. There are two kinds of episodes:

    Episode        we ask for every turn      begin ─► messages ─► turn ─► reply ─► Reply ─► …
    AgentEpisode   the other library's own    run(endpoint) ─► requests to our agent proxy ─► end
                   loop asks the model

Both end with a reward, named parts of it and metrics. `AdapterEnv` plays them with exact tokens.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import queue
import random
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import BuiltinMethodType, MappingProxyType, MethodType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from atroposlib.agent_tasks.trace import AgentTrace
from atroposlib.envs.conversation import ChatMessage, Reply, Turn
from atroposlib.envs.reporting import Reward
from atroposlib.envs.server_handling.proxy import AgentTurn
from atroposlib.errors import EpisodeFailedError, EpisodeRewardError, EpisodeTimeoutError
from atroposlib.utils.aio import ends_within
from atroposlib.utils.json_text import single_number

__all__ = [
    "Adapter",
    "AdapterArgs",
    "AgentEndpoint",
    "AgentEpisode",
    "Episode",
    "EpisodeEnd",
    "EpisodeLoop",
    "EpisodeThread",
    "EpisodeThreads",
    "ThreadRandom",
    "finite_reward",
    "separate_random",
    "shown_error",
]

Item = dict[str, Any]
"""One task, as JSON; shared by the rollouts of its group and stored in the backlog."""

Result = TypeVar("Result")

LOOP_CLOSE_S = 10.0
"""Time that cancelled coroutines of a library have to release what they hold."""


class AdapterArgs(BaseModel):
    """Arguments of an adapter, from `--args`; each adapter defines its own fields."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class Episode(ABC):
    """One rollout of an environment that is asked turn by turn.

    An exception of any method fails the rollout, not its siblings.

    Attributes:
        metrics: measurements of the rollout other than its reward; read after `close`.
        unfinished_reward: added to the last turn if a limit ends the episode.
    """

    unfinished_reward: Reward = 0.0

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @abstractmethod
    async def begin(self) -> Sequence[ChatMessage]:
        """Start the episode and return the first messages for the policy; called once."""

    @abstractmethod
    async def reply(self, turn: Turn) -> Reply:
        """Answer a turn of the policy; not called for one that a limit truncated."""

    async def truncated(self) -> Reward:
        """Return the reward of an episode that a limit ended; called once, before `close`.

        Override it if the other library can score unfinished episodes.
        """
        return self.unfinished_reward

    async def close(self) -> None:
        """Release the session; called once, also after a failed `begin`."""
        return


@dataclass(frozen=True)
class AgentEndpoint:
    """Where the model of an `AgentEpisode` answers, and with which settings."""

    base_url: str
    """Base URL for OpenAI clients; ends in `/v1`."""
    api_key: str = field(repr=False)
    """Key of this rollout; identifies its session."""
    model: str
    max_tokens: int
    """Limit of one completion."""
    temperature: float
    turns: Callable[[], Sequence[AgentTurn]] = field(default=tuple, repr=False)
    """Returns the turns so far; empty unless the episode sets `records_turns`."""


@dataclass(frozen=True)
class EpisodeEnd:
    """The result of an `AgentEpisode`."""

    reward: Reward
    """A number, or named parts to be summed with the setting `reward_weights`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements other than the reward."""
    messages: Sequence[ChatMessage] = ()
    """The chat, for the pages that show rollouts."""
    is_truncated: bool = False
    """Whether a limit of the other library ended the episode."""
    trace: AgentTrace | None = None
    """The record of the rollout, which goes with its group."""


class AgentEpisode(ABC):
    """One rollout of an environment with a loop of its own, which asks the model through a client.

    Attributes:
        tool_parser: format of the model's tool calls, a name of `tool_formats`.
        records_turns: Whether the endpoint has `turns`, and each row of the rollout its own chat.
        fixes_sampling: Whether the temperature and the limit of a completion are those of the
            environment, whatever the agent asks for.
    """

    tool_parser: str = "hermes"
    records_turns: bool = False
    fixes_sampling: bool = False

    @abstractmethod
    async def run(self, endpoint: AgentEndpoint) -> EpisodeEnd:
        """Run the whole episode; its tokens are those that the endpoint sampled meanwhile."""

    async def close(self) -> None:
        """Release resources; called once however the rollout ends."""
        return


class Adapter(ABC):
    """One task set of another library.

    The constructor is cheap and touches neither network nor disk; `open` does.

    Args:
        name: name of the task set, the part of `KIND:NAME` after the colon.
        args: validated arguments, an `args_cls`.
        seed: seed of the choice and order of items.
        step_timeout_s: time limit of one request to the other side. `AdapterEnv` also cancels
            `begin` and `reply` after this time, so adapters without requests may ignore it.

    Attributes:
        args_cls: model of the arguments.
        default_settings: settings of `AdapterEnv` that suit this kind of task, such as `max_turns`.
        max_concurrent: number of episodes that the other side can run at the same time; None
            sets no limit.
        begin_timeout_s: time limit of `begin`, for adapters whose episodes wait there for their
            turn to start a process; None: `step_timeout_s`.
        limits_replies: Whether each part of a reply has a time limit of the adapter's own, such as
            one call of a tool, so that `step_timeout_s` does not apply to the whole of it.
    """

    args_cls: ClassVar[type[AdapterArgs]] = AdapterArgs
    default_settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    max_concurrent: int | None = None
    begin_timeout_s: float | None = None
    limits_replies: bool = False

    def __init__(self, name: str, args: Any, *, seed: int, step_timeout_s: float = 60.0) -> None:
        self.name = name
        self.args = args
        self.seed = seed
        self.step_timeout_s = step_timeout_s

    async def open(self) -> None:
        """Load the task set, or connect to its server; called once, before everything else.

        Raises:
            ConfigError: the name is unknown, or a protocol version does not fit.
            EpisodeConnectionError: the server cannot be reached.
        """
        return

    async def close(self) -> None:
        """Release what `open` holds; called once, after the last episode has been closed."""
        return

    @abstractmethod
    async def item(self, index: int) -> Item:
        """Return training item `index`; called with 0, 1, 2, ... in this order.

        After a restart the first index is the one after the last. A finite task set starts again
        after its last item. The item holds what `start` needs, including the seed of the episode.
        """

    async def eval_items(self, limit: int) -> Sequence[Item]:
        """Return at most `limit` items for evaluations, not trained on if possible."""
        return ()

    @abstractmethod
    def start(self, item: Item) -> Episode | AgentEpisode:
        """Return a new episode of an item; it connects in `begin` or `run`, not here."""

    def gold_answer(self, item: Item) -> str | Sequence[str] | None:
        """Return the answer of a perfect model, one per turn as a list; None if it is unknown."""
        return None

    def note_rewards(self, item: Item, rewards: Sequence[float]) -> None:
        """Note the [G] total rewards of a finished group; curricula use them."""
        return

    def metrics(self) -> dict[str, float]:
        """Return measurements of the task set since the last call, such as its difficulty."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs in addition to the index of the next item, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`; called after `open`."""
        return


def finite_reward(value: Any, where: str) -> float:
    """Return a reward of another library as a float.

    Args:
        value: the reward; numbers of NumPy, and arrays and tensors of one element, are numbers.
        where: start of the error message, such as `FrozenLake-v1`.

    Raises:
        EpisodeRewardError: it is missing, not a number, or not finite.
    """
    if value is None:
        raise EpisodeRewardError(f"{where} gave no reward; expected a finite number")
    try:
        number = float(single_number(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise EpisodeRewardError(
            f"{where} gave the reward {value!r:.100}; expected a finite number"
        ) from error
    if not math.isfinite(number):
        raise EpisodeRewardError(f"{where} gave the reward {number}; expected a finite number")
    return number


def shown_error(error: BaseException | None) -> str:
    """Return an exception of another library for a message; that of a file names the file."""
    return (f"{type(error).__name__}: {error}" if isinstance(error, OSError) else repr(error))[:500]


class EpisodeThreads:
    """Threads for episodes of a synchronous library.

    All calls of an episode run in the same thread, since such libraries may hold handles of their
    thread. A cancelled call is abandoned together with its thread, which does not keep the process
    alive. The number of abandoned threads is limited: a library whose calls never return would
    otherwise fill memory and cores without notice.

    Args:
        where: start of error messages, such as `FrozenLake-v1`.
        max_abandoned: number of threads that may hang at the same time.

    Attributes:
        num_abandoned: threads whose last call has not returned.
    """

    def __init__(self, where: str, *, max_abandoned: int = 64) -> None:
        self.where = where
        self.max_abandoned = max_abandoned
        self.num_abandoned = 0
        self._lock = threading.Lock()
        self._alone = threading.Lock()

    def open(self) -> EpisodeThread:
        """Return a thread for one episode.

        Raises:
            EpisodeFailedError: too many calls have not returned.
        """
        if self.num_abandoned >= self.max_abandoned:
            raise EpisodeFailedError(
                f"{self.where}: {self.num_abandoned} calls have not returned; no more are made"
            )
        return EpisodeThread(self)

    @contextlib.contextmanager
    def alone(self, timeout_s: float) -> Iterator[None]:
        """Keep other threads out of a call that uses variables of the whole library.

        Args:
            timeout_s: time to wait for the thread inside, which is then given up.

        Raises:
            EpisodeTimeoutError: the thread inside has not returned.
        """
        lock = self._alone
        if not lock.acquire(timeout=timeout_s):
            with self._lock:
                if self._alone is lock:  # else another thread has given it up
                    self._alone = threading.Lock()  # the one inside may never return
            raise EpisodeTimeoutError(
                f"{self.where}: the call of another episode has not returned within {timeout_s:g} s"
            )
        try:
            yield
        finally:
            lock.release()

    def count_abandoned(self, change: int) -> None:
        with self._lock:
            self.num_abandoned += change


class EpisodeThread:
    """A thread for the calls of one episode; made by `EpisodeThreads.open`."""

    def __init__(self, owner: EpisodeThreads) -> None:
        self._owner = owner
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_abandoned = False

    async def call(self, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Run a function in the thread and return its result; cancelling abandons the thread.

        Raises:
            EpisodeTimeoutError: an earlier call was cancelled.
            Exception: an exception of the function.
        """
        if self._is_abandoned:
            raise EpisodeTimeoutError(f"{self._owner.where}: an earlier call has not returned")
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()
        self._put(lambda: _run_into(future, function, args, kwargs))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not self._is_abandoned:
                self._is_abandoned = True
                self._owner.count_abandoned(1)
            raise

    async def close(self, cleanup: Callable[[], Any] | None = None) -> None:
        """Run `cleanup` and end the thread; if a call was abandoned, once that call returns."""
        try:
            if cleanup is not None and self._is_abandoned:
                self._put(lambda: _run_into(concurrent.futures.Future(), cleanup, (), {}))
            elif cleanup is not None:
                await self.call(cleanup)
        finally:
            if self._thread is not None:
                self._calls.put(None)

    def _put(self, call: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="episode", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
        if self._is_abandoned:
            self._owner.count_abandoned(-1)  # the call has returned after all


class EpisodeLoop:
    """An event loop in a thread of its own, for a library whose coroutines may block their loop.

    Episodes of all rollouts run in it, so that a scoring function that never returns does not
    block the service. It is noticed when a call is cancelled: if the loop does not react within
    `reaction_s`, its thread is abandoned, the other calls fail, and the next call opens a new loop.
    The abandoned loop ends once it reacts.

    Args:
        where: start of error messages, such as `verifiers:wordle`.
        reaction_s: seconds after which a loop that does not react is abandoned.
        max_abandoned: number of loops that may hang at the same time.
    """

    def __init__(self, where: str, *, reaction_s: float = 2.0, max_abandoned: int = 16) -> None:
        self.where = where
        self.reaction_s = reaction_s
        self.max_abandoned = max_abandoned
        self._num_opened = 0
        self._num_abandoned = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lost: asyncio.Event | None = None

    @property
    def generation(self) -> int:
        """The number of the loop that the next call runs in; objects of an earlier one are lost."""
        return self._num_opened + (self._loop is None)

    async def call(
        self, function: Callable[..., Coroutine[Any, Any, Result]], *args: Any, **kwargs: Any
    ) -> Result:
        """Run a coroutine function in the loop and return its result; cancelling cancels it.

        Raises:
            EpisodeTimeoutError: another call has blocked the loop.
            Exception: an exception of the function.
        """
        loop, lost = self._opened()
        running = asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(function(*args, **kwargs), loop)
        )
        is_lost = asyncio.ensure_future(lost.wait())
        try:
            waited: set[asyncio.Future[Any]] = {running, is_lost}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise EpisodeTimeoutError(f"{self.where}: another rollout blocked the library")
            return running.result()
        except asyncio.CancelledError:
            running.cancel()
            if not lost.is_set():
                await self._check(loop)
            raise
        finally:
            is_lost.cancel()

    async def close(self) -> None:
        """Cancel what is running and end the thread."""
        loop, self._loop = self._loop, None
        if loop is not None:
            ended = asyncio.run_coroutine_threadsafe(_cancel_others(), loop)
            await asyncio.wait({asyncio.wrap_future(ended)}, timeout=LOOP_CLOSE_S)
            loop.call_soon_threadsafe(loop.stop)

    def _opened(self) -> tuple[asyncio.AbstractEventLoop, asyncio.Event]:
        if self._loop is None or self._lost is None:
            if self._num_abandoned >= self.max_abandoned:
                raise EpisodeFailedError(
                    f"{self.where}: {self._num_abandoned} calls block the library; no more are made"
                )
            self._num_opened += 1
            self._loop, self._lost = asyncio.new_event_loop(), asyncio.Event()
            threading.Thread(
                target=self._work, args=(self._loop,), name="episodes", daemon=True
            ).start()
        return self._loop, self._lost

    async def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Abandon the loop if it does not react."""
        reaction = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
        is_healthy = await ends_within(reaction, self.reaction_s)
        if not is_healthy and self._loop is loop and self._lost is not None:
            self._lost.set()
            self._loop = self._lost = None
            self._num_abandoned += 1
            reaction.add_done_callback(lambda _: self._end_abandoned(loop))

    def _end_abandoned(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_abandoned -= 1
        ended = asyncio.run_coroutine_threadsafe(_cancel_others(), loop)
        ended.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))

    @staticmethod
    def _work(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _run_into(
    future: concurrent.futures.Future[Any],
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        # A coroutine cannot raise the first; the others would end the program of the rollout.
        text = f"{type(error).__name__}: {error}"
        future.set_exception(EpisodeFailedError(f"a call raised {text}"))
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        future.set_exception(error)
    else:
        future.set_result(result)


class ThreadRandom:
    """Stands for the module `random` in a library; each thread has a generator of its own.

    A library that uses the functions of `random` shares one generator between all its episodes, so
    that a seed determines nothing once several run at the same time.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        own: Any = vars(self._local).setdefault("generator", random.Random())
        return getattr(own, name) if name in _FUNCTIONS_OF_RANDOM else getattr(random, name)


class _ThreadNumpyRandom:
    """The same for `numpy.random`."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        import numpy

        own: Any = vars(self._local).setdefault("generator", numpy.random.RandomState())
        of_module = getattr(numpy.random, name)
        # Functions of the module are methods of its global generator.
        is_global = isinstance(getattr(of_module, "__self__", None), numpy.random.RandomState)
        return getattr(own, name) if is_global or name == "seed" else of_module


class _NumpyWithThreadRandom:
    """Stands for the module `numpy` in a library."""

    random = _ThreadNumpyRandom()

    def __getattr__(self, name: str) -> Any:
        import numpy

        return getattr(numpy, name)


_FUNCTIONS_OF_RANDOM = frozenset(
    name for name, value in vars(random).items() if hasattr(value, "__self__")
)
_THREAD_RANDOM = ThreadRandom()
_NUMPY = _NumpyWithThreadRandom()


def separate_random(package: str) -> ThreadRandom:
    """Give each thread a generator of its own in the loaded modules of a package.

    Call it again after a module was imported. Code outside the package keeps the global generator.

    Args:
        package: name of the package, such as `textarena`.

    Returns:
        The stand-in for `random`; its `seed` seeds the generator of the calling thread.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name != package and not module_name.startswith(f"{package}."):
            continue
        for name, value in list(vars(module).items()):
            if value is random:
                setattr(module, name, _THREAD_RANDOM)
            elif value is sys.modules.get("numpy"):
                setattr(module, name, _NUMPY)
            elif _is_of_global_generator(value):
                setattr(module, name, _late_function(value.__name__))
    return _THREAD_RANDOM


def _is_of_global_generator(value: Any) -> bool:
    # By its type first: objects that load data when they are asked for an attribute are left alone.
    is_method = type(value) in (MethodType, BuiltinMethodType)
    return is_method and value.__self__ is random.seed.__self__  # type: ignore[attr-defined]


def _late_function(name: str) -> Callable[..., Any]:
    """Return the function of the calling thread's generator, looked up with each call."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return getattr(_THREAD_RANDOM, name)(*args, **kwargs)

    return function
