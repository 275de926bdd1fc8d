"""What a file would serve is known without serving it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.cli.new_env import KINDS, write_environment

pytestmark = pytest.mark.slow

EMPTY = """
from atroposlib.envs.single_turn_env import SingleTurnEnv

class Asks(SingleTurnEnv):
    name = "asks"

    async def get_next_item(self):
        return "question"

    def prompt(self, item):
        return [{"role": "user", "content": item}]

    async def score(self, item, answer):
        return float(len(answer))

"""


def describe(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atroposlib.envs.describe_script", str(script), *words],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind == "game" else pytest.mark.long) for kind in KINDS],
)
def test_describe_script_knows_every_scaffold(kind: str, tmp_path: Path) -> None:
    script, *_ = write_environment("my_words", kind=kind, folder=tmp_path)

    done = describe(script, "--env.group_size", "5")

    facts = json.loads(done.stdout)
    assert facts["name"] == "my_words"
    assert facts["group_size"] == 5
    assert facts["limits_conversation"]
    assert facts["is_evaluated"]


def test_describe_script_without_evaluation_items_says_so(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(
        f"{EMPTY}\nprint('loading')\nif __name__ == '__main__':\n    Asks.cli()\n", encoding="utf-8"
    )

    facts = json.loads(describe(script).stdout)

    assert (facts["class_name"], facts["is_evaluated"]) == ("Asks", False)


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        ("x = 1\n", (), "holds no environment"),
        (EMPTY, (), "end it with `if __name__ == '__main__': Asks.cli()`"),
        (f"{EMPTY}\nAsks.cli()\n", ("--env.grup_size", "3"), "did you mean --env.group_size?"),
        (f"{EMPTY}\nAsks.cli()\n", ("--env.group_size", "0"), "env.group_size"),
        (f"{EMPTY}\nclass Half(SingleTurnEnv):\n    pass\nHalf.cli()\n", (), "is not complete"),
    ],
)
def test_describe_script_refuses_in_one_line(
    content: str, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    script = tmp_path / "asks.py"
    script.write_text(content, encoding="utf-8")

    done = describe(script, *words)

    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_describe_script_reads_a_module_with_an_argument() -> None:
    words = ["-m", "atroposlib.cli.env", "gymnasium:FrozenLake-v1", "--env.group_size", "5"]
    command = [sys.executable, "-m", "atroposlib.envs.describe_script", *words]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    facts = json.loads(done.stdout)
    assert facts["name"] == "gymnasium_FrozenLake-v1"
    assert facts["group_size"] == 5
    assert facts["limits_conversation"]


def test_describe_script_reads_the_yaml_file_of_serve(tmp_path: Path) -> None:
    script, config = tmp_path / "asks.py", tmp_path / "asks.yaml"
    script.write_text(f"{EMPTY}\nAsks.cli()\n", encoding="utf-8")

    config.write_text("env: {group_size: 3, max_token_length: 99}", encoding="utf-8")
    flags = ["--config", str(config), "--env.group_size", "5"]
    facts = json.loads(describe(script, *flags).stdout)
    config.write_text("env: {grup_size: 3}", encoding="utf-8")
    refused = describe(script, *flags)

    assert (facts["group_size"], facts["max_token_length"]) == (5, 99)
    assert refused.returncode == 2
    assert "env.grup_size in the YAML file: no such setting" in refused.stderr
