"""`atropos-new-env`: what it writes runs at once, and it overwrites nothing."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.cli.new_env import KINDS, TEMPLATES, main, write_environment
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from tests.byte_tokenizer import save_byte_tokenizer
from tests.environments.offline import read_groups
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def later(*kinds: str) -> list[Any]:
    """Kinds that are tried with `--run-long` only."""
    return [pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


def environment_of_processes() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def run_python(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment_of_processes(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
def test_written_test_and_the_check_in_it_pass(kind: str, tmp_path: Path) -> None:
    write_environment("my_thing", kind=kind, folder=tmp_path)

    done = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d passed", done.stdout)


def test_check_passes_for_a_scaffold_of_an_earlier_release(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests/cli/earlier_scaffold", tmp_path, dirs_exist_ok=True)

    done = run_python("price_list.py", "check", folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["judge", *later("single-turn", "game", "tools")])
def test_check_command_of_a_new_environment_passes_and_leaves_nothing(
    kind: str, tmp_path: Path
) -> None:
    paths = write_environment("my_thing", kind=kind, folder=tmp_path)

    done = run_python("my_thing.py", "check", folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout
    left = {path for path in tmp_path.iterdir() if path.name != "__pycache__"}
    assert left == set(paths)


REPLIES = {
    "judge": ["<rating>5</rating>"],
    "single-turn": ["ok", "<answer>Lima</answer>", "<answer>Oslo</answer>", "none"],
    "game": ["ok", "<guess>apple</guess>", "<guess>river</guess>", "no guess"],
    "tools": [
        "ok",
        '<tool_call>{"name": "price", "arguments": {"product": "pear"}}</tool_call>',
        '<tool_call>{"name": "price", "arguments": {"product": "gold"}}</tool_call>',
        "<answer>17</answer>",
    ],
}


@pytest.mark.parametrize("kind", ["game", *later("single-turn", "tools", "judge")])
@pytest.mark.long
async def test_process_of_a_new_environment_writes_groups_and_a_page(
    kind: str, tmp_path: Path
) -> None:
    write_environment("my_thing", kind=kind, folder=tmp_path)
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")
    async with ScriptedEngine(REPLIES[kind], tokenizer=tokenizer) as engine:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "my_thing.py", "process"),
            *("--env.tokenizer_name", "tokenizer", "--openai.tokenizer_name", "tokenizer"),
            *("--env.use_wandb", "false", "--env.total_steps", "2", "--env.group_size", "3"),
            *("--env.ensure_scores_are_not_same", "false", "--env.max_token_length", "9000"),
            *("--env.data_path_to_save_groups", "groups.jsonl"),
            *("--openai.base_url", engine.base_url, "--openai.model_name", "scripted"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
            env=environment_of_processes(),
        )
        output, _ = await asyncio.wait_for(process.communicate(), timeout=120)

    assert process.returncode == 0, output.decode()
    groups = read_groups(tmp_path / "groups.jsonl")
    assert len(groups) == 2
    for group in groups:
        check_group(group)
        assert ("advantages" in group) == (kind in ("game", "tools"))
    assert (tmp_path / "groups.html").exists()


def test_scores_take_linear_time_on_a_text_of_opening_tags() -> None:
    templates = (TEMPLATES / f"{kind.replace('-', '_')}.py.txt" for kind in KINDS)

    assert not [path.name for path in templates if "(.*?)" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("kind", KINDS)
def test_written_code_is_formatted_and_small(kind: str, tmp_path: Path) -> None:
    script, *_ = write_environment("my_thing", kind=kind, folder=tmp_path)
    rules = ("--isolated", "--line-length", "100")

    formatted = run_python("-m", "ruff", "format", *rules, "--diff", ".", folder=tmp_path)
    checked = run_python(
        "-m", "ruff", "check", *rules, "--select", "E,F,W,I,UP,B", ".", folder=tmp_path
    )

    assert formatted.returncode == 0, formatted.stdout
    assert checked.returncode == 0, checked.stdout
    assert len(script.read_text().splitlines()) <= 60


def test_main_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["atropos-new-env", "my_thing", "--dir", "new/place"])

    main()

    said = capsys.readouterr().out
    assert said.startswith("wrote new/place/my_thing.py, new/place/test_my_thing.py and")
    assert "new/place/my_thing.py check" in said
    assert (tmp_path / "new" / "place" / "my_thing_data.jsonl").exists()


def test_nothing_is_overwritten_and_nothing_written_beside(tmp_path: Path) -> None:
    mine = tmp_path / "test_my_thing.py"
    mine.write_text("mine")

    with pytest.raises(ConfigError, match=r"test_my_thing\.py would be overwritten"):
        write_environment("my_thing", kind="game", folder=tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["test_my_thing.py"]
    assert mine.read_text() == "mine"


def test_full_disk_leaves_no_part_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def fail_on_data(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == "my_thing_data.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", fail_on_data)

    with pytest.raises(OSError, match="No space left"):
        write_environment("my_thing", kind="game", folder=tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my-env", "use my_env"),
        ("MyEnv", "use my_env"),
        ("2fast", "use fast"),
        ("../up", "use up"),
        ("", "expected lower-case letters"),
        ("größe", "expected lower-case letters"),
        ("class", "a keyword of Python"),
        ("match", "a keyword of Python"),
        ("test_words", "pytest would collect"),
        ("words_test", "pytest would collect"),
        ("conftest", "pytest would collect"),
        ("random", "use random_env"),
        ("numpy", "use numpy_env"),
        ("atroposlib", "would shadow the module of that name"),
    ],
)
def test_name_that_cannot_be_used_is_refused_with_a_remedy(
    name: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        write_environment(name, kind="game", folder=tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_refusal_ends_with_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["atropos-new-env", "random"])

    with pytest.raises(SystemExit) as ending:
        main()

    assert ending.value.code == 2
    assert capsys.readouterr().err.startswith("atropos-new-env: error: name 'random'")
