"""Paths of models and tokenizers, as opposed to names on the hub."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

__all__ = ["missing_folder", "or_missing_folder", "use_cache_without_hub"]

logger = logging.getLogger(__name__)

_HUB = "https://huggingface.co"
_PROXIES = {"http", "https", "all"}
_MODELS_OF_A_RUN = ("trainer/final_model", "final_model")
_ATTEMPTS = 3
_RETRY_S = 1.0


def missing_folder(name: str) -> str | None:
    """Return an error text if `name` is a path without a folder; None for a name on the hub.

    Names on the hub are NAME or ORGANIZATION/NAME. Libraries report a missing folder as an invalid
    name on the hub.
    """
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")
    if not is_path or Path(name).is_dir():
        return None
    return f"there is no folder {Path(name).absolute()}"


def or_missing_folder(reason: str, name: str) -> str:
    """Return why `name` cannot be loaded: a missing folder, or `reason` and that there is none.

    For the folder of a training run, the text names the model in it; adapters and GGUF files in
    place of a model are named too.
    """
    for inner in (Path(name, folder) for folder in _MODELS_OF_A_RUN):
        if inner.is_dir() and not Path(name, "config.json").exists():
            return f"it has no config.json; did you mean {inner}?"
    if Path(name).is_dir() and not Path(name, "config.json").exists():
        if Path(name, "adapter_config.json").exists():
            return "it has adapters without their model; merge them into it and save the result"
        if any(Path(name).glob("*.gguf")):
            return "it has GGUF files; expected config.json and safetensors files"
    if Path(name).exists():
        return reason
    return missing_folder(name) or f"{reason}; there is no folder {Path(name).absolute()} either"


def use_cache_without_hub(name: str) -> None:
    """Before `name` is loaded from the hub: use only its cache if the hub's host is not found.

    The hub's client retries for almost a minute per file otherwise. Processes that are started
    later inherit the setting `HF_HUB_OFFLINE`, which is left alone if it is set.
    """
    if "HF_HUB_OFFLINE" in os.environ or Path(name).exists():
        return
    endpoint = os.environ.get("HF_ENDPOINT") or _HUB
    if getproxies().keys() & _PROXIES or _is_found(urlsplit(endpoint).hostname or ""):
        return
    logger.warning("%s cannot be reached: only downloaded models and data are used", endpoint)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):  # read when imported
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


@cache
def _is_found(host: str) -> bool:
    """Return whether a host has an address; asks again for two seconds."""
    for attempt in range(_ATTEMPTS):
        try:
            socket.getaddrinfo(host, None)
            return True
        except OSError:
            if attempt < _ATTEMPTS - 1:
                time.sleep(_RETRY_S)
    return False
