"""`atropos-env`: the words before the environment's own command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.cli.env import read_arguments, split_arguments
from atroposlib.utils.cli import UsageError

pytestmark = pytest.mark.slow


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atroposlib.cli.env", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)


def test_arguments_are_pairs_json_and_yaml_files(tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text("actions: {0: left}\nprompt: go\n")

    arguments = read_arguments([str(file), '{"size": 4}', "prompt=stay", "names=[a, b]"])

    assert arguments == {
        "actions": {0: "left"},
        "prompt": "stay",
        "size": 4,
        "names": ["a", "b"],
    }


def test_arguments_end_at_the_next_flag() -> None:
    words = ["process", "--args", "a=1", "b=2", "--env.total_steps", "4", "--args=c=x"]

    assert split_arguments(words) == (
        ["process", "--env.total_steps", "4"],
        {"a": 1, "b": 2, "c": "x"},
    )


@pytest.mark.parametrize("word", ["missing.yaml", "{", "[1, 2]", "{1: 2}", "a b=1"])
def test_word_that_is_no_argument_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="--args"):
        read_arguments([word])


@pytest.mark.parametrize("value", ["2024-01-31", "{day: 2024-01-31}", "!!binary aGk=", "!!set {a}"])
def test_value_of_a_type_that_json_lacks_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match=r"--args since: .* needs quotes"):
        read_arguments([f"since={value}"])


def test_list_names_the_kinds_and_what_is_missing() -> None:
    listed = run("list")

    assert listed.returncode == 0, listed.stderr
    assert "gymnasium      Gymnasium environments" in listed.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has this device")
@pytest.mark.parametrize("word", ["list", "gymnasium"])
def test_list_to_a_full_disk_ends_with_one_line(word: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "atroposlib.cli.env", word],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip

    assert done.returncode == 1
    assert done.stderr == "atropos-env: error: [Errno 28] No space left on device\n"


def test_kind_alone_shows_its_arguments() -> None:
    page = run("gymnasium")

    assert page.returncode == 0, page.stderr
    assert "NAME is an environment id" in page.stdout
    assert "ends_on_invalid" in page.stdout


def test_long_name_of_an_argument_is_apart_from_its_description() -> None:
    shown = run("textarena")

    assert "  opponent_api_key_variable Environment variable" in shown.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gymnasum:FrozenLake-v1", "check"], "did you mean gymnasium?"),
        (["gymnasium", "check"], "expected gymnasium:NAME"),
        (["gymnasium:FrozenLake-v1", "check", "--args", "prompts=x"], "did you mean prompt?"),
        (["gymnasium:FrozenLake-v1", "checks"], "did you mean check?"),
        (["gymnasium:FrozenLak-v1", "check"], "Did you mean: `FrozenLake`?"),
        (
            ["gymnasium:FrozenLake-v1", "check", "--args", "env_kwargs={map_name: 9x9}"],
            "failed with env_kwargs {'is_slippery': False, 'map_name': '9x9'}: KeyError: '9x9'",
        ),
    ],
)
def test_mistake_is_one_line(words: list[str], message: str) -> None:
    done = run(*words)

    assert done.returncode == 2
    [line] = done.stderr.strip().splitlines()
    assert message in line
    assert done.stdout == ""


def test_server_that_is_down_is_one_line_of_check() -> None:
    done = run("nemo-gym:http://127.0.0.1:1", "check", "--args", "tasks=none.jsonl")

    assert done.returncode == 2
    assert done.stdout == ""
    assert "none.jsonl" in done.stderr.strip().splitlines()[-1]


def test_page_of_a_kind_shows_computed_defaults() -> None:
    page = run("gymnasium")

    assert "(default {})" in page.stdout
    assert max(map(len, page.stdout.splitlines())) <= 100


def test_check_of_frozen_lake_passes(tmp_path: Path) -> None:
    done = run("gymnasium:FrozenLake-v1", "check", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "FAILED" not in done.stdout
