"""Every token of a run whose processes are killed was sampled by the weights of its label.

    atropos-up: 2 engines, 2 environments, service, trainer  --kills-->  recorded batches
    the recorded steps, repeated with a checkpoint after each --------->  weights of each version

The logprob that an engine reported for a token is compared with a forward pass of the weights that
the token's version names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from example_trainer.config import TrainingConfig
from example_trainer.repeating import RecordedRun, repeat

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 20
KILLS = ((3, "torch_engine"), (6, "run_api"), (9, "talk.py"), (12, "example_trainer.grpo"))
"""Steps, and a word of the command line of the process that is killed after them."""
TOLERANCE = 1e-4
POLL_S = 0.2

DIGITS = """
import itertools, string
from atroposlib.envs.single_turn_env import SingleTurnEnv

class DigitsEnv(SingleTurnEnv):
    name = "digits"
    default_settings = {"group_size": 8, "max_token_length": 64, "use_wandb": False}

    async def setup(self):
        self.numbers = itertools.count()

    async def get_next_item(self):
        return next(self.numbers)

    def prompt(self, item):
        return [{"role": "user", "content": f"{item}: write digits"}]

    async def score(self, item, answer):
        return sum(c in string.digits for c in answer) / max(len(answer), 1)

if __name__ == "__main__":
    DigitsEnv.cli()
"""
TALK = """
import asyncio, itertools, random, string
from atroposlib.envs.multi_turn_env import Conversation, MultiTurnEnv, Reply

class Talk(Conversation):
    def __init__(self, item):
        self.item = item

    def opening(self):
        return [{"role": "user", "content": f"{self.item}: write letters"}]

    async def reply(self, turn):
        await asyncio.sleep(random.random() * 0.4)  # updates arrive between the turns
        letters = sum(c in string.ascii_letters for c in turn.answer)
        return Reply("go on", reward=letters / max(len(turn.answer), 1))

class TalkEnv(MultiTurnEnv):
    name = "talk"
    default_settings = {
        "group_size": 8, "max_turns": 4, "max_token_length": 320, "use_wandb": False,
    }

    async def setup(self):
        self.numbers = itertools.count()

    async def get_next_item(self):
        return next(self.numbers)

    def start_conversation(self, item):
        return Talk(item)

if __name__ == "__main__":
    TalkEnv.cli()
"""
RUN = f"""
name: labels
folder: .
output: out
engines:
  - {{kind: torch, name: first}}
  - {{kind: torch, name: second}}
environments:
  - {{program: digits.py}}
  - {{program: talk.py}}
trainer:
  model: model
  steps: {STEPS}
  sequences_per_step: 64
  context_tokens: 512
  flags: {{lr: 5.0e-4, checkpoint-interval: 5, vllm-restart-interval: 1, record-run: true}}
restarts:
  attempts: 20
"""


def steps_of(folder: Path) -> int:
    metrics = folder / "out/trainer_metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def kill(supervisor: subprocess.Popen[bytes], word: str) -> None:
    """Kill one process of a run; guardians, which have its words too, are left alone."""
    for process in psutil.Process(supervisor.pid).children(recursive=True):
        words = " ".join(process.cmdline())
        if word in words and "process_guardian" not in words:
            process.kill()
            return
    raise AssertionError(f"no process of the run has {word} in its command line")


@pytest.fixture(scope="module")
def run_with_kills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("labels")
    model = [sys.executable, "-m", "example_trainer.demo.small_model", "model"]
    subprocess.run(model, cwd=folder, check=True, capture_output=True)
    for name, text in (("digits.py", DIGITS), ("talk.py", TALK), ("run.yaml", RUN)):
        (folder / name).write_text(text)
    with (folder / "log").open("wb") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "example_trainer.cluster.cli", "run.yaml"],
            cwd=folder, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        kills = list(KILLS)
        while supervisor.poll() is None:
            if kills and steps_of(folder) >= kills[0][0]:
                kill(supervisor, kills.pop(0)[1])
            time.sleep(POLL_S)
        assert (supervisor.returncode, kills) == (0, []), (folder / "log").read_text()
        yield folder
    finally:
        supervisor.terminate()
        supervisor.wait()


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def versions_of(group: dict[str, Any], i: int, positions: list[int]) -> list[int | None]:
    """Return the version of each of these positions of a trajectory."""
    runs = (group.get("token_versions") or {i: None})[i]
    if runs is None:
        return [group["policy_version"]] * len(positions)
    by_token = [version for version, count in runs for _ in range(count)]
    return [by_token[position] for position in positions]


@pytest.mark.usefixtures("_threads_restored")
def test_each_token_has_the_logprob_of_the_weights_that_its_label_names(
    run_with_kills: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run_with_kills)
    recorded, repeated = Path("out/trainer"), Path("repeated")
    settings = RecordedRun.config

    def config(self: RecordedRun, output: Path, *, device: str | None) -> TrainingConfig:
        changes = {"checkpoint_interval": 1, "keep_checkpoints": None}
        return settings(self, output, device=device).model_copy(update=changes)

    monkeypatch.setattr(RecordedRun, "config", config)
    assert repeat(recorded, repeated) == STEPS

    @cache
    def weights(version: int) -> Any:
        folder = repeated / f"step_{version}" if version else Path("model")
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    torch.set_num_threads(1)  # the model is tiny
    run = RecordedRun(recorded)
    groups = [group for step in range(1, STEPS + 1) for group in run.batch_of(step).groups]
    wrong, seen = [], set()
    for group in groups:
        for i, ids in enumerate(group["tokens"]):
            positions = [j for j, mask in enumerate(group["masks"][i]) if mask != -100]
            versions = versions_of(group, i, positions)
            for version in set(versions):
                with torch.no_grad():
                    logits = weights(version)(torch.tensor([ids])).logits[0]
                logprobs = logits.log_softmax(-1)
                for j in (j for j, v in zip(positions, versions, strict=True) if v == version):
                    found = group["inference_logprobs"][i][j]
                    if abs(float(logprobs[j - 1, ids[j]]) - found) > TOLERANCE:
                        wrong.append((version, i, j, found))
            seen.update(versions)

    assert not wrong, json.dumps(wrong[:20])
    assert len(seen) > STEPS / 10  # groups are at most about six steps old
