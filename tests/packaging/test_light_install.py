"""What `pip install .` can do: the built wheel in a fresh environment, without extras."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from atroposlib.cli.new_env import KINDS
from tests.byte_tokenizer import save_byte_tokenizer
from tests.cli.test_new_env import REPLIES
from tests.fakes import ScriptedEngine
from tests.packaging.installed import REPOSITORY, Installed

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SERVICE_START = "trajectory API: http"


@pytest.mark.parametrize("name", PROJECT["scripts"])
def test_every_command_answers_help(name: str, light: Installed, tmp_path: Path) -> None:
    done = light.run(name, "--help", cwd=tmp_path)

    if done.returncode:  # then it says in one line which extra it needs
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert "pip install '.[" in done.stderr
    else:
        assert "usage" in done.stdout.lower(), done.stdout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
async def test_new_environment_is_checked_and_rolled_out(
    kind: str, light: Installed, tmp_path: Path
) -> None:
    written = light.run("atropos-new-env", "my_thing", "--kind", kind, cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    tokenizer = save_byte_tokenizer(tmp_path / "tokenizer")

    checked = light.run(
        *("python", "my_thing.py", "check", "--env.tokenizer_name", "tokenizer"), cwd=tmp_path
    )
    async with ScriptedEngine(REPLIES[kind], tokenizer=tokenizer) as engine:
        rolled_out = await asyncio.to_thread(
            light.run,
            *("python", "my_thing.py", "process"),
            *("--env.tokenizer_name", "tokenizer", "--openai.tokenizer_name", "tokenizer"),
            *("--env.use_wandb", "false", "--env.total_steps", "2", "--env.group_size", "3"),
            *("--env.ensure_scores_are_not_same", "false", "--env.max_token_length", "9000"),
            *("--env.data_path_to_save_groups", "groups.jsonl"),
            *("--openai.base_url", engine.base_url, "--openai.model_name", "scripted"),
            cwd=tmp_path,
        )

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert rolled_out.returncode == 0, rolled_out.stdout + rolled_out.stderr
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").open(encoding="utf-8")]
    assert [len(group["tokens"]) for group in groups] == [3, 3]
    prompt = tokenizer.decode(groups[0]["tokens"][0])
    assert "[assistant]" in prompt, "the tokenizer's own chat template wrote it"
    assert (tmp_path / "groups.html").exists()


def test_service_answers(light: Installed, tmp_path: Path) -> None:
    service = subprocess.Popen(
        [light.program("run-api"), "--port", "0"],
        cwd=tmp_path,
        env={**light.variables(), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert service.stdout is not None
    lines: list[str] = []
    try:
        for line in service.stdout:
            lines.append(line)
            if line.startswith(SERVICE_START):
                break
        assert SERVICE_START in "".join(lines), "".join(lines)
        address = lines[-1].split()[2]
        with urllib.request.urlopen(f"{address}/info", timeout=60) as answer:
            info = json.load(answer)
    finally:
        service.terminate()
        service.communicate(timeout=60)

    assert "batch_size" in info


def test_missing_extra_is_one_line_that_installs_it(light: Installed, tmp_path: Path) -> None:
    done = light.run("atropos-grpo", "--model", "any/model", cwd=tmp_path)

    assert done.returncode != 0
    assert "pip install '.[trainer]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_extras_that_include_others_name_this_distribution() -> None:
    extras = PROJECT["optional-dependencies"]
    own = [entry for entries in extras.values() for entry in entries if entry.endswith("]")]

    included = [entry.removesuffix("]").split("[") for entry in own]
    of_this = [names for name, names in included if name == PROJECT["name"]]
    assert len(of_this) == 5
    assert {name for names in of_this for name in names.split(",")} <= set(extras)
