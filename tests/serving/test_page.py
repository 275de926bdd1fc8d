"""The commands and programs of docs/serving_environments.md, against the packages that are here."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from example_trainer.processes import find_free_port
from tests.first_hour.blocks import Block, blocks_of
from tests.serving.test_verifiers import bisecting, model

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "serving_environments.md"
COMMAND = "atropos-serve-env "
SECTIONS = {
    "OpenEnv": "openenv",
    "Open Reward Standard": "openreward",
    "verifiers and prime-rl": "verifiers",
}


def blocks_of_section(title: str) -> list[Block]:
    """Return the blocks of a section, without the installation."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.M)[0]
    blocks = blocks_of(PAGE.name, section)
    return [block for block in blocks if not block.text.startswith("pip install '")]


@pytest.mark.parametrize("title", SECTIONS)
def test_sections_have_a_server_and_its_client(title: str) -> None:
    server, *clients = blocks_of_section(title)

    assert server.text.startswith(COMMAND)
    assert clients


@pytest.mark.parametrize("title", SECTIONS)
async def test_section_works_as_written(title: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(SECTIONS[title]) is None:
        pytest.skip(f"{SECTIONS[title]} is not installed")
    if title.startswith("verifiers") and shutil.which("uv") is None:
        pytest.skip("verifiers needs uv for the program of its chat harness")
    port = find_free_port()
    server, *clients = (block.text.replace("8010", str(port)) for block in blocks_of_section(title))
    bin_folder = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    paths = os.pathsep.join([str(REPOSITORY), str(tmp_path / "guessing")])
    env = {**os.environ, "PATH": bin_folder, "PYTHONPATH": paths}
    for folder in ("environments", "tests"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
    command = server.replace(COMMAND, f"exec {sys.executable} -m atroposlib.cli.serve_env ")
    running = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=tmp_path, env=env, stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    try:
        assert await running.stdout.readline()
        async with model(bisecting) as model_url:
            for block in clients:
                text = block.replace("http://localhost:9001/v1", model_url)
                text = re.sub(r"^pip install .*\n", "", text)  # it is on the path
                is_python = text.startswith(("from ", "import "))
                words = [sys.executable, "-"] if is_python else ["bash", "-es"]
                client = await asyncio.create_subprocess_exec(
                    *words,
                    cwd=tmp_path,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                output, _ = await client.communicate(text.encode())
                assert client.returncode == 0, output.decode()[-3000:]
    finally:
        running.terminate()
        output, _ = await running.communicate()
    assert output.decode().endswith("stopped; all episodes are closed\n")
