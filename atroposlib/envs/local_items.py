"""Former path and name of `DatasetItems`, which `atroposlib.envs.dataset_items` defines."""

from __future__ import annotations

from atroposlib.envs.dataset_items import DatasetItems as LocalItems
from atroposlib.envs.dataset_items import LocalItemsConfig

__all__ = ["LocalItems", "LocalItemsConfig"]
