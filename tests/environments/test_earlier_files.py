"""Environment files as they were written for the first version of the library, unmodified.

They call the tokenizer and gymnasium by themselves: for the length of a prompt, for masks turn by
turn, for games by names that newer releases have removed.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import BaseEnv, BaseEnvConfig, OpenaiConfig, ScoredDataGroup
from atroposlib.scored_data import check_group
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tests.clients.installing import NotInstallableError, python_of
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until
from tests.fakes import ScriptedEngine
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

pytestmark = pytest.mark.slow

MAX_TOKENS = 4096
WITH_VERSION = """
import sys, pytest, transformers
assert transformers.__version__.startswith(sys.argv[1]), transformers.__version__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


class GymTaxiEnv(BaseEnv):
    """Rides of three turns; masks turn by turn from the chat template."""

    name = "gym_taxi"

    async def setup(self) -> None:
        self.iter = 0

    async def get_next_item(self) -> Any:
        self.iter += 1
        return {"seed": self.iter}

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return

    async def collect_trajectories(self, item: Any) -> Any:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for _ in range(self.config.group_size):
            messages = await self.ride(item["seed"])
            tokens: list[int] = []
            masks: list[int] = []
            for i, message in enumerate(messages):
                so_far = self.tokenizer.apply_chat_template(messages[: i + 1])
                added = so_far[len(tokens) :]
                masks += added if message["role"] == "assistant" else [-100] * len(added)
                tokens = so_far
            group["tokens"].append(tokens)
            group["masks"].append(masks)
            group["scores"].append(random.Random(len(group["scores"])).random())
        return group, []

    async def ride(self, seed: int) -> list[dict[str, str]]:
        import gymnasium

        game = gymnasium.make("Taxi-v3", render_mode="ansi")
        state, _ = game.reset(seed=seed)
        messages = []
        for _ in range(3):
            row, column, _, _ = game.unwrapped.decode(state)  # type: ignore[attr-defined]
            question = f"row {row}, column {column}\n{game.render()}"
            messages.append({"role": "user", "content": question})
            room = MAX_TOKENS - len(self.tokenizer.apply_chat_template(messages))
            answer = await self.server.chat_completion(messages=messages, n=1, max_tokens=room)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            state = game.step(int(text[-1]))[0]
        return messages


class MathEnv(BaseEnv):
    """One question; the prompt's length is taken off the limit."""

    name = "math"

    async def setup(self) -> None:
        return

    async def get_next_item(self) -> Any:
        return ({"role": "user", "content": "What is the number of cats?"},)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return

    async def collect_trajectories(self, item: Any) -> Any:
        chat = list(item)
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        completions = await self.server.chat_completion(
            messages=chat, n=self.config.group_size, max_tokens=MAX_TOKENS - len(prompt)
        )
        group = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for i, choice in enumerate(completions.choices):
            text = choice.message.content or ""
            row = tokenize_for_trainer(
                self.tokenizer,
                [*chat, {"role": "assistant", "content": text}],
                choice.finish_reason,
            )
            group["tokens"].append(row["tokens"])
            group["masks"].append(row["masks"])
            group["scores"].append(float(i % 2))
        return group, []


def check_lengths(groups: list[dict[str, Any]], requests: list[Any], env_class: Any) -> None:
    """Compare groups with their texts, and the room that was asked for with the prompts."""
    tokenizer = load_tokenizer("chatml")
    for group in groups:
        check_group(group)
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
            text = tokenizer.decode(tokens)
            assert tokens == tokenizer.encode(text, add_special_tokens=False)
            assert text.startswith("<|im_start|>user\n")
            assert "go" in tokenizer.decode([mask for mask in masks if mask != -100])
            assert "user" not in tokenizer.decode([mask for mask in masks if mask != -100])
    for request in requests:
        prompt = "".join(
            f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            for message in request["messages"]
        )
        opening = "<|im_start|>assistant\n" if env_class is MathEnv else ""
        num_prompt = len(tokenizer.encode(prompt + opening, add_special_tokens=False))
        assert request["max_tokens"] == MAX_TOKENS - num_prompt
        assert num_prompt > 10


def chats_of(engine: ScriptedEngine) -> list[Any]:
    return [request.body for request in engine.requests if "messages" in request.body]


def make_config(env_class: Any, **settings: Any) -> BaseEnvConfig:
    if env_class is GymTaxiEnv:
        import gymnasium  # noqa: F401 - as the file does at its top
    return BaseEnvConfig(
        group_size=2,
        use_wandb=False,
        max_token_length=MAX_TOKENS,
        tokenizer_name=str(FOLDER / "chatml"),
        include_messages=False,
        **settings,
    )


@pytest.mark.parametrize("env_class", [GymTaxiEnv, MathEnv])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of gymnasium, for the older name
async def test_file_of_the_first_version_writes_groups_of_the_right_length(
    env_class: Any, tmp_path: Path
) -> None:
    path = tmp_path / "groups.jsonl"
    config = make_config(env_class, total_steps=1, data_path_to_save_groups=str(path))
    async with ScriptedEngine(["go 0", "go 1", "go 0, then 1"]) as engine:
        env = env_class(config, [OpenaiConfig(base_url=engine.base_url, model_name="scripted")])
        env.process_mode = True
        env.n_groups_to_process, env.group_size_to_process = 2, 2
        await env.process_manager()

    groups = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(groups) == 2
    check_lengths(groups, chats_of(engine), env_class)


@pytest.mark.parametrize("env_class", [GymTaxiEnv, MathEnv])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_file_of_the_first_version_delivers_batches_of_the_right_length(
    env_class: Any, free_port: int
) -> None:
    service = LiveService(free_port)
    service.start()
    try:
        config = make_config(env_class, rollout_server_url=service.url)
        async with ScriptedEngine(["go 0", "go 1", "go 0, then 1"]) as engine:
            env = env_class(config, [OpenaiConfig(base_url=engine.base_url, model_name="scripted")])
            trainer = ScriptedTrainer(service.url, num_steps=3, max_token_len=MAX_TOKENS)
            async with trainer:
                await trainer.register()
                await serve_until(env, trainer.train(3))
    finally:
        service.stop()

    assert sum(len(group["tokens"]) for group in trainer.groups) == 3 * 4
    check_lengths(trainer.groups, chats_of(engine), env_class)


@pytest.mark.clients
@pytest.mark.timeout(1200)
def test_files_run_under_the_first_transformers_too() -> None:
    try:
        python = python_of("transformers-4", limit_s=600)
    except NotInstallableError as error:
        pytest.skip(str(error))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    folder = Path(__file__).parents[2]
    path = os.pathsep.join([str(packages), str(folder)])
    files = (__file__, "tests/utils/test_earlier_calls.py")

    run = subprocess.run(
        [sys.executable, "-c", WITH_VERSION, "4.45.", *files],
        capture_output=True,
        text=True,
        timeout=500,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )

    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
