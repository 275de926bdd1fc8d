"""Read `--name value` words into typed values, as declared by a pydantic model.

The grammar, in full: `--name=value` and `--name value`; `env.` and `openai.` may be left out where
the name is then still unambiguous; every flag takes a value, booleans too,
except those few that may stand alone and are true then; a list takes several words, or repeated
flags, or one JSON array; a mapping is one JSON object; `None` empties an optional setting; names
are never abbreviated. A following word is a value unless it begins with two dashes, so `-1` and
`-1e-3` need no equals sign.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from atroposlib.envs.constants import ENV_NAMESPACE, NAMESPACE_SEP, OPENAI_NAMESPACE
from atroposlib.utils.cli import UsageError, near_name

__all__ = ["HELP_WORDS", "MAY_STAND_ALONE", "Flag", "flags_of", "is_structured", "read_flags"]

HELP_WORDS = ("--help", "-h")

MAY_STAND_ALONE = "may_stand_alone"
"""Key in `json_schema_extra` of a boolean field whose flag needs no value."""

SHORT_FORMS = {"tokenizer_name": f"{ENV_NAMESPACE}{NAMESPACE_SEP}tokenizer_name"}
"""What a name without its prefix means where both configs have it and one meaning is customary:
the environment's tokenizer makes the tokens, the server's follows from its model."""

_SEQUENCES = (list, tuple, set, frozenset, Sequence)


class Flag(NamedTuple):
    """One flag of a command, as its model declares it."""

    name: str
    """As typed, without the dashes: `env.group_size`."""
    annotation: Any
    default: Any
    """What holds when the flag is not given; `PydanticUndefined` when it must be given."""
    description: str
    may_stand_alone: bool = False
    """Whether it may be given without a value, which means true."""


def flags_of(model: type[BaseModel]) -> list[Flag]:
    """The flags of a command class, in the order of its fields."""
    return [
        Flag(
            name,
            field.annotation,
            # PydanticUndefined where there is none.
            field.get_default(call_default_factory=True),
            field.description or "",
            isinstance(field.json_schema_extra, dict)
            and bool(field.json_schema_extra.get(MAY_STAND_ALONE)),
        )
        for name, field in model.model_fields.items()
    ]


def read_flags(words: Sequence[str], flags: Sequence[Flag]) -> dict[str, Any]:
    """Read the words after the sub-command.

    Args:
        words: As the shell split them.
        flags: What may be given.

    Returns:
        The values of the flags that were typed, by name. Numbers stay text for the model to
        coerce, so that its message names the field.

    Raises:
        UsageError: an unknown or ambiguous flag, a flag without value, or a stray word.
    """
    by_name = {flag.name: flag for flag in flags}
    typed: dict[str, list[str]] = {}
    for given, values in _occurrences(words):
        name = _full_name(given, by_name)
        if not values and by_name[name].may_stand_alone:
            values = ["true"]
        if not values:
            raise UsageError(f"--{name} needs a value{_boolean_hint(by_name[name])}")
        if _sequence_arm(by_name[name].annotation) is not None:
            typed.setdefault(name, []).extend(values)
        elif len(values) > 1:
            raise UsageError(f"--{name} takes one value, so {values[1]!r} belongs to no flag")
        else:
            typed[name] = values
    return {name: _convert(values, by_name[name]) for name, values in typed.items()}


def is_structured(annotation: Any) -> bool:
    """Whether values of this type are mappings, written as JSON on the command line."""
    return any(_is_mapping(arm) for arm in _arms(annotation))


def _occurrences(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag with the words that follow it."""
    current: tuple[str, list[str]] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            if current:
                yield current
            name, equals, value = word[2:].partition("=")
            current = (name, [value] if equals else [])
        elif current is None:
            raise UsageError(f"{word!r} belongs to no flag; settings are given as --name value")
        else:
            current[1].append(word)
    if current:
        yield current


def _full_name(name: str, known: Mapping[str, Flag]) -> str:
    """Return the flag that a typed name means, its prefix added where that was left out."""
    if name in known:
        return name
    prefixed = [f"{space}{NAMESPACE_SEP}{name}" for space in (ENV_NAMESPACE, OPENAI_NAMESPACE)]
    meant = [full for full in prefixed if full in known]
    if SHORT_FORMS.get(name) in meant:
        return SHORT_FORMS[name]
    if len(meant) > 1:
        raise UsageError(
            f"--{name} is ambiguous: write {' or '.join(f'--{full}' for full in meant)}"
        )
    if not meant:
        raise UsageError(f"unknown flag --{name}{_suggestion(name, known)}")
    return meant[0]


def _suggestion(name: str, known: Mapping[str, Flag]) -> str:
    hint = near_name(name.replace("-", "_"), known)
    return hint.replace("did you mean ", "did you mean --") or "; --help all lists every flag"


def _boolean_hint(flag: Flag) -> str:
    return ": true or false" if bool in _arms(flag.annotation) else ""


def _convert(words: list[str], flag: Flag) -> Any:
    try:
        return _value(words, flag.annotation)
    except ValueError as error:
        raise UsageError(f"{flag.name}: {error}") from error


def _value(words: list[str], annotation: Any) -> Any:
    """Turn the words of one flag into the value its type asks for."""
    arms = _arms(annotation)
    if len(words) == 1 and _means_none(words[0], arms):
        return None
    sequence = _sequence_arm(annotation)
    if sequence is not None:
        return _sequence(words, sequence, takes_text=str in arms)
    return _scalar(words[0], arms)


def _sequence(words: list[str], sequence: Any, *, takes_text: bool) -> Any:
    if len(words) == 1 and words[0].lstrip().startswith("["):
        return _json(words[0], """a JSON array such as '["a", "b"]'""")
    if len(words) == 1 and takes_text:
        return words[0]
    members = get_args(sequence) or (Any,)
    mixed = get_origin(sequence) is tuple and members[1:] != (Ellipsis,)
    inner = Any if mixed else members[0]
    return [_value([word], inner) for word in words]


def _scalar(word: str, arms: list[Any]) -> Any:
    """One word: a member of a closed set, a JSON object, or text for the model to coerce."""
    for arm in arms:
        for choice in _choices(arm):
            if word == str(choice.value if isinstance(choice, Enum) else choice):
                return choice
    looks_like_json = word.lstrip().startswith("{")
    if any(_is_mapping(arm) for arm in arms) and (looks_like_json or str not in arms):
        return _json(word, """a JSON object such as '{"name": 1}'""")
    return word


def _choices(arm: Any) -> Sequence[Any]:
    if get_origin(arm) is Literal:
        return get_args(arm)
    return list(arm) if isinstance(arm, type) and issubclass(arm, Enum) else ()


def _json(word: str, wanted: str) -> Any:
    try:
        return json.loads(word)
    except ValueError as error:
        raise ValueError(f"expected {wanted}, got {word!r}: {error}") from error


def _arms(annotation: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if get_origin(annotation) is Annotated:
        return _arms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [arm for member in get_args(annotation) for arm in _arms(member)]
    return [annotation]


def _sequence_arm(annotation: Any) -> Any | None:
    for arm in _arms(annotation):
        if (get_origin(arm) or arm) in _SEQUENCES:
            return arm
    return None


def _is_mapping(arm: Any) -> bool:
    kind = get_origin(arm) or arm
    return isinstance(kind, type) and issubclass(kind, (Mapping, BaseModel))


def _means_none(word: str, arms: list[Any]) -> bool:
    """`None` empties any optional setting; where text is no answer, `null` and `none` do too."""
    if type(None) not in arms and Any not in arms:
        return False
    return word == "None" or (str not in arms and Any not in arms and word in ("none", "null"))
