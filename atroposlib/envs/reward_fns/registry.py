"""Reward functions by name.

    name or {"type": name, "params": {...}} -> class or function -> RewardFunction

Each entry answers to its short name, to the same with `_reward`, and to the same without
underscores. Those of this package are registered when the package is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar, overload

from atroposlib.envs.reward_fns.legacy_function import LegacyFunctionWrapper
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.envs.reward_fns.reward_names import (
    class_stem,
    name_stem,
    registered_names,
    required_names,
)
from atroposlib.errors import ConfigError, UnknownRewardError
from atroposlib.utils.text import near_name

__all__ = ["LegacyFunctionWrapper", "RewardRegistry", "registry"]

logger = logging.getLogger(__name__)

PACKAGE = __name__.rpartition(".")[0]

RewardClass = TypeVar("RewardClass", bound=type[RewardFunction])
RewardCallable = TypeVar("RewardCallable", bound=Callable[..., Any])


class RewardRegistry:
    """Finds reward functions by name and builds them from configurations."""

    def __init__(self) -> None:
        self._entries: dict[str, Callable[..., Any]] = {}

    @overload
    def register(self, cls: RewardClass, name: str | None = None) -> RewardClass: ...

    @overload
    def register(
        self, cls: None = None, name: str | None = None
    ) -> Callable[[RewardClass], RewardClass]: ...

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Register a class; a call, or a decorator with or without arguments.

        Args:
            cls: a subclass of `RewardFunction`.
            name: what it is called; None takes the words of the class name, without `Reward`.

        Raises:
            TypeError: `cls` is not a subclass of `RewardFunction`.
        """
        if cls is None:
            return lambda decorated: self.register(decorated, name)
        if not (isinstance(cls, type) and issubclass(cls, RewardFunction)):
            raise TypeError(
                f"{cls!r} is not a subclass of RewardFunction; functions go to register_function"
            )
        self._add(name or class_stem(cls.__name__), cls)
        return cls

    @overload
    def register_function(self, name: str, function: RewardCallable) -> RewardCallable: ...

    @overload
    def register_function(
        self, name: str, function: None = None
    ) -> Callable[[RewardCallable], RewardCallable]: ...

    def register_function(self, name: str, function: Any = None) -> Any:
        """Register a function `(completions, **kwargs)`; a call, or a decorator with the name."""
        if function is None:
            return lambda decorated: self.register_function(name, decorated)
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called; expected a function of completions")
        self._add(name, function)
        return function

    def get(self, name: str) -> Callable[..., Any]:
        """Return the class or function of that name.

        A name that is not registered is looked for in a module of this package called `name`,
        `name_reward` or as given.

        Raises:
            UnknownRewardError: there is none; the message names the nearest.
        """
        return self._lookup(name) or self._load(name)

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        """Build the reward function that a configuration describes.

        Args:
            name_or_config: a name, or a mapping with the name under `type`. Its other keys are
                parameters; those under `params` win over them.
            **kwargs: parameters; those of the configuration win.

        Raises:
            ConfigError: the configuration has no `type`, or `params` is not a mapping.
            UnknownRewardError: there is no reward function of that name.
        """
        name, parameters = _split_config(name_or_config)
        entry = self.get(name)
        parameters = {**kwargs, **parameters}
        if isinstance(entry, type) and issubclass(entry, RewardFunction):
            return entry(**parameters)
        return LegacyFunctionWrapper(entry, **parameters)

    def list_registered(self) -> list[str]:
        """Return every name that `get` knows, in alphabetical order."""
        return sorted(self._entries)

    def load_required_functions(self, config: Any) -> set[str]:
        """Look up every reward function a configuration names; return the names.

        Where they may stand is described at `required_names`.
        """
        names = required_names(config)
        for name in sorted(names):
            self.get(name)
        return names

    def _add(self, name: str, entry: Callable[..., Any]) -> None:
        for each in registered_names(name):
            known = self._entries.get(each, entry)
            if known is not entry:
                logger.warning("reward function %s: %r replaces %r", each, entry, known)
            self._entries[each] = entry

    def _lookup(self, name: str) -> Callable[..., Any] | None:
        return self._entries.get(name) or self._entries.get(name_stem(name))

    def _load(self, name: str) -> Callable[..., Any]:
        stem = name_stem(name)
        for module_name in dict.fromkeys((stem, f"{stem}_reward", name)):
            module = _package_module(module_name)
            if module is None:
                continue
            entry = self._lookup(name) or _entry_of(module, stem)
            if entry is not None:
                self._add(name, entry)
                return entry
        hint = near_name(name, self._entries) or f"; known are {', '.join(self._entries)}"
        raise UnknownRewardError(f"no reward function is called {name!r}{hint}")


def _split_config(config: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(config, str):
        return config, {}
    parameters = dict(config)
    name = parameters.pop("type", None)
    if not isinstance(name, str):
        raise ConfigError(f"a reward configuration needs its name under 'type'; got {config!r}")
    nested = parameters.pop("params", None) or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"'params' of reward {name!r} is {nested!r}; expected a mapping")
    return name, {**parameters, **nested}


def _package_module(name: str) -> ModuleType | None:
    path = f"{PACKAGE}.{name}"
    if not name.isidentifier() or importlib.util.find_spec(path) is None:
        return None
    try:
        return importlib.import_module(path)
    except Exception as error:
        raise UnknownRewardError(f"{path} cannot be imported: {error}") from error


def _entry_of(module: ModuleType, stem: str) -> Callable[..., Any] | None:
    """Return the unregistered class or function that a module holds under a name, if any."""
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, RewardFunction)
            and value.__module__ == module.__name__
            and stem in registered_names(class_stem(value.__name__))
        ):
            return value
    functions = (vars(module).get(name) for name in (stem, f"{stem}_reward", "format_reward"))
    return next((function for function in functions if callable(function)), None)


registry = RewardRegistry()
