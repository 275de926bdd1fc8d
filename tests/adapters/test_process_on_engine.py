"""`atropos-env KIND:NAME process` of each ecosystem on one real vLLM: 20 groups, exact tokens.

The model is of random weights, so nothing here is about scores. The engine is asked again for the
logprob of every token that a group says was sampled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from atroposlib.scored_data import IGNORE_INDEX, check_group
from example_trainer.processes import find_free_port
from tests.adapters.engine_tokens import mismatches
from tests.adapters.own_environments import environment_of, python_with
from tests.adapters.remote_servers import ROOT, Server
from tests.clients.installing import NotInstallableError
from tests.end_to_end.conftest import EngineWithModel
from tests.environments.test_process_on_engine import noisy_engine

__all__ = ["noisy_engine"]

pytestmark = [pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(1500)]

NUM_GROUPS = 20
LIMIT_S = 900


@dataclass(frozen=True)
class Case:
    """One task set."""

    spec: str
    """`KIND:NAME`; `{url}` is that of the server."""
    ecosystem: str | None = None
    """Environment of the command; None means the main one."""
    args: tuple[str, ...] = ()
    """Words after `--args`; `{python}`, `{folder}` and `{url}` are replaced."""
    flags: tuple[str, ...] = ()
    server: tuple[str, str] | None = None
    """Module of a server, and the ecosystem whose Python runs it."""


MCP_SERVER = ROOT / "tests/adapters/mcp_servers.py"
CASES = {
    "dataset": Case(f"dataset:{ROOT}/environments/data/gsm8k_sample/train.jsonl"),
    "frozen_lake": Case("gymnasium:FrozenLake-v1"),
    "gem": Case("gem:game:GuessTheNumber-v0-easy", "gem"),
    "inspect": Case("inspect_ai:{folder}/sums.py@sums", "inspect_ai", ("num_workers=2",)),
    "mcp": Case(
        "mcp:{folder}/tasks.jsonl",
        args=(
            "servers={{near: '{python} {mcp} {folder}', far: '{python} {mcp} {folder} --deaf'}}",
            "eval_every=5",
        ),
    ),
    "nemo_gym": Case(
        "nemo-gym:{url}/counter",
        "nemo_gym",
        ("tasks={folder}/counter.jsonl",),
        server=("tests.adapters.serve_nemo", "nemo_gym"),
    ),
    "openenv": Case(
        "openenv:{url}/guess", "openenv", server=("tests.adapters.serve_openenv", "openenv")
    ),
    "ors": Case("ors:{url}#sums", "ors", server=("tests.adapters.serve_ors", "ors")),
    "reasoning_gym": Case("reasoning-gym:chain_sum+leg_counting"),
    "textarena": Case("textarena:GuessTheNumber-v0", "games"),
    "textworld": Case("textworld:tw-coin_collector", "games", ("settings={{level: 5}}",)),
    "verifiers_sophistry": Case("verifiers:sophistry-bench-sprint", "verifiers_rubric"),
    "verifiers_stardata": Case("verifiers:stardata.envs.constraint_gym", "verifiers_rubric"),
}

SUMS = """
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, system_message


@task
def sums() -> Task:
    samples = [Sample(input=f"What is {n} + {n}?", target=str(2 * n)) for n in range(30)]
    solver = [system_message("Give only the sum."), generate()]
    return Task(dataset=MemoryDataset(samples), solver=solver, scorer=includes())
"""
COUNTER_TASK = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "Count to 3."}],
        "tools": [
            {
                "type": "function",
                "name": "increment_counter",
                "description": "Add to the counter.",
                "parameters": {
                    "type": "object",
                    "properties": {"count": {"type": "integer"}},
                    "required": ["count"],
                },
                "strict": True,
            }
        ],
    },
    "initial_count": 0,
    "expected_count": 3,
}


@pytest.mark.parametrize("name", CASES)
def test_process_makes_groups_of_the_engines_own_tokens(
    name: str, noisy_engine: EngineWithModel, tmp_path: Path
) -> None:
    case = CASES[name]
    python = installed(case.ecosystem)
    write_tasks(tmp_path)
    with ExitStack() as stack:
        url, server = "", None
        if case.server is not None:
            server = stack.enter_context(running(case.server[0], installed(case.server[1])))
            url = server.url
        names = {"python": python, "folder": tmp_path, "url": url, "mcp": MCP_SERVER}
        command = [str(python), "-m", "atroposlib.cli.env", case.spec.format(**names), "process"]
        if case.args:
            command += ["--args", *(word.format(**names) for word in case.args)]
        done = subprocess.run(
            [*command, *case.flags, *flags_of(noisy_engine, tmp_path)],
            cwd=tmp_path,
            env={**environment_of(python), "WANDB_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        num_left = None if server is None else server.sessions()

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").open()]
    assert len(groups) >= NUM_GROUPS
    num_tokens, wrong = 0, []
    for group in groups:
        check_group(group)
        num_tokens += sum(mask != IGNORE_INDEX for row in group["masks"] for mask in row)
        wrong += mismatches(group, base_url=noisy_engine.base_url, model=noisy_engine.model_name)
    print(f"{name}: {len(groups)} groups, {num_tokens} sampled tokens, {len(wrong)} mismatches")
    assert not wrong, wrong[:10]
    assert num_tokens > 0
    assert num_left in (None, 0) or name == "nemo_gym"  # its protocol cannot end a session


def installed(ecosystem: str | None) -> Path:
    if ecosystem is None:
        return Path(sys.executable)
    try:
        return python_with(ecosystem)
    except NotInstallableError as error:
        pytest.skip(f"{ecosystem}: {error}")


@contextmanager
def running(module: str, python: Path) -> Iterator[Server]:
    server = Server(module, find_free_port(), python=python)
    with server.running():
        yield server


def flags_of(engine: EngineWithModel, folder: Path) -> list[str]:
    """Return the flags of a small run at an engine."""
    return [
        *("--env.total_steps", str(NUM_GROUPS), "--env.group_size", "4"),
        *("--env.max_token_length", "3000", "--env.max_turn_tokens", "32", "--env.max_turns", "4"),
        *("--env.ensure_scores_are_not_same", "false", "--env.use_wandb", "false"),
        *("--env.tokenizer_name", str(engine.folder), "--env.num_eval_items", "0"),
        *("--env.data_path_to_save_groups", str(folder / "groups.jsonl")),
        *("--openai.base_url", engine.base_url, "--openai.model_name", engine.model_name),
    ]


def write_tasks(folder: Path) -> None:
    (folder / "sums.py").write_text(SUMS)
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + os.linesep for row in rows))
    (folder / "counter.jsonl").write_text((json.dumps(COUNTER_TASK) + os.linesep) * 5)
