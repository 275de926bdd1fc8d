"""Hiding keys and passwords in settings before they are shown or saved."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

__all__ = [
    "MASK",
    "hide_secrets",
    "hide_secrets_of_requests",
    "is_masked",
    "mask_secrets",
    "without_secrets",
]

MASK = "***"
"""What stands in place of a secret."""

SECRET_NAME = re.compile(
    r"(api_?key|secret|password|passwd|authorization|credentials?|(access|auth|hf|hub|api)_token)$",
    re.IGNORECASE,
)
HTTP_CLIENT_LOGGERS = ("httpx", "httpx2")
USER_INFO = re.compile(r"(?:\w+://)?[^/]*@")
URL_PASSWORD = re.compile(r"(?<=://)[^/\s]+@")
URL_KEY = re.compile(
    r"(?<=[?&])((?:[\w.-]*[-_.])?(?:(?:api)?key|token|passw(?:or)?d|secret|sig(?:nature)?|credentials?"
    r"|auth))=[^&\s\"']+",
    re.IGNORECASE,
)


def mask_secrets(settings: Any) -> Any:
    """Return a copy of nested settings in which secrets are replaced by `MASK`.

    A value is secret when its key says so (`api_key`, `password`, `hf_token`, ...); a user, a
    password or a key inside a URL is hidden too. Empty values stay, so that one sees what was not
    set.

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
        return hide_secrets(settings)
    return settings


def is_masked(value: Any) -> bool:
    """Whether a saved setting is what `mask_secrets` left of a secret."""
    return value == MASK or (isinstance(value, str) and f"://{MASK}@" in value)


def hide_secrets(text: str) -> str:
    """Return a text without the users, passwords and keys of the URLs in it."""
    return URL_KEY.sub(rf"\1={MASK}", URL_PASSWORD.sub(f"{MASK}@", text))


def hide_secrets_of_requests() -> None:
    """Hide the secrets of URLs in what HTTP clients log of each request; later calls do nothing."""
    for name in HTTP_CLIENT_LOGGERS:
        client = logging.getLogger(name)
        if _hides_secrets not in client.filters:
            client.addFilter(_hides_secrets)


def _hides_secrets(record: logging.LogRecord) -> bool:
    record.msg, record.args = hide_secrets(record.getMessage()), ()
    return True


def without_secrets(url: str) -> str:
    """Return what was given as a URL, without user, password and options, as messages show it."""
    # A password may hold a question mark that nobody has escaped.
    user = USER_INFO.match(url)
    start = user.end() if user else 0
    address = url[:start] + url[start:].partition("?")[0]
    access, at, place = address.rpartition("@")
    scheme = re.match(r"\w+://", access)
    return f"{scheme.group() if scheme else ''}{MASK}@{place}" if at else address
