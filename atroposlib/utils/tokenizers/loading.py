"""Load a tokenizer without importing torch, if it is one of transformers' general class.

`AutoTokenizer` imports the models of transformers, and with them torch: five seconds of processor
time and 300 MB in each process of an environment. A tokenizer whose configuration names the general
class needs none of that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CONFIG = "tokenizer_config.json"
_GENERAL_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The class's name in transformers 4 and 5."""


def load_general_tokenizer(name: str) -> Any | None:
    """Return the tokenizer of a folder, or of a repository in the hub's cache.

    Returns:
        The tokenizer that `AutoTokenizer` would return; None if its class is another one, or if
        its configuration is not on this machine.
    """
    config = _config_of(name)
    if config.get("tokenizer_class") not in _GENERAL_CLASSES or "auto_map" in config:
        return None
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(name)


def _config_of(name: str) -> dict[str, Any]:
    path = Path(name) / _CONFIG if Path(name).is_dir() else _cached(name)
    try:
        config = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, _CONFIG)
    except HFValidationError:  # not a name of a repository
        return None
    return Path(found) if isinstance(found, str) else None
