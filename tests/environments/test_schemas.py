"""Example objects of models, errors in them, and their texts, without a sandbox."""

from __future__ import annotations

import copy
import datetime
import enum
import json
import sys
from random import Random
from typing import Any, Literal

import pytest
import yaml
from pydantic import AnyUrl, BaseModel, EmailStr, Field, ValidationError

from atroposlib.errors import ConfigError
from atroposlib.tasks.schemas import (
    ERROR_TYPES,
    ObjectError,
    example_of,
    possible_errors,
    spoiled,
    write_object,
)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(BaseModel):
    name: str = Field(min_length=3, max_length=5)
    weight: float = Field(gt=0, lt=1)


class Machine(BaseModel):
    title: str
    parts: list[Part] = Field(min_length=2, max_length=3)
    color: Color
    kind: Literal["small"]
    built: datetime.date
    checked: datetime.datetime | None
    page: AnyUrl
    owner: EmailStr
    power: int = Field(ge=-5, le=-2)
    gears: int = Field(multiple_of=4, gt=4)
    spare: Part | None = None
    notes: dict[str, int]
    pair: tuple[int, str]
    is_on: bool


class Tree(BaseModel):
    label: str
    children: list[Tree] = []


class Endless(BaseModel):
    inner: Endless


MODELS: tuple[type[BaseModel], ...] = (Part, Machine, Tree)


@pytest.mark.parametrize("model", MODELS)
def test_example_fits_its_model(model: type[BaseModel]) -> None:
    for seed in range(50):
        example = example_of(model.model_json_schema(), Random(seed))

        model.model_validate(example)
        assert example == example_of(model.model_json_schema(), Random(seed))


def test_model_without_an_end_is_an_error() -> None:
    with pytest.raises(ConfigError, match="recursive without an end"):
        example_of(Endless.model_json_schema(), Random(0))


def test_every_possible_error_makes_an_object_invalid() -> None:
    schema = Machine.model_json_schema()
    example = example_of(schema, Random(3))
    before = copy.deepcopy(example)
    errors = possible_errors(example, schema)

    for error in errors:
        with pytest.raises(ValidationError):
            Machine.model_validate(spoiled(example, [error]))
    assert {error.kind for error in errors} == set(ERROR_TYPES)
    assert example == before
    kinds = {error.path: error.kind for error in errors if error.kind != "required_field_missing"}
    assert kinds["color",] == kinds["kind",] == "enum_error"
    assert ("parts", 0, "weight") in kinds


def test_several_errors_are_applied_and_those_below_another_are_left_out() -> None:
    example = {"a": {"b": 1}, "c": 2}
    errors = [
        ObjectError("required_field_missing", ("a",), None),
        ObjectError("type_error", ("a", "b"), "several"),
        ObjectError("type_error", ("c",), "several"),
    ]

    assert spoiled(example, errors) == {"c": "several"}


OBJECT: dict[str, Any] = {
    "text": 'say "hi" & <go>: ä',
    "number": -2,
    "ratio": 0.5,
    "flag": True,
    "words": ["a: b", "# c", ""],
    "nested": {"deep": [{"x": 1}, {"x": 2}], "odd key": "v"},
}


def test_text_of_an_object_is_read_as_the_same_object() -> None:
    assert json.loads(write_object(OBJECT, "json")) == OBJECT
    assert yaml.safe_load(write_object(OBJECT, "yaml")) == OBJECT


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is part of Python 3.11")
def test_toml_text_is_read_as_the_same_object_without_its_nulls() -> None:
    import tomllib

    text = write_object({**OBJECT, "nothing": None, "empty": {}, "list": []}, "toml")

    assert tomllib.loads(text) == {**OBJECT, "empty": {}, "list": []}


def test_xml_text_has_an_item_per_entry() -> None:
    text = write_object({"a": [1, True], "b": None, "c": "<&>", "d": []}, "xml", root="r")

    assert text.split() == [
        *("<r>", "<a>", "<item>1</item>", "<item>true</item>", "</a>"),
        *("<b/>", "<c>&lt;&amp;&gt;</c>", "<d/>", "</r>"),
    ]


@pytest.mark.parametrize(
    ("field", "kinds"),
    [
        ({"type": "string", "maxLength": 2**32 - 1}, ["type_error"]),
        ({"type": "string", "maxLength": 20}, ["type_error", "constraint_error"]),
        ({"type": "array", "items": {"const": 1}, "maxItems": 2**40}, ["type_error", "enum_error"]),
    ],
)
def test_bound_that_only_a_huge_value_breaks_is_left_alone(
    field: dict[str, Any], kinds: list[str]
) -> None:
    schema = {"type": "object", "properties": {"x": field}}

    errors = possible_errors(example_of(schema, Random(0)), schema)

    assert [error.kind for error in errors] == kinds


@pytest.mark.parametrize(
    "field",
    [
        {"type": "string", "minLength": 10**12},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**12},
    ],
)
def test_model_that_demands_a_huge_value_is_refused(field: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": field}}

    with pytest.raises(ConfigError, match=r"at least 1,000,000,000,000 .*; expected at most"):
        example_of(schema, Random(0))
