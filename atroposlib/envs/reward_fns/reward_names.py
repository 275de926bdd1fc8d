"""The names a reward function answers to, and the names a configuration asks for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["class_stem", "name_stem", "registered_names", "required_names"]

WORD_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def name_stem(name: str) -> str:
    """Return the name without `_reward` or `reward` at its end: `custom_reward` is `custom`."""
    return name.removesuffix("reward").rstrip("_") or name


def class_stem(class_name: str) -> str:
    """Return the name of a class in words: `CrosswordFormatReward` is `crossword_format`."""
    words = class_name.removesuffix("Reward") or class_name
    return name_stem(WORD_BORDER.sub("_", words).lower())


def registered_names(name: str) -> set[str]:
    """Return every name under which `name` can be found: short, long, and without underscores."""
    stem = name_stem(name)
    return {name, stem, f"{stem}_reward", stem.replace("_", "")}


def required_names(config: Any) -> set[str]:
    """Return the reward functions a configuration names.

    They stand in `reward_functions` and `reward_funcs` of the configuration, in
    `dataset_reward_funcs` and `reward_funcs` of each of its `datasets`, and in `reward_funcs` of
    each of a dataset's `types`: as names, or as mappings with the name under `type`.

    Args:
        config: a mapping or an object with attributes, at every level; absent parts are skipped.
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
    # A border: configurations come from YAML as mappings, from environments as objects.
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
