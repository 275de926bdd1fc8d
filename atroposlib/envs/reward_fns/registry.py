"""Reward functions by name.

    name or {"type": name, "params": {...}} -> class or function -> RewardFunction

Each entry has a short name, the same with `_reward`, and the same without underscores. The import
of this package registers its reward functions. A function is wrapped in a `RewardFunction`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from types import ModuleType
from typing import Any, TypeVar, overload

from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import ConfigError, UnknownRewardError
from atroposlib.utils.text import near_name

__all__ = ["LegacyFunctionWrapper", "RewardRegistry", "registry"]

logger = logging.getLogger(__name__)

WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_stem(name: str) -> str:
    """Return a name without a final `_reward` or `reward`: `custom` for `custom_reward`."""
    return name.removesuffix("reward").rstrip("_") or name


def class_stem(class_name: str) -> str:
    """Return a class name in words: `crossword_format` for `CrosswordFormatReward`."""
    words = class_name.removesuffix("Reward") or class_name
    return name_stem(WORD_BORDER.sub("_", words).lower())


def registered_names(name: str) -> set[str]:
    """Return all names of an entry: short, long, and without underscores."""
    stem = name_stem(name)
    return {name, stem, f"{stem}_reward", stem.replace("_", "")}


def required_names(config: Any) -> set[str]:
    """Return the names of the reward functions in a configuration.

    They are listed, as names or as mappings with a `type`, in `reward_functions` and `reward_funcs`
    of the configuration, in `dataset_reward_funcs` and `reward_funcs` of each of its `datasets`,
    and in `reward_funcs` of each of a dataset's `types`.

    Args:
        config: a mapping or an object with attributes, at every level; all parts are optional.
    """
    names = {*_names_in(config, "reward_functions"), *_names_in(config, "reward_funcs")}
    for dataset in _part(config, "datasets") or ():
        names.update(_names_in(dataset, "dataset_reward_funcs"))
        names.update(_names_in(dataset, "reward_funcs"))
        for kind in _part(dataset, "types") or ():
            names.update(_names_in(kind, "reward_funcs"))
    return names


def _names_in(config: Any, key: str) -> Iterator[str]:
    entries = _part(config, key) or ()
    for entry in [entries] if isinstance(entries, (str, Mapping)) else entries:
        name = _part(entry, "type") if isinstance(entry, Mapping) else entry
        if isinstance(name, str) and name:
            yield name


def _part(config: Any, key: str) -> Any:
    # Configurations of YAML files are mappings, those of environments objects.
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


class LegacyFunctionWrapper(RewardFunction):
    """Calls `func(completions, **parameters)`; has the name of the function.

    Keywords of a call override the parameters given here. A function without `**kwargs` gets only
    the keywords that it names, so callers may pass all data of an item.

    Args:
        func: function that returns one number per completion, or one number for all.
        weight: factor of the raw rewards.
        **kwargs: parameters of every call; `name` is ignored.

    Raises:
        ConfigError: the function does not take one of the parameters.
    """

    def __init__(self, func: Callable[..., Any], weight: float = 1.0, **kwargs: Any) -> None:
        parameters = {key: value for key, value in kwargs.items() if key != "name"}
        tolerate_errors = bool(parameters.pop("tolerate_errors", False))
        # A partial or another callable object has no name.
        name = getattr(func, "__name__", type(func).__name__)
        super().__init__(weight, name, tolerate_errors=tolerate_errors, **parameters)
        self.func = func
        self._keywords = _accepted_keywords(func)
        unknown = [] if self._keywords is None else sorted(parameters.keys() - self._keywords)
        if unknown:
            raise ConfigError(
                f"reward function {self.name!r} takes no parameter {', '.join(unknown)}; "
                f"it takes {', '.join(sorted(self._keywords or ())) or 'none'}"
            )

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        keywords = {**self.config, **kwargs}
        if self._keywords is not None:
            keywords = {key: keywords[key] for key in keywords.keys() & self._keywords}
        rewards = self.func(completions, **keywords)
        if isinstance(rewards, Real):
            return [float(rewards)] * len(completions)
        return list(rewards)


def _accepted_keywords(func: Callable[..., Any]) -> set[str] | None:
    """Return the keywords of a function, without the completions; None if it takes any."""
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters[1:] if parameter.kind in by_name}


PACKAGE = __name__.rpartition(".")[0]

RewardClass = TypeVar("RewardClass", bound=type[RewardFunction])
RewardCallable = TypeVar("RewardCallable", bound=Callable[..., Any])


class RewardRegistry:
    """Finds reward functions by name and creates them from configurations."""

    def __init__(self) -> None:
        self._entries: dict[str, Callable[..., Any]] = {}

    @overload
    def register(self, cls: RewardClass, name: str | None = None) -> RewardClass: ...

    @overload
    def register(
        self, cls: None = None, name: str | None = None
    ) -> Callable[[RewardClass], RewardClass]: ...

    def register(self, cls: Any = None, name: str | None = None) -> Any:
        """Register a subclass of `RewardFunction`; also a decorator with or without arguments.

        Args:
            cls: the class.
            name: its name; None means the words of the class name, without `Reward`.

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
        """Register a function `(completions, **kwargs)`; without one, return a decorator."""
        if function is None:
            return lambda decorated: self.register_function(name, decorated)
        if not callable(function):
            raise TypeError(f"{function!r} cannot be called; expected a function of completions")
        self._add(name, function)
        return function

    def get(self, name: str) -> Callable[..., Any]:
        """Return the class or function with a name.

        A name that is not registered is searched in the modules of this package with the short
        name, the short name with `_reward`, and `name`.

        Raises:
            UnknownRewardError: the name is unknown; the message suggests a similar one.
        """
        return self._lookup(name) or self._load(name)

    def create(self, name_or_config: str | Mapping[str, Any], **kwargs: Any) -> RewardFunction:
        """Create a reward function.

        Args:
            name_or_config: a name, or a mapping with the name under `type`. Its other keys are
                parameters; those under `params` override them.
            **kwargs: parameters; those of the configuration override them.

        Raises:
            ConfigError: the configuration has no `type`, or `params` is not a mapping.
            UnknownRewardError: the name is unknown.
        """
        name, parameters = _split_config(name_or_config)
        entry = self.get(name)
        parameters = {**kwargs, **parameters}
        if isinstance(entry, type) and issubclass(entry, RewardFunction):
            return entry(**parameters)
        return LegacyFunctionWrapper(entry, **parameters)

    def list_registered(self) -> list[str]:
        """Return the registered names in alphabetical order."""
        return sorted(self._entries)

    def load_required_functions(self, config: Any) -> set[str]:
        """Look up the reward functions in a configuration and return their `required_names`."""
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
    """Return the unregistered class or function of a module with this name, or None."""
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and RewardFunction in value.__mro__
            and value.__module__ == module.__name__
            and stem in registered_names(class_stem(value.__name__))
        ):
            return value
    functions = (vars(module).get(name) for name in (stem, f"{stem}_reward", "format_reward"))
    return next((function for function in functions if callable(function)), None)


registry = RewardRegistry()
