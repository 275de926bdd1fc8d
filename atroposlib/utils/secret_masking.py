"""Hiding keys and passwords in settings before they are shown or saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

__all__ = ["MASK", "mask_secrets"]

MASK = "***"
"""What stands in place of a secret."""

SECRET_NAME = re.compile(
    r"(api_?key|secret|password|passwd|authorization|credentials?|(access|auth|hf|hub|api)_token)$",
    re.IGNORECASE,
)
URL_PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")


def mask_secrets(settings: Any) -> Any:
    """Return a copy of nested settings in which secrets are replaced by `MASK`.

    A value is secret when its key says so (`api_key`, `password`, `hf_token`, ...); a user and
    password inside a URL is hidden too. Empty values stay, so that one sees what was not set.

    Args:
        settings: mappings, lists and scalars, as `model_dump()` gives them.
    """
    if isinstance(settings, Mapping):
        return {
            key: MASK if value and SECRET_NAME.search(str(key)) else mask_secrets(value)
            for key, value in settings.items()
        }
    if isinstance(settings, list | tuple):
        return [mask_secrets(value) for value in settings]
    if isinstance(settings, str):
        return URL_PASSWORD.sub(f"{MASK}@", settings)
    return settings
