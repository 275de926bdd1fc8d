"""Access to the reasoning-gym package: its tasks, their generators and their levels.

The only module that imports the package, and only when one of its functions is called.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.utils.text import near_name

__all__ = ["as_key", "buildable_tasks", "complexity_params", "make_dataset", "scoring_dataset"]

logger = logging.getLogger(__name__)


def as_key(params: Mapping[str, Any]) -> str:
    """Return parameters as text, for caches."""
    return json.dumps(params, sort_keys=True)


def make_dataset(task: str, params: Mapping[str, Any], *, seed: int, size: int = 1) -> Any:
    """Return a generator of `size` entries of a task; entry i is made from `seed + i`."""
    return _package().factory.create_dataset(task, size=size, seed=seed, **params)


@lru_cache(maxsize=512)
def scoring_dataset(task: str, params_key: str) -> Any:
    """Return a generator to score with; kept, since some read word lists when they are made."""
    return make_dataset(task, json.loads(params_key), seed=0)


@lru_cache(maxsize=64)
def buildable_tasks(wanted: tuple[str, ...], params_key: str) -> tuple[str, ...]:
    """Return the tasks asked for, sorted.

    Args:
        wanted: names; none means every task that can be built with its parameters.
        params_key: `as_key` of the parameters by task.

    Raises:
        ConfigError: a name is unknown, or a task asked for refuses its parameters.
    """
    known = _package().factory.DATASETS
    params = json.loads(params_key)
    for name in (*wanted, *params):
        if name not in known:
            raise ConfigError(f"reasoning-gym has no task {name!r}{near_name(name, known)}")
    if not wanted:
        return tuple(name for name in sorted(known) if _refusal(name, params.get(name)) is None)
    for name in wanted:
        refusal = _refusal(name, params.get(name))
        if refusal is not None:
            raise ConfigError(f"task {name!r} cannot be built with these task_params: {refusal}")
    return tuple(sorted(set(wanted)))


@lru_cache(maxsize=4096)
def complexity_params(task: str, complexity: float) -> Mapping[str, Any]:
    """Read the parameters of a complexity off the package's own curriculum of the task.

    Every attribute of the curriculum has a list of levels; complexity 0 is the first of each and
    1 the last. A combination the generator refuses is lowered; a task without a curriculum has
    only its defaults.
    """
    factory = _package().factory
    if not factory.has_curriculum(task):
        return {}
    while complexity >= 0:
        curriculum = factory.create_curriculum(task)
        fields: list[str] = []
        for name, attribute in curriculum.attributes.items():
            level = round(complexity * (len(attribute.levels) - 1))
            curriculum.set_attr_level(name, level)
            fields += _field_names(attribute)
        made = curriculum.generate_configuration()
        params = {field: getattr(made, field) for field in fields}
        refusal = _refusal(task, params)
        if refusal is None:
            return params
        logger.debug("%s refuses complexity %.2f: %s", task, complexity, refusal)
        complexity = round(complexity - 0.1, 2)
    return {}


def _field_names(attribute: Any) -> list[str]:
    from reasoning_gym.coaching.attributes import RangeAttributeDefinition

    if isinstance(attribute, RangeAttributeDefinition):
        return [attribute.lower_field_name, attribute.upper_field_name]
    return [attribute.field_name]


def _refusal(task: str, params: Mapping[str, Any] | None) -> str | None:
    try:
        make_dataset(task, params or {}, seed=0)
    except (AssertionError, TypeError, ValueError) as error:
        return str(error) or repr(error)
    return None


@lru_cache(maxsize=1)
def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise MissingExtraError("reasoning-gym", extra="examples") from error
    return reasoning_gym


if multiprocessing.parent_process() is not None:
    # A worker that scores: it imports this module before the time of its first call begins, and
    # the package takes seconds to load, on a busy machine longer than an answer may take.
    with contextlib.suppress(MissingExtraError):  # raised by the first call instead
        _package()
