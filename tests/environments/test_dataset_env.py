from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.check import check_environment
from atroposlib.envs.reward_fns import CombinedReward
from atroposlib.envs.reward_fns.reward_function import RewardFunction
from atroposlib.envs.settings import Defaults, layer_settings
from atroposlib.errors import ConfigError, UnknownRewardError
from environments.dataset_environment.dataset_env import (
    CONFIGS,
    SAMPLE,
    DatasetEnv,
    DatasetEnvConfig,
    expand_variables,
    make_reward,
    read_rows,
    read_run_file,
    token_limit,
)
from environments.dataset_environment.dataset_local_server import roll_out_items
from environments.dataset_environment.launch_local_dataset_run import (
    commands,
    environment_settings,
)
from tests.environments.offline import PROBED, make_env
from tests.fakes import CharTokenizer, ScriptedEngine

pytestmark = pytest.mark.slow

RUN_FILES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
ROW = {"question": "6 * 7?", "answer": "6 * 7 = 42\n#### 42"}


def config(**settings: Any) -> DatasetEnvConfig:
    chosen = {"dataset_name": "d", "prompt_field": "question", "answer_field": "answer"}
    return DatasetEnvConfig(**{**chosen, **settings})


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"reward_functions": ["accuracy"]}, [1.0, 0.0, 0.0]),
        # a mean by weight: (1 * 1 + 1 * 1) / 2 for the first, format alone for the second
        ({"reward_functions": ["accuracy", "format"]}, [1.0, 0.5, 0.0]),
        ({"reward_funcs": ["accuracy", "format"]}, [2.0, 1.0, 0.0]),
        ({"reward_functions": [{"type": "accuracy", "weight": 3.0}, "format"]}, [1.0, 0.25, 0.0]),
    ],
)
def test_reward_of_named_functions(settings: dict[str, Any], rewards: list[float]) -> None:
    thought = "<think>hm</think>"
    answers = [f"{thought}\\boxed{{42}}", f"{thought}\\boxed{{41}}", ""]

    assert make_reward(config(**settings))(answers, solution=ROW["answer"]) == rewards


def test_no_reward_function_or_both_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="reward_functions"):
        make_reward(config())
    with pytest.raises(ConfigError, match="one of the two"):
        make_reward(config(reward_functions=["accuracy"], reward_funcs=["format"]))
    with pytest.raises(UnknownRewardError, match="accuracy"):
        make_reward(config(reward_functions=["accuracies"]))


def test_token_limit_grows_over_the_warm_up() -> None:
    limits = [
        token_limit(step, warmup_steps=10, min_tokens=100, max_tokens=300) for step in (0, 5, 10)
    ]

    assert limits == [100, 200, 300]
    assert token_limit(0, warmup_steps=0, min_tokens=0, max_tokens=300) == 300
    assert token_limit(0, warmup_steps=9, min_tokens=0, max_tokens=300) == 1


def test_rows_of_files_keep_their_order_unless_shuffled(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**ROW, "level": i, "other": 0}) for i in range(20)))
    settings = {"dataset_path": str(path), "item_fields": ["level"]}

    train, test = read_rows(config(**settings, shuffle_dataset=False))
    shuffled, _ = read_rows(config(**settings))

    assert [row["level"] for row in train] == list(range(18))
    assert [row["level"] for row in test] == [18, 19]
    assert train[0].keys() == {"question", "answer", "level"}
    assert train != shuffled == read_rows(config(**settings))[0]
    with pytest.raises(ConfigError, match="level_name"):
        read_rows(config(dataset_path=str(path), item_fields=["level_name"]))


@pytest.mark.parametrize("name", RUN_FILES)
def test_shipped_file_is_what_serve_and_the_trainer_take(name: str) -> None:
    run = read_run_file(name, {"OPENAI_API_KEY": "from the shell"})  # pragma: allowlist secret

    make_reward(run.env)
    content = yaml.safe_load(json.dumps(environment_settings(run)))
    env_config, servers = DatasetEnv.config_init()
    defaults = Defaults(DatasetEnvConfig, dict(env_config), servers)
    served = layer_settings("serve", defaults, content, {})
    assert served.env.reward_functions == run.env.reward_functions
    [server] = served.servers if isinstance(served.servers, list) else [served.servers]
    assert server.api_key == "from the shell"  # pragma: allowlist secret
    lines = commands(run, Path("env.yaml"))
    assert list(lines) == ["service", "environment", "trainer"]
    from example_trainer.cli import config_from_args, create_full_parser

    words = lines["trainer"][lines["trainer"].index("example_trainer.grpo") + 1 :]
    trainer = config_from_args(create_full_parser().parse_args(words))
    assert trainer.training_steps == run.trainer["training-steps"]


def test_variables_are_expanded_wherever_they_stand() -> None:
    value = {"a": ["${X}/v1", 1], "b": "${Y:-none}", "c": "$X", "d": "${Z:-}"}

    assert expand_variables(value, {"X": "url"}, where="f") == {
        "a": ["url/v1", 1],
        "b": "none",
        "c": "$X",
        "d": "",
    }
    with pytest.raises(ConfigError, match=r"f\.yaml: the environment variable KEY is not set"):
        expand_variables("${KEY}", {}, where="f.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected sections"),
        ("data: {}", "expected the sections"),
        ("dataset: {dataset_name: d, prompt_field: q, answer: a}", "no setting answer"),
        ("dataset: {prompt_field: q}", "dataset_name: Field required"),
        ("dataset: {dataset_name: d, prompt_field: q}\nserver_configs: [x]", "server_configs"),
        ("a: b: c", "is not YAML"),
    ],
)
def test_unusable_file_is_refused_with_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_run_file(str(path), {})


def test_unknown_file_names_the_shipped_ones() -> None:
    with pytest.raises(ConfigError, match="dataset_local, gsm8k, gsm8k_debug"):
        read_run_file("gsm9k", {})


async def test_group_is_scored_and_evaluation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, float] = {}
    replies = [PROBED, "\\boxed{42}", "<think>\\boxed{42}</think>", "no"]
    async with ScriptedEngine(replies) as engine:
        env = make_env(
            DatasetEnv,
            engine,
            monkeypatch,
            group_size=3,
            dataset_path=str(SAMPLE),
            include_messages_in_scoring=True,
            system_prompt="Think.",
            max_generations_per_prompt=2,
        )
        await env.setup()
        rows = [await env.get_next_item() for _ in range(3)]
        group, _ = await env.collect_trajectories(ROW)
        monkeypatch.setattr(env.run_log, "log", lambda metrics, step: logged.update(metrics))
        env.test = [ROW, ROW]
        await env.evaluate()
        await env.close()
        await env.server.close()

    assert rows[0] is rows[1] is not rows[2]
    assert group["scores"] == [1.0, 0.0, 0.0]
    assert group["generation_params"] == {"temperature": 0.7, "top_p": 0.9}
    assert [m["role"] for m in group["messages"][0]] == ["system", "user", "assistant"]
    assert [logged[f"eval/{key}_score"] for key in ("mean", "max", "min")] == [0.5, 1.0, 0.0]
    assert isinstance(make_reward(config(reward_funcs=["accuracy", "format"])), CombinedReward)


class EndsItsWorkerReward(RewardFunction):
    """Crashes on the text `crash`, and rewards every other one."""

    def compute(self, completions: list[Any], **_: Any) -> list[float]:
        texts = [self.get_content(completion) for completion in completions]
        if "crash" in texts:
            os._exit(1)
        return [1.0] * len(texts)


async def test_completion_that_ends_the_worker_costs_its_own_reward_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(
            DatasetEnv, engine, monkeypatch, dataset_path=str(SAMPLE), num_score_workers=1
        )
        env.reward_function = EndsItsWorkerReward()

        assert await env.score_all(ROW, ["fine", "crash", "also fine"]) == [1.0, 0.0, 1.0]

        await env.close()
        await env.server.close()


async def test_local_server_shows_what_rows_earn(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: CharTokenizer())
    run = read_run_file("dataset_local", {})
    run.env.dataset_path, run.env.group_size, run.env.num_score_workers = str(SAMPLE), 2, 0
    async with ScriptedEngine([PROBED, "\\boxed{1}", "<think>a</think>b"]) as engine:
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        [line] = await roll_out_items(run._replace(servers=[server]), num_items=1)

    # Of the weights 1 and 0.2 the second answer earns the second.
    assert line.splitlines()[1].split() == ["0.000", "0.167"]


@pytest.mark.long
def test_environment_passes_the_check() -> None:
    report = check_environment(DatasetEnv)

    assert report.passed, report.text


@pytest.mark.long
def test_environment_passes_the_check_with_a_prefill() -> None:
    report = check_environment(DatasetEnv, prefill="Let us see. ")

    assert report.passed, report.text
