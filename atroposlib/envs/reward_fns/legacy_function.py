"""A plain function in the form of a `RewardFunction`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.errors import ConfigError

__all__ = ["LegacyFunctionWrapper"]


class LegacyFunctionWrapper(RewardFunction):
    """Calls `func(completions, **parameters)`; its name is the name of the function.

    Keywords of a call win over the parameters given here. A function without `**kwargs` receives
    only the keywords it names, so that callers may offer everything they know of an item.

    Args:
        func: returns one number per completion, or one number for all of them.
        weight: what each raw reward is multiplied by.
        **kwargs: parameters handed to every call; `name` is ignored.

    Raises:
        ConfigError: the function does not know one of the parameters.
    """

    def __init__(self, func: Callable[..., Any], weight: float = 1.0, **kwargs: Any) -> None:
        parameters = {key: value for key, value in kwargs.items() if key != "name"}
        tolerate_errors = bool(parameters.pop("tolerate_errors", False))
        # A border: a partial or another callable object has no name of its own.
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
        """Return what the function answers; one number is repeated for every completion."""
        keywords = {**self.config, **kwargs}
        if self._keywords is not None:
            keywords = {key: keywords[key] for key in keywords.keys() & self._keywords}
        rewards = self.func(completions, **keywords)
        if isinstance(rewards, Real):
            return [float(rewards)] * len(completions)
        return list(rewards)


def _accepted_keywords(func: Callable[..., Any]) -> set[str] | None:
    """Return the keywords besides the completions; None when the function takes any."""
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # some built-in functions hide their signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters[1:] if parameter.kind in by_name}
