"""The environment of the README works as printed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atroposlib.envs import base
from atroposlib.envs.base import APIServerConfig
from atroposlib.scored_data import check_group
from tests.fakes import ScriptedEngine

README = Path(base.__file__).with_name("README.md")


def readme_environment() -> type[Any]:
    code, *_ = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "addition"}
    exec(compile(code, str(README), "exec"), namespace)
    return namespace["AdditionEnv"]


class Adder:
    """Answers every second question right."""

    def __init__(self) -> None:
        self.num_answers = 0

    def __call__(self, prompt: str) -> str:
        question = re.search(r"(\d+) \+ (\d+)", prompt)
        if question is None:
            return "?"  # the library asks once what the engine can do
        self.num_answers += 1
        return str(int(question[1]) + int(question[2]) + self.num_answers % 2)


async def test_readme_environment_processes_and_evaluates(
    make_env: Callable[..., Any], tmp_path: Path
) -> None:
    env_cls = readme_environment()
    config, _ = env_cls.config_init()
    settings = {"use_wandb": False, "group_size": 4, "metrics_path": "metrics.jsonl"}
    async with ScriptedEngine(replies=Adder()) as engine:
        make_env()  # puts the character tokenizer in place
        env = env_cls(
            config.model_copy(update={**settings, "data_path_to_save_groups": "groups.jsonl"}),
            [APIServerConfig(model_name="m", base_url=engine.base_url, server_type="vllm")],
        )
        env.n_groups_to_process, env.group_size_to_process = 2, 4
        await env.process_manager()
        evaluated = env_cls(config.model_copy(update=settings), env.server_configs)
        await evaluated._run_evaluate()

    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [sorted(group["scores"]) for group in groups] == [[0.0, 0.0, 1.0, 1.0]] * 2
    for group in groups:
        check_group(group)
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["eval/accuracy"] == 0.5


def test_readme_lists_every_module_of_the_folder() -> None:
    text = README.read_text(encoding="utf-8")
    patterns = [name.replace("*", ".*") for name in re.findall(r"`([\w*]+\.py)`", text)]

    modules = [path.name for path in README.parent.glob("*.py") if path.name != "__init__.py"]

    missing = [m for m in modules if not any(re.fullmatch(p, m) for p in patterns)]
    assert missing == []
