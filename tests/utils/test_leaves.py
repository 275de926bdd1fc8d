from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from atroposlib.errors import ConfigError
from atroposlib.utils.display import display_metrics_table, format_metrics_table
from atroposlib.utils.io import parse_http_response
from atroposlib.utils.json_text import encode_mapping
from atroposlib.utils.length_penalty import length_factor
from atroposlib.utils.local_records import find_split, read_records
from atroposlib.utils.metrics import get_std_min_max_avg
from atroposlib.utils.text import (
    InertFormatter,
    hide_secrets,
    is_masked,
    mask_secrets,
    shown_name,
    texts_in_tag,
    without_secrets,
)
from atroposlib.utils.yaml_text import read_yaml


class Response:
    def __init__(self, body: Any, error: Exception | None = None) -> None:
        self.body, self.error = body, error

    def raise_for_status(self) -> None:
        if self.error:
            raise self.error

    async def json(self) -> Any:
        return self.body

    async def text(self) -> str:
        return str(self.body)


async def test_parse_http_response_returns_the_body() -> None:
    assert await parse_http_response(Response({"a": 1})) == {"a": 1}


async def test_parse_http_response_logs_what_the_server_said_and_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="404"):
        await parse_http_response(Response("no such env", RuntimeError("404")))

    assert "no such env" in caplog.text


def test_get_std_min_max_avg_adds_four_keys_in_place() -> None:
    metrics: dict[str, Any] = {"other": 1}

    assert get_std_min_max_avg("x", [1, 2, 3, 6], metrics) is metrics

    # mean 3, squares 4 1 0 9: population variance 3.5
    assert metrics == {
        "other": 1,
        "x_mean": 3.0,
        "x_std": pytest.approx(3.5**0.5),
        "x_max": 6,
        "x_min": 1,
    }


def test_get_std_min_max_avg_of_nothing_adds_nothing() -> None:
    assert get_std_min_max_avg("x", [], {}) == {}


def test_format_metrics_table_shows_name_value_and_direction() -> None:
    header, rule, row = format_metrics_table("gsm8k", {"eval/percent_correct": 0.5}).split("\n")

    assert len(header) == len(rule) == len(row)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["gsm8k", "1", "none", "", "percent correct", "↑", "0.5000", "±", "0.0000"]


def test_format_metrics_table_leaves_an_unknown_standard_error_empty() -> None:
    table = format_metrics_table("t", {"eval/a": 0.5, "eval/a_stderr": 0.25, "eval/b": 1.0})

    errors = [line.strip("|").split("|")[-1].strip() for line in table.split("\n")[2:]]
    assert errors == ["0.2500", ""]


def test_display_metrics_table_tolerates_no_metrics_and_odd_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display_metrics_table(None, {}, 0.0, 1.5)
    display_metrics_table("t", {"a": "text", "b": None, "c": float("nan")}, 0.0, 1.0)

    printed = capsys.readouterr().out
    assert "1.50 seconds" in printed
    assert "text" in printed
    assert "nan" in printed


@pytest.mark.parametrize(
    ("num_tokens", "factor"), [(0, 1.0), (50, 1.0), (75, 0.5), (100, 0.0), (500, 0.0)]
)
def test_length_factor_is_flat_then_linear(num_tokens: int, factor: float) -> None:
    assert length_factor(num_tokens, max_tokens=100, free_fraction=0.5) == factor


def test_encode_mapping_writes_long_rows_as_one_call_would() -> None:
    mapping = {
        "rows": [list(range(10_000)), [], [0.5] * 5_000],
        "long": list(range(9_000)),
        "mixed": [[1], {"a": [2]}, None],
        "text": "é",
    }

    assert encode_mapping(mapping) == json.dumps(mapping)


def test_encode_mapping_converts_numpy() -> None:
    mapping = {"a": np.float32(0.5), "b": np.arange(3), "c": [np.int64(1), {"d": np.bool_(True)}]}

    assert json.loads(encode_mapping(mapping)) == {"a": 0.5, "b": [0, 1, 2], "c": [1, {"d": True}]}


@pytest.mark.parametrize("value", [{1, 2}, object(), float("nan"), [float("inf")], b"x"])
def test_encode_mapping_names_the_key_at_fault(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^second: "):
        encode_mapping({"first": 1, "second": value})


def test_mask_secrets_hides_keys_and_keeps_the_rest() -> None:
    settings = {
        # pragma: allowlist nextline secret
        "openai": [{"api_key": "sk-1", "base_url": "http://u:p@host/v1", "model_name": "m"}],
        "env": {"tokenizer_name": "t", "max_token_length": 5, "hf_token": "x", "password": ""},
    }

    assert mask_secrets(settings) == {
        "openai": [{"api_key": "***", "base_url": "http://***@host/v1", "model_name": "m"}],
        "env": {"tokenizer_name": "t", "max_token_length": 5, "hf_token": "***", "password": ""},
    }
    assert settings["openai"][0]["api_key"] == "sk-1"  # pragma: allowlist secret


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET http://u:p@host:1/v1 failed", "GET http://***@host:1/v1 failed"),
        ("http://u:p@ss@host/v1", "http://***@host/v1"),
        ("https://host/v1?api_key=abc&n=2", "https://host/v1?api_key=***&n=2"),
        ("mail someone@host", "mail someone@host"),
    ],
)
def test_hide_secrets_hides_those_of_urls_in_a_text(text: str, shown: str) -> None:
    assert hide_secrets(text) == shown
    assert mask_secrets([text]) == [shown]


def test_without_secrets_shows_where_and_not_who() -> None:
    assert without_secrets("http://u:p@host:1/v1?key=abc") == "http://***@host:1/v1"
    assert without_secrets("http://host:1/v1") == "http://host:1/v1"
    assert without_secrets("http://host:1/v1?mail=a@b") == "http://host:1/v1"
    assert without_secrets("redis://:pa?ss@host:1/0") == "redis://***@host:1/0"
    assert without_secrets("redis://:pa/ss@host:1/0") == "redis://***@host:1/0"
    assert without_secrets("u:pa?ss@host:1") == "***@host:1"


@pytest.mark.parametrize(
    "name",
    ["token", "apikey", "auth", "X-Amz-Signature", "wandb_api_key", "client-secret", "passwd"],
)
def test_hide_secrets_knows_the_usual_names_of_keys_in_urls(name: str) -> None:
    assert hide_secrets(f"GET http://host/v1?a=1&{name}=abc&b=2") == (
        f"GET http://host/v1?a=1&{name}=***&b=2"
    )


def test_hide_secrets_leaves_other_options_of_urls() -> None:
    text = "http://host/v1?keys=1&monkey=2&max_tokens=3&author=4"
    assert hide_secrets(text) == text


def test_saved_address_whose_password_was_hidden_is_known_as_such() -> None:
    assert is_masked("***")
    assert is_masked("http://***@host/v1")
    assert not is_masked("http://host/v1")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("a b", "'a b'"),
        ("\x1b[2Jgone\nERROR", "'␛[2Jgone ERROR'"),
        ("x" * 5000, repr("x" * 99 + "…")),
    ],
)
def test_name_from_elsewhere_is_shown_harmless_and_short(name: str, shown: str) -> None:
    assert shown_name(name) == shown


def test_read_records_keeps_the_columns_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[{"a": 1, "b": 2}]')

    assert read_records(path, ["a"]) == [{"a": 1}]


def test_read_records_names_the_row_and_column_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"b": 1}\n')

    with pytest.raises(ConfigError, match="row 2 has no a; expected rows with the columns a"):
        read_records(path, ["a"])


def test_find_split_prefers_earlier_names(tmp_path: Path) -> None:
    (tmp_path / "validation.jsonl").touch()
    (tmp_path / "test-00000-of-00001.parquet").touch()

    assert find_split(tmp_path, ["test", "validation"]).name == "test-00000-of-00001.parquet"
    assert find_split(tmp_path, ["dev", "validation"]).name == "validation.jsonl"


def test_read_records_names_the_line_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')

    with pytest.raises(ConfigError, match=r"rows\.jsonl cannot be read \(line 3: .* at column 7\)"):
        read_records(path, ["a"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<a>1</a> <A>2</A>", ["1", "2"]),
        ("<a>1<a>2</a></a>", ["1<a>2"]),
        ("</a><a>1", []),
        ("<a>\n</a>", ["\n"]),
        ("<a>" * 200_000, []),
    ],
)
def test_texts_in_tag_are_those_of_the_first_pairs(text: str, found: list[str]) -> None:
    assert texts_in_tag(text, "a") == found


def test_inert_formatter_shows_control_characters_as_symbols() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", ("a\x1b[2J\nb",), None)

    assert InertFormatter().format(record).endswith("INFO x: a\u241b[2J\nb")


@pytest.mark.parametrize(
    "text",
    [
        "a: 2001-13-01",
        "a: !!bool q",
        "a: !!timestamp x",
        "a: !!int x",
        "[" * 100_000,
        "a: [",
        "a: \0",
    ],
)
def test_text_that_is_not_yaml_has_one_kind_of_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "&x [*x]",
        "&x {a: *x}",
        "\n".join(f"a{i}: &a{i} [{f'*a{i - 1},' * 10}]" if i else "a0: &a0 1" for i in range(9)),
    ],
)
def test_aliases_without_end_are_refused(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="refers to itself, or there are over"):
        read_yaml(text)


def test_aliases_and_many_values_are_read() -> None:
    assert read_yaml("a: &a {b: 1}\nc: {<<: *a, d: *a}") == {
        "a": {"b": 1},
        "c": {"b": 1, "d": {"b": 1}},
    }


def test_objects_of_a_yaml_text_are_not_made(tmp_path: Path) -> None:
    made = tmp_path / "made"

    with pytest.raises(yaml.YAMLError, match="python/object"):
        read_yaml(f"!!python/object/apply:os.mkdir [{made}]")

    assert not made.exists()
