"""docs/other_trainers.md: its programs run, its commands parse, its config names what there is."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from atroposlib.cli import dpo, sft, trainer_check
from example_trainer.cluster.run_file import RunFile
from example_trainer.recipes import trl_grpo
from tests.api.helpers import make_group
from tests.envs.live_service import LiveService

PAGE = (Path(__file__).parents[3] / "docs" / "other_trainers.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    live = LiveService(free_port)
    live.start()
    yield live
    live.stop()


def program(index: int, service: LiveService) -> str:
    return blocks("python")[index].replace("http://localhost:8000", service.url)


def post_when_registered(service: LiveService) -> threading.Thread:
    def post() -> None:
        while httpx.get(f"{service.url}/info").json()["batch_size"] == -1:
            time.sleep(0.01)
        for _ in range(4):
            httpx.post(f"{service.url}/scored_data", json=make_group(2))

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def test_the_loop_trains_the_whole_run(service, capsys):
    posting = post_when_registered(service)

    exec(program(0, service), {})

    posting.join()
    assert capsys.readouterr().out.count("[0.0, 0.0] [1, 1]") == 4
    status = httpx.get(f"{service.url}/status").json()
    assert (status["current_step"], status["policy_version"]) == (2, 2)


def test_the_loop_in_an_event_loop_does_too(service, capsys):
    names: dict = {}
    exec(program(1, service), names)
    posting = post_when_registered(service)

    asyncio.run(names["train"]())

    posting.join()
    assert capsys.readouterr().out == "2\n2\n"
    assert httpx.get(f"{service.url}/status").json()["current_step"] == 2


def test_the_arguments_of_trl_and_axolotl_are_callables_of_their_kind(service):
    for_trl: dict = {}
    for_axolotl: dict = {}
    exec(program(2, service), for_trl)
    exec(program(6, service), for_axolotl)

    assert isinstance(for_trl["arguments"]["rollout_func"], trl_grpo.ServiceRollouts)
    assert list(inspect.signature(for_axolotl["rollout_func"]).parameters) == ["prompts", "trainer"]


def test_flags_of_the_run_file_are_flags_of_its_trainer():
    trainer = RunFile.model_validate(yaml.safe_load(blocks("yaml")[0])).trainer
    flags = {flag for action in trl_grpo._parser()._actions for flag in action.option_strings}

    assert trainer.program == trl_grpo.__name__
    assert {f"--{name}" for name in trainer.flags} <= flags


def test_the_config_of_axolotl_names_a_reward_that_takes_prompts_and_completions():
    config = yaml.safe_load(blocks("yaml")[1])
    (name,) = config["trl"]["reward_funcs"]
    module, _, attribute = name.rpartition(".")

    reward = getattr(importlib.import_module(module), attribute)

    assert reward(["p"], ["c"], score=[0.5], others=1) == [0.5]
    assert len(inspect.signature(reward).parameters) >= 2  # Axolotl insists
    assert config["micro_batch_size"] * config["gradient_accumulation_steps"] == 32
    assert "batch_size=32, num_steps=20" in blocks("python")[6]
    assert config["max_steps"] == 20


def test_commands_have_flags_that_exist(capsys):
    doors = {
        "atropos-sft-gen": sft.main,
        "atropos-dpo-gen": dpo.main,
        "atropos-trainer-check": trainer_check.main,
    }
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line)
        if words[0] == "python":
            settings = trl_grpo._parser().parse_args(words[3:])
            assert settings.batch_size % settings.num_generations == 0
            continue
        flags = [word for word in words if word.startswith("--")]
        help_text = _help_of(doors[words[0]], words[0], capsys)
        assert not [flag for flag in flags if flag not in help_text]


def _help_of(main, name, capsys) -> str:
    import sys
    from unittest import mock

    with mock.patch.object(sys, "argv", [name, "--help"]), pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out
