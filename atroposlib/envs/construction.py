"""Call an environment's constructor with the arguments it accepts."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from atroposlib.envs.config_layers import Settings
from atroposlib.envs.server_handling.config import APIServerConfig, ServerManagerConfig
from atroposlib.envs.server_handling.resolve import ServerConfigs
from atroposlib.errors import ConfigError

__all__ = ["build_environment", "missing_methods"]

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

    One bare server config goes in as a list of one. What of `extra` the class has an attribute for
    is set on the instance before its constructor runs, so that constructors need not pass it on.
    Constructors that name `slurm` otherwise, such
    as `slurm_job_id`, get it under their own name, and those that take no names at all get the four
    by position; what a constructor has no place for is left out, with a warning when somebody asked
    for it.

    Args:
        env_cls: The environment's class.
        settings: Effective settings of the run.
        extra: Further settings, by the name of the attribute or of the constructor's argument.

    Raises:
        ConfigError: the class lacks methods that its author must write.
    """
    missing = missing_methods(env_cls)
    if missing:
        lines = " and ".join(f"`{line}`" for line in missing.values())
        raise ConfigError(
            f"{env_cls.__name__} in {_file_of(env_cls)} is not complete: write {lines}"
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
    env: Any = env_cls.__new__(env_cls)  # type: ignore[call-overload]  # its class is only Any
    vars(env).update(attributes)
    if _takes_positions_only(parameters):
        env.__init__(*standard.values())
    else:
        env.__init__(**accepted_arguments(parameters, standard, others))
    _configure_manager(env, settings.manager, settings.manager_given)
    return env


def missing_methods(env_cls: type[Any]) -> dict[str, str]:
    """Return the abstract methods a class leaves open, each with the line it begins with.

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


def _file_of(env_cls: type[Any]) -> str:
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

    A standard argument is passed under its name when the constructor knows it. Otherwise it takes
    the parameter in its place, if that one is required or resembles it by name; otherwise it goes
    into `**kwargs`, if there is one.

    Args:
        parameters: Of the constructor, without `self`.
        standard: The four arguments every environment has, in their order.
        extra: Arguments only some constructors have.
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
    """Whether a constructor hands on what it gets by position, as `(self, *args)`."""
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
    """A bare server means that one server; left bare it would read as a request for discovery."""
    return [servers] if isinstance(servers, APIServerConfig) else servers


def _configure_manager(env: Any, manager: ServerManagerConfig, given: frozenset[str]) -> None:
    """Hand on what constructors have no argument for, and only if somebody asked for it."""
    if "max_n_completions" in given:
        env.server.max_n_completions = manager.max_n_completions
    if "proxy_url" in given:
        env.server.proxy_url = manager.proxy_url
        env.server.use_proxy = bool(manager.proxy_url)
