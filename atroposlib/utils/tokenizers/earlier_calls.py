"""Tokenizers that answer environments as they always have, whichever transformers is installed.

Version 5 changed what some calls return and took others away. Environment files are written
against the earlier answers, so the tokenizer that an environment is given keeps them:

    call                            version 5          here, and in version 4
    apply_chat_template(messages)   a mapping          the ids, a list
    batch_decode(ids)               one text           the text of each id
    batch_decode([])                one empty text     an empty list
    encode_plus, batch_encode_plus  removed            the mapping of `tokenizer(...)`

Releases before 4.47 do not read `chat_template.jinja`, where recent models have their template.
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
    """Return the same tokenizer, whose methods answer as they do in version 4 of transformers.

    It can be copied, pickled and saved as before. Anything but a tokenizer of transformers is
    left as it is. Its chat template is read as by `read_template_file`.
    """
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if method is None or "return_dict" not in inspect.signature(method).parameters:
        return tokenizer
    read_template_file(tokenizer)
    # Module-level functions, since what stands in the tokenizer is pickled with it.
    tokenizer.apply_chat_template = partial(_apply_chat_template, tokenizer)
    tokenizer.batch_decode = partial(_batch_decode, tokenizer)
    for name in ("encode_plus", "batch_encode_plus"):
        if not hasattr(tokenizer, name):
            setattr(tokenizer, name, partial(_encode, tokenizer))
    return tokenizer


def read_template_file(tokenizer: Any) -> Any:
    """Return the same tokenizer, with the template of its `chat_template.jinja` if it has none.

    Releases of transformers before 4.47 leave that file unread.
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
    """Return what to say of a tokenizer that cannot render chats."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    return (
        f"the tokenizer {name} has no chat template, so chats cannot be rendered as prompts; name "
        "one of a chat model with --env.tokenizer_name, set the chat_template of this one, or "
        "send completions of a prompt"
    )


def _apply_chat_template(tokenizer: Any, conversation: Any, *args: Any, **kwargs: Any) -> Any:
    method = type(tokenizer).apply_chat_template
    given = inspect.signature(method).bind(tokenizer, conversation, *args, **kwargs).arguments
    template = given.get("chat_template") or getattr(tokenizer, "chat_template", "its own")
    if not template:
        raise ConfigError(no_template_text(tokenizer))
    if "return_dict" not in given:
        kwargs["return_dict"] = False
    return method(tokenizer, conversation, *args, **kwargs)


def _batch_decode(tokenizer: Any, sequences: Iterable[Any], *args: Any, **kwargs: Any) -> list[str]:
    return [tokenizer.decode(ids, *args, **kwargs) for ids in sequences]


def _encode(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
    return tokenizer(*args, **kwargs)
