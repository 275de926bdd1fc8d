"""Rows of a data set of the hub, with an error that names the local way."""

from __future__ import annotations

from typing import Any

from atroposlib.errors import ConfigError

__all__ = ["hub_dataset", "hub_rows"]


def hub_rows(
    path: str, *, split: str, subset: str | None = None, shuffle_seed: int | None = None
) -> list[dict[str, Any]]:
    """Return the rows of a split; blocks until they are here.

    Args:
        path: name of the data set, `owner/name`.
        split: `train`, `test`, ...
        subset: name of its configuration, where it has several.
        shuffle_seed: seed of their order; None keeps that of the data set.

    Raises:
        ConfigError: it cannot be loaded; the message says that local files do as well.
    """
    rows = hub_dataset(path, split=split, subset=subset)
    if shuffle_seed is not None:
        rows = rows.shuffle(seed=shuffle_seed)
    return [dict(row) for row in rows]


def hub_dataset(path: str, *, split: str, subset: str | None = None) -> Any:
    """Return a split whose rows are decoded when they are asked for, as images should be.

    Arguments and errors are those of `hub_rows`.
    """
    import datasets

    try:
        return datasets.load_dataset(path, subset, split=split)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be loaded from the hub ({error}); --env.dataset_path takes local files "
            "instead"
        ) from error
