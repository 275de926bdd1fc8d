from __future__ import annotations

from typing import Any

import datasets
import pytest

from atroposlib.errors import ConfigError
from environments.dataset_environment.dataset_env import DatasetEnvConfig, read_rows
from environments.gsm8k_server import GSM8kEnv
from environments.mcqa_thinking_env import MCQAThinkingEnv, read_question
from environments.rlaif_server import RLAIFEnv
from environments.tool_calling_server import SingleToolCallingEnv
from tests.environments.offline import PROBED, make_env
from tests.fakes import ScriptedEngine


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put rows in the place of every data set of the hub."""

    def fill(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        asked: list[tuple[Any, ...]] = []

        def load(path: str, name: str | None = None, *, split: str) -> datasets.Dataset:
            asked.append((path, name, split))
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", load)
        return asked

    return fill


async def test_rows_of_the_hub_are_split_and_handed_out(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"question": f"{i}?", "answer": i % 2, "choices": ["x", "y"], "s": 0} for i in range(100)
    ]
    asked = hub(rows)
    async with ScriptedEngine([PROBED]) as engine:
        env, again = (make_env(MCQAThinkingEnv, engine, monkeypatch) for _ in range(2))
        await env.setup()
        await again.setup()
        items = [await env.get_next_item() for _ in range(99)]

    assert asked[0] == ("NousResearch/AcademicMCQA", "default", "train")
    assert (len(env.train), len(env.test)) == (98, 2)
    assert env.train == again.train
    prompts = {read_question(row).prompt for row in items}
    assert len(prompts) == 98
    assert not prompts & {read_question(row).prompt for row in env.test}
    assert items[98] == items[0]


async def test_settings_name_another_data_set_in_the_same_columns(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": f"{i}?", "answer": 1, "choices": ["x", "y"]} for i in range(50)]
    asked = hub(rows)
    mmlu = {"dataset_name": "lighteval/mmlu", "dataset_split": "test"}
    async with ScriptedEngine([PROBED]) as engine:
        for settings in (mmlu, {**mmlu, "dataset_subset": "astronomy"}):
            env = make_env(MCQAThinkingEnv, engine, monkeypatch, **settings)
            await env.setup()

    assert asked == [("lighteval/mmlu", None, "test"), ("lighteval/mmlu", "astronomy", "test")]
    assert read_question(env.test[0]).prompt.endswith("?\nA. x\nB. y")


async def test_split_for_evaluations_is_read_where_there_is_one(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = hub([{"question": f"{i}?", "answer": f"#### {i}", "s": 0} for i in range(20)])
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(GSM8kEnv, engine, monkeypatch)
        await env.setup()
        other = make_env(GSM8kEnv, engine, monkeypatch, dataset_name="mine")
        await other.setup()

    assert asked == [("gsm8k", "main", "train"), ("gsm8k", "main", "test"), ("mine", None, "train")]
    assert (len(env.train), len(env.test)) == (20, 20)
    assert (len(other.train), len(other.test)) == (18, 2)
    assert set(env.train[0]) == {"question", "answer"}


async def test_so_many_rows_are_kept_where_their_number_is_set(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    texts = {"system": "tools", "human": "please", "gpt": call}
    row = {"conversations": [{"from": k, "value": v} for k, v in texts.items()]}
    asked = hub([row] * 150)
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(SingleToolCallingEnv, engine, monkeypatch)
        await env.setup()

    assert asked == [("NousResearch/XLAM-Atropos", "default", "train")]
    assert (len(env.train), len(env.eval_items())) == (50, 100)


async def test_columns_that_the_hub_lacks_are_named(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub([{"question": "?"}])
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(MCQAThinkingEnv, engine, monkeypatch)
        with pytest.raises(ConfigError, match="has no answer"):
            await env.setup()


async def test_conversations_of_the_hub_are_decoded_one_by_one(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    hub([{"conversation": chat} for _ in range(50)])
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(RLAIFEnv, engine, monkeypatch)
        await env.setup()
        item = await env.get_next_item()

    assert isinstance(env.train, datasets.Dataset)
    assert (len(env.train), len(env.eval_items())) == (49, 1)
    assert (item.messages, item.reference) == (chat[:1], "Hello")


def test_dataset_environment_asks_for_evaluations_only_when_told(hub: Any) -> None:
    asked = hub([{"q": str(i), "a": str(i)} for i in range(150)])
    settings = {"dataset_name": "d", "dataset_config": "c", "prompt_field": "q"}

    train, test = read_rows(DatasetEnvConfig(**settings))
    assert (len(train), test, asked) == (150, [], [("d", "c", "train")])
    _, test = read_rows(DatasetEnvConfig(**settings, eval_dataset_name="e"))
    assert (len(test), asked[-1]) == (100, ("e", None, "test"))
    with pytest.raises(ConfigError, match="no column b; it has q, a"):
        read_rows(DatasetEnvConfig(**settings, answer_field="b"))
