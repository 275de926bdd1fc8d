"""From a provider without token ids to trained models: groups, their exports, one step in TRL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.exporting.report import report_text
from atroposlib.exporting.run import run_export
from tests.environments.offline import read_groups, run_process
from tests.exporting.samples import dpo_request, read_records, sft_request, write_groups
from tests.fakes import ScriptedEngine

RIGHT, WRONG = "The answer is {}", "The answer is 99"


class Doubles(SingleTurnEnv):
    """What is i + i?"""

    name = "doubles"
    num_asked = 0

    async def get_next_item(self) -> int:
        self.num_asked += 1
        return self.num_asked

    def prompt(self, item: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"What is {item} + {item}?"}]

    async def score(self, item: int, answer: str) -> float:
        return 1.0 if answer == RIGHT.format(2 * item) else -1.0


def replies() -> Any:
    """Right and wrong answers by turns."""
    count = 0

    def reply(body: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal count
        count += 1
        number = int(body["messages"][-1]["content"].split()[2])
        return {"content": WRONG if count % 2 else RIGHT.format(2 * number)}

    return reply


async def process(tokenizer: Any, folder: Path, num_groups: int = 4) -> Path:
    """What `process` writes of a provider of chats that reports no ids."""
    path = folder / "groups.jsonl"
    async with ScriptedEngine(messages=replies(), offers_completions=False) as provider:
        env = Doubles(
            config=SingleTurnEnvConfig(
                tokenizer_name=tokenizer.name_or_path,
                max_token_length=128,
                use_wandb=False,
                include_messages=True,
                data_path_to_save_groups=str(path),
                metrics_path=str(folder / "metrics.jsonl"),
            ),
            server_configs=[
                APIServerConfig(base_url=provider.base_url, model_name="any", health_check=False)
            ],
        )
        await run_process(env, num_groups=num_groups, group_size=2)
        await env.server.close()
    return path


async def test_exports_hold_the_text_of_the_provider(tokenizer: Any, tmp_path: Path) -> None:
    source = await process(tokenizer, tmp_path)
    name = tokenizer.name_or_path

    report = run_export(
        sft_request(tmp_path / "sft.jsonl", source, format="trl", tokenizer=name), notify=print
    )
    run_export(
        dpo_request(tmp_path / "dpo.jsonl", source, format="trl", tokenizer=name), notify=print
    )

    end = tokenizer.eos_token
    examples, pairs = read_records(tmp_path / "sft.jsonl"), read_records(tmp_path / "dpo.jsonl")
    assert all(group["tokenized_from_text"] for group in read_groups(source))
    assert [e["completion"] for e in examples] == [RIGHT.format(2 * i) + end for i in (1, 2, 3, 4)]
    assert [p["chosen"] for p in pairs] == [e["completion"] for e in examples]
    assert {p["rejected"] for p in pairs} == {WRONG + end}
    asked = [{"role": "user", "content": "What is 1 + 1?"}]
    assert examples[0]["prompt"] == tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert "tokenized from text: 4 of the groups" in report_text(report, unit="examples")


def test_placeholder_tokens_reach_no_export(tokenizer: Any, tmp_path: Path) -> None:
    tokens = list(range(128))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    group = {
        "tokens": [tokens, tokens],
        "masks": [[-100, *tokens[1:]]] * 2,
        "scores": [1.0, -1.0],
        "messages": [chat, chat],
    }
    source = write_groups(tmp_path / "groups.jsonl", [group])

    for name, make in (("trl", sft_request), ("trl-messages", sft_request), ("trl", dpo_request)):
        path = tmp_path / f"{make.__name__}-{name}.jsonl"
        request = make(
            path, source, format=name, tokenizer=tokenizer.name_or_path, checks_tokenizer=False
        )
        report = run_export(request, notify=print)
        reason = "placeholder tokens of ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"
        assert (report.num_records, report.dropped[reason]) == (0, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trainers themselves
@pytest.mark.long
async def test_exports_train_a_model_in_trl(tokenizer: Any, tmp_path: Path) -> None:
    import datasets
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from example_trainer.demo.settings import TinyModelShape, build_model, save_tiny_model
    from tests.exporting.test_trains import settings

    source = await process(tokenizer, tmp_path)
    model = tmp_path / "model"
    shape = TinyModelShape(hidden_size=64, num_layers=1, num_heads=2)
    save_tiny_model(build_model(tokenizer, shape, seed=0), tokenizer, model)
    for make, trainer_class, config_class in (
        (sft_request, SFTTrainer, SFTConfig),
        (dpo_request, DPOTrainer, DPOConfig),
    ):
        path = tmp_path / f"{make.__name__}.jsonl"
        request = make(path, source, format="trl", tokenizer=tokenizer.name_or_path)
        run_export(request, notify=print)
        rows = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        )
        trainer = trainer_class(
            model=str(model), args=config_class(**settings(tmp_path)), train_dataset=rows
        )

        result = trainer.train()

        assert result.global_step == 1
        assert 0 < result.training_loss < 20
