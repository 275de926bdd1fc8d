"""Compatibility of tokenizers of transformers 5 with environments written for version 4.

Version 5 changed the results of some calls and removed others. The tokenizer that an environment
receives keeps the earlier ones:

    call                            version 5          here, and in version 4
    apply_chat_template(messages)   a mapping          the ids, a list
    batch_decode(ids)               one text           the text of each id
    batch_decode([])                one empty text     an empty list
    encode_plus, batch_encode_plus  removed            the mapping of `tokenizer(...)`

Releases before 4.47 do not read `chat_template.jinja`, the template file of recent models.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from atroposlib.errors import ConfigError

__all__ = ["keep_earlier_calls", "no_template_text", "read_template_file"]

TEMPLATE_FILE = "chat_template.jinja"
FIRST_TO_READ_TEMPLATE_FILES = (4, 47)
"""First version of transformers that reads `chat_template.jinja`."""


def keep_earlier_calls(tokenizer: Any) -> Any:
    """Make the methods of a tokenizer return the results of version 4; return the tokenizer.

    It can still be copied, pickled and saved. Also applies `read_template_file`. Objects other than
    tokenizers of transformers are unchanged.
    """
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if method is None or "return_dict" not in inspect.signature(method).parameters:
        return tokenizer
    read_template_file(tokenizer)
    # Module-level functions, since attributes of the tokenizer are pickled with it.
    tokenizer.apply_chat_template = partial(_apply_chat_template, tokenizer)
    tokenizer.batch_decode = partial(_batch_decode, tokenizer)
    for name in ("encode_plus", "batch_encode_plus"):
        if not hasattr(tokenizer, name):
            setattr(tokenizer, name, partial(_encode, tokenizer))
    return tokenizer


def read_template_file(tokenizer: Any) -> Any:
    """Set the chat template of a tokenizer from its `chat_template.jinja`; return the tokenizer.

    Only if it has no template and transformers is older than 4.47.
    """
    if getattr(tokenizer, "chat_template", "its own"):
        return tokenizer
    import transformers

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version >= FIRST_TO_READ_TEMPLATE_FILES:
        return tokenizer
    path = transformers.utils.cached_file(
        tokenizer.name_or_path,
        TEMPLATE_FILE,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is not None:
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    return tokenizer


def no_template_text(tokenizer: Any) -> str:
    """Return the error text for a tokenizer without a chat template."""
    return (
        f"the tokenizer {_name_of(tokenizer)} has no chat template, so chats cannot be rendered "
        "as prompts; name one of a chat model with --env.tokenizer_name, set the chat_template of "
        "this one, or send completions of a prompt"
    )


def _name_of(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _apply_chat_template(tokenizer: Any, conversation: Any, *args: Any, **kwargs: Any) -> Any:
    method = type(tokenizer).apply_chat_template
    given = inspect.signature(method).bind(tokenizer, conversation, *args, **kwargs).arguments
    template = given.get("chat_template") or getattr(tokenizer, "chat_template", "its own")
    if not template:
        raise ConfigError(no_template_text(tokenizer))
    if "return_dict" not in given:
        kwargs["return_dict"] = False
    from jinja2 import TemplateSyntaxError

    try:
        return method(tokenizer, conversation, *args, **kwargs)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of the tokenizer {_name_of(tokenizer)} has a syntax error in line "
            f"{error.lineno}: {error.message}"
        ) from error


def _batch_decode(tokenizer: Any, sequences: Iterable[Any], *args: Any, **kwargs: Any) -> list[str]:
    return [tokenizer.decode(ids, *args, **kwargs) for ids in sequences]


def _encode(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    return tokenizer(*args, **kwargs)
