"""Construct an environment with the arguments that it accepts, and run it in the foreground."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, TypeVar

from atroposlib.envs.server_handling.config import (
    APIServerConfig,
    ServerConfigs,
    ServerManagerConfig,
)
from atroposlib.envs.settings import Settings
from atroposlib.errors import ConfigError

__all__ = [
    "build_environment",
    "favour_event_loop",
    "file_of",
    "missing_methods",
    "outside_event_loop",
    "run_foreground",
]

logger = logging.getLogger(__name__)

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_MARKS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def build_environment(
    env_cls: type[Any], settings: Settings, extra: Mapping[str, Any] | None = None
) -> Any:
    """Construct an environment from the settings of a run.

    A single server config is passed as a list. Entries of `extra` that are attributes of the class
    are set on the instance before its constructor runs. Constructors that have another name for
    `slurm`, such as `slurm_job_id`, get it under that name, and those without named parameters get
    the four arguments by position. Other arguments are omitted, with a warning if they are set.

    Args:
        env_cls: The environment's class.
        settings: Effective settings of the run.
        extra: Additional settings, by the name of an attribute or a constructor argument.

    Raises:
        ConfigError: the class lacks abstract methods, or its constructor does not call ours.
    """
    missing = missing_methods(env_cls)
    if missing:
        lines = " and ".join(f"`{line}`" for line in missing.values())
        raise ConfigError(
            f"{env_cls.__name__} in {file_of(env_cls)} is not complete: write {lines}"
        )
    standard = {
        "config": settings.env,
        "server_configs": _without_bare_server(settings.servers),
        "slurm": settings.manager.slurm,
        "testing": settings.manager.testing,
    }
    parameters = inspect.signature(env_cls).parameters
    extra = extra or {}
    attributes = {name: value for name, value in extra.items() if hasattr(env_cls, name)}
    others = {name: extra[name] for name in extra if name not in attributes or name in parameters}
    env: Any = env_cls.__new__(env_cls)  # type: ignore[call-overload]  # the class is Any
    vars(env).update(attributes)
    if _takes_positions_only(parameters):
        env.__init__(*standard.values())
    else:
        env.__init__(**accepted_arguments(parameters, standard, others))
    if hasattr(env_cls, "env_manager") and not hasattr(env, "server"):
        raise ConfigError(
            f"{env_cls.__name__}.__init__ in {file_of(env_cls)} does not call "
            "super().__init__(config, server_configs, slurm, testing)"
        )
    _configure_manager(env, settings.manager, settings.manager_given)
    return env


def missing_methods(env_cls: type[Any]) -> dict[str, str]:
    """Return the abstract methods that a class does not implement, with their first lines.

    Example:
        missing_methods(BaseEnv)["get_next_item"] == "async def get_next_item(self)"
    """
    # Only classes that can have abstract methods have the attribute.
    names: frozenset[str] = getattr(env_cls, "__abstractmethods__", frozenset())
    return {name: _first_line(name, getattr(env_cls, name)) for name in sorted(names)}


def _first_line(name: str, method: Any) -> str:
    if not inspect.isfunction(method):
        return name
    parameters = inspect.signature(method).parameters.values()
    names = ", ".join(
        f"{_MARKS.get(parameter.kind, '')}{parameter.name}" for parameter in parameters
    )
    word = "async def" if inspect.iscoroutinefunction(method) else "def"
    return f"{word} {name}({names})"


def file_of(env_cls: type[Any]) -> str:
    """Return the file that defines a class, or the name of its module."""
    try:
        return inspect.getfile(env_cls)
    except (TypeError, OSError):
        return env_cls.__module__


def accepted_arguments(
    parameters: Mapping[str, inspect.Parameter],
    standard: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Match arguments to the parameters of a constructor.

    A standard argument is passed under its name if the constructor has it. Otherwise it is passed
    as the parameter at its position, if that is required or starts with the name, or in `**kwargs`.

    Args:
        parameters: Parameters of the constructor, without `self`.
        standard: The four arguments of every environment, in order.
        extra: Arguments of some constructors only.
    """
    named = [name for name, parameter in parameters.items() if parameter.kind in _NAMED]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted: dict[str, Any] = {}
    for position, (name, value) in enumerate(standard.items()):
        in_place = named[position] if position < len(named) else None
        if name in named:
            accepted[name] = value
        elif in_place and in_place not in standard and _stands_for(parameters[in_place], name):
            accepted[in_place] = value
        elif takes_any:
            accepted[name] = value
        elif value:
            logger.warning("the constructor has no place for %s=%r", name, value)
    accepted.update({key: value for key, value in extra.items() if takes_any or key in named})
    return accepted


def _takes_positions_only(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether a constructor takes positional arguments only, such as `(self, *args)`."""
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return False
    return not kinds.isdisjoint(
        {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}
    )


def _stands_for(parameter: inspect.Parameter, name: str) -> bool:
    required = parameter.default is inspect.Parameter.empty
    return required or parameter.name.startswith(name)


def _without_bare_server(servers: ServerConfigs) -> Any:
    # Without a list, it would mean server discovery.
    return [servers] if isinstance(servers, APIServerConfig) else servers


def _configure_manager(env: Any, manager: ServerManagerConfig, given: frozenset[str]) -> None:
    if "max_n_completions" in given:
        env.server.max_n_completions = manager.max_n_completions
    if "proxy_url" in given:
        env.server.proxy_url = manager.proxy_url
        env.server.use_proxy = bool(manager.proxy_url)


Result = TypeVar("Result")

BLOCKED_S = 1.0
"""Seconds without an answer to a signal after which the next one interrupts a blocking call."""

SWITCH_INTERVAL_S = 0.0005
"""Switch interval of threads; Python's default is 5 ms."""

COLLECTIONS_BEFORE_FULL = 1_000
"""Garbage collections of younger objects per full one; Python's default is 10."""


def favour_event_loop() -> None:
    """Shorten interruptions of the event loop of this process.

    Threads that check and encode groups release the interpreter sooner. Garbage collection skips
    the objects that exist now: traversing all modules takes 0.1 s. Full collections are rare: those
    of a thousand rollouts take tens of milliseconds and free almost nothing.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    youngest, younger, _ = gc.get_threshold()
    gc.set_threshold(youngest, younger, COLLECTIONS_BEFORE_FULL)


def outside_event_loop(function: Callable[[], Result]) -> Result:
    """Call `function`, in a thread if this one runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_inside = False
    else:
        is_inside = True
    if not is_inside:  # not in `except`, which would become the context of the run's errors
        return function()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="environment") as pool:
        return pool.submit(function).result()


def run_foreground(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main()` in a new event loop until it ends or a signal stops it.

    The first SIGINT or SIGTERM cancels the coroutine, so that it can release its resources. A
    second SIGINT interrupts that; a second SIGTERM does not. If a call of the environment blocks
    the event loop, a second signal interrupts that call; the log names its line.

    Raises:
        SystemExit: after a signal, with code 128 + signal number.
    """
    received: list[int] = []
    favour_event_loop()
    try:
        asyncio.run(_until_signalled(main, received))
    except (asyncio.CancelledError, KeyboardInterrupt):
        if not received:
            raise
    except Exception:
        if not received:
            raise
        logger.exception("closing after signal %d failed", received[0])
    if received:
        raise SystemExit(128 + received[0])


async def _until_signalled(
    main: Callable[[], Coroutine[Any, Any, None]], received: list[int]
) -> None:
    task = asyncio.current_task()
    loop = asyncio.get_running_loop()
    waiting_since: list[float] = []

    def stop(signum: int) -> None:
        if task is not None and (not received or signum == signal.SIGINT):
            task.cancel()
        received.append(signum)
        waiting_since.clear()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        # Not `loop.add_signal_handler`, which does nothing while a call blocks the loop.
        now = time.monotonic()
        if waiting_since and now - waiting_since[0] > BLOCKED_S and frame is not None:
            waiting_since.clear()
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"
            logger.error("%s blocks the event loop; it is interrupted", place)
            received.append(signum)
            raise KeyboardInterrupt
        waiting_since.append(now)
        loop.call_soon_threadsafe(stop, signum)

    if threading.current_thread() is not threading.main_thread():
        return await main()
    earlier = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        await main()
    except KeyboardInterrupt:  # from another task, which has ended the loop with it already
        raise asyncio.CancelledError from None
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
