"""The helpers of `atroposlib.utils.cli`, with the values of the contract."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError
from pydantic_cli import FailedExecutionException

from atroposlib.errors import ConfigError
from atroposlib.utils.cli import (
    UsageError,
    adjust_model_defaults,
    extract_namespace,
    get_double_dash_flags,
    get_prefixed_pydantic_model,
    merge_dicts,
    refused_values,
)
from atroposlib.utils.text import near_name


class Sample(BaseModel):
    needed: int
    size: int = Field(4, ge=1, description="How many.")
    tags: list[str] = Field(default_factory=lambda: ["a"], description="Labels.")


def test_get_prefixed_pydantic_model_renames_fields_and_keeps_default_and_description() -> None:
    prefixed = get_prefixed_pydantic_model(Sample, "env.")

    assert prefixed.__name__ == "Env.Sample"
    assert list(prefixed.model_fields) == ["env.needed", "env.size", "env.tags"]
    assert prefixed.model_fields["env.needed"].is_required()
    assert prefixed.model_fields["env.size"].description == "How many."
    instance = prefixed(**{"env.needed": 1, "env.size": 0})  # ranges are not carried over
    assert instance.model_dump() == {"env.needed": 1, "env.size": 0, "env.tags": ["a"]}


@pytest.mark.parametrize(
    ("dicts", "merged"),
    [
        ([], {}),
        ([{"a": {"b": 1}}, {"a": {"c": 2}, "d": 1}], {"a": {"b": 1, "c": 2}, "d": 1}),
        ([{"a": {"b": 1}}, {"a": {"c": 2}, "d": 1}, {"a": None}], {"a": None, "d": 1}),
        ([{"a": 1}, {"a": {"b": 2}}], {"a": {"b": 2}}),
    ],
)
def test_merge_dicts_merges_recursively_and_later_wins(
    dicts: list[dict[str, Any]], merged: dict[str, Any]
) -> None:
    assert merge_dicts(*dicts) == merged


def test_merge_dicts_leaves_its_arguments_alone() -> None:
    first = {"a": {"b": 1}}

    merge_dicts(first, {"a": {"b": 2}})

    assert first == {"a": {"b": 1}}


def test_extract_namespace_mapping_keeps_only_the_prefix() -> None:
    assert extract_namespace({"env.x": 1, "envy": 2, "env.": 3}, "env.") == {"x": 1, "": 3}


def test_extract_namespace_objects_are_dumped() -> None:
    prefixed = get_prefixed_pydantic_model(Sample, "env.")(**{"env.needed": 1})
    record = SimpleNamespace(to_dict=lambda: {"env.x": 1})

    assert extract_namespace(prefixed, "env.")["needed"] == 1
    assert extract_namespace(record, "env.") == {"x": 1}


def test_extract_namespace_other_object_is_refused() -> None:
    with pytest.raises(TypeError, match="cannot read settings from int"):
        extract_namespace(3, "env.")


def test_adjust_model_defaults_changes_defaults_and_ignores_unknown_names() -> None:
    adjusted = adjust_model_defaults(Sample, {"size": 9, "unknown": 1, "tags": None})

    instance = adjusted(needed=1)

    assert adjusted.__name__ == "SampleWithDefaults"
    assert issubclass(adjusted, Sample)
    assert instance.model_dump() == {"needed": 1, "size": 9, "tags": ["a"]}
    assert adjusted.model_fields["size"].description == "How many."


def test_adjust_model_defaults_takes_an_instance() -> None:
    adjusted = adjust_model_defaults(Sample, Sample(needed=3, size=5, tags=["z"]))

    assert adjusted().model_dump() == {"needed": 3, "size": 5, "tags": ["z"]}


def test_get_double_dash_flags_reads_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "--a=1 --b 2 -c 3 --d --e None --f -1 --=v -- --g= --h=None pos --i=x=y --j -1e-3 --k -x"
    monkeypatch.setattr("sys.argv", ["program", *line.split()])

    # `--f -1` is a value here, unlike in earlier versions, where it became True.
    assert get_double_dash_flags() == {
        "a": "1",
        "b": "2",
        "d": True,
        "e": None,
        "f": "-1",
        "g": "",
        "h": None,
        "i": "x=y",
        "j": "-1e-3",
        "k": True,
    }


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("env.grup_size", "; did you mean env.group_size?"),
        ("group_size", "; did you mean env.group_size?"),
        ("base-url", "; did you mean openai.base_url?"),
        ("zzz", ""),
    ],
)
def test_near_name_suggests_the_most_similar(typed: str, hint: str) -> None:
    assert near_name(typed, ["env.group_size", "env.batch_size", "openai.base_url"]) == hint


def test_usage_error_is_every_kind_callers_catch() -> None:
    error = UsageError("no such flag")

    assert isinstance(error, ConfigError)
    assert isinstance(error, FailedExecutionException)
    assert (error.exit_code, error.message, str(error)) == (2, "no such flag", "no such flag")


def test_refused_values_names_field_reason_and_value() -> None:
    with pytest.raises(ValidationError) as caught:
        Sample(needed="x", size=0)  # type: ignore[arg-type]

    message = str(refused_values(caught.value, "env."))

    assert "env.needed: input should be a valid integer" in message
    assert "(got 'x')" in message
    assert "env.size: input should be greater than or equal to 1 (got 0)" in message


def test_refused_values_does_not_show_keys() -> None:
    class Server(BaseModel):
        api_key: int

    with pytest.raises(ValidationError) as caught:
        Server(api_key="sk-secret")  # type: ignore[arg-type]

    assert "sk-secret" not in str(refused_values(caught.value))
