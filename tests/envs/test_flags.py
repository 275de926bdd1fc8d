"""The grammar of flags: which words become which values."""

from __future__ import annotations

from enum import Enum
from typing import Any, Dict, List, Literal, Optional, Union  # noqa: UP035  # environments use them

import pytest
from pydantic import BaseModel, Field

from atroposlib.envs.settings import MAY_STAND_ALONE, flags_of, read_flags
from atroposlib.utils.cli import UsageError


class Colour(Enum):
    RED = 1
    BLUE = 2


class Inner(BaseModel):
    depth: int = 0


class Everything(BaseModel):
    whole: int = 0
    real: float = 0.0
    flag: bool = False
    text: str = "x"
    maybe_text: str | None = None
    maybe_int: Optional[int] = 3  # noqa: UP045
    maybe_flag: bool | None = None
    words: list[str] = []
    numbers: List[int] = Field(default_factory=list)  # noqa: UP006
    maybe_numbers: list[int] | None = None
    pair: tuple[int, str] = (0, "")
    table: list[list[int]] = []
    mapping: Dict[str, int] = {}  # noqa: UP006
    inner: Inner = Inner()
    either: Union[str, Dict[str, int]] = "{}"  # noqa: UP006, UP007
    text_or_words: str | list[str] = ""
    mode: Literal["fast", "slow"] = "fast"
    level: Literal[1, 2] = 1
    colour: Colour = Colour.RED


def read(line: str | list[str]) -> dict[str, Any]:
    words = line.split() if isinstance(line, str) else line
    return Everything(**read_flags(words, flags_of(Everything))).model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("--whole 3", {"whole": 3}),
        ("--whole=3", {"whole": 3}),
        ("--whole -1", {"whole": -1}),
        ("--whole=-1", {"whole": -1}),
        ("--whole 1 --whole 2", {"whole": 2}),
        ("--real 1e-3", {"real": 1e-3}),
        ("--real -1e-3", {"real": -1e-3}),
        ("--real -inf", {"real": float("-inf")}),
        ("--flag true --maybe_flag no", {"flag": True, "maybe_flag": False}),
        ("--flag False", {"flag": False}),
        ("--flag 1", {"flag": True}),
        ("--flag yes", {"flag": True}),
        ("--flag 0", {"flag": False}),
        ("--text a=b", {"text": "a=b"}),
        ("--text=--x", {"text": "--x"}),
        ("--text -x", {"text": "-x"}),
        ("--text=", {"text": ""}),
        ("--text None", {"text": "None"}),
        ("--maybe_text None", {"maybe_text": None}),
        ("--maybe_text none", {"maybe_text": "none"}),
        ("--maybe_int None", {"maybe_int": None}),
        ("--maybe_int null", {"maybe_int": None}),
        ("--maybe_flag None", {"maybe_flag": None}),
        ("--words a", {"words": ["a"]}),
        ("--words a b c", {"words": ["a", "b", "c"]}),
        ("--words a --words b c", {"words": ["a", "b", "c"]}),
        (["--words", '["a b", "c"]'], {"words": ["a b", "c"]}),
        ("--words []", {"words": []}),
        ("--numbers 1 -2 3", {"numbers": [1, -2, 3]}),
        ("--maybe_numbers None", {"maybe_numbers": None}),
        ("--maybe_numbers 1", {"maybe_numbers": [1]}),
        ("--pair 1 b", {"pair": (1, "b")}),
        ("--table [[1,2],[3]]", {"table": [[1, 2], [3]]}),
        ("--table [1,2] [3]", {"table": [[1, 2], [3]]}),
        (["--mapping", '{"a": 1}'], {"mapping": {"a": 1}}),
        (["--inner", '{"depth": 2}'], {"inner": {"depth": 2}}),
        (["--either", '{"a": 1}'], {"either": {"a": 1}}),
        ("--either plain", {"either": "plain"}),
        ("--text_or_words one", {"text_or_words": "one"}),
        ("--text_or_words one two", {"text_or_words": ["one", "two"]}),
        ("--mode slow", {"mode": "slow"}),
        ("--level 2", {"level": 2}),
        ("--colour 2", {"colour": Colour.BLUE}),
        ("", {}),
    ],
)
def test_read_flags_accepted_line_gives_typed_values(
    line: str | list[str], typed: dict[str, Any]
) -> None:
    assert read(line) == typed


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--flag", "--flag needs a value: true or false"),
        ("--flag --whole 1", "--flag needs a value: true or false"),
        ("--whole", "--whole needs a value"),
        ("--whole 1 2", "--whole takes one value, so '2' belongs to no flag"),
        ("--who 1", "unknown flag --who; did you mean --whole?"),
        ("--maybe-text x", "unknown flag --maybe-text; did you mean --maybe_text?"),
        ("--no-flag", "unknown flag --no-flag"),
        ("whole 1", "'whole' belongs to no flag"),
        ("--mapping {a:1}", "mapping: expected a JSON object"),
        ("--words [a", "words: expected a JSON array"),
    ],
)
def test_read_flags_wrong_line_is_a_usage_error(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)

    assert message in caught.value.message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("--quiet", "true"),
        ("--quiet false", "false"),
        ("--quiet=true", "true"),
        ("--quiet --x 1", "true"),
    ],
)
def test_read_flags_boolean_that_may_stand_alone_is_true_then(line: str, value: str) -> None:
    class Command(BaseModel):
        quiet: bool = Field(False, json_schema_extra={MAY_STAND_ALONE: True})
        x: int = 0

    assert read_flags(line.split(), flags_of(Command))["quiet"] == value


def test_flags_of_required_field_has_no_default() -> None:
    class Needs(BaseModel):
        path: str

    (flag,) = flags_of(Needs)

    assert str(flag.default) == "PydanticUndefined"
