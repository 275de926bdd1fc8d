from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from atroposlib.tasks import reasoning_gym as tasks
from atroposlib.tasks.reasoning_gym import ReasoningGymEnvConfig
from atroposlib.utils.score_pool import ScorePool
from environments.reasoning_gym_environment.reasoning_gym_environment import (
    ReasoningGymEnv,
)
from tests.environments.offline import (
    PROBED,
    group_scores_at_100,
    make_env,
    read_groups,
    run_process,
)
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

SUMS: dict[str, Any] = {
    "task_names": ["chain_sum"],
    "task_params": {
        "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    },
}


def sums(**settings: Any) -> ReasoningGymEnvConfig:
    return ReasoningGymEnvConfig(**{**SUMS, **settings})


def test_items_are_a_function_of_the_settings() -> None:
    config = sums(complexity_mode=None)

    assert tasks.train_item(config, 7) == tasks.train_item(config, 7)
    assert tasks.eval_items(config) == tasks.eval_items(config)
    assert tasks.train_item(config, 7) != tasks.train_item(sums(seed=43), 7)


def test_training_items_never_repeat_a_question_of_the_evaluation_set() -> None:
    # 200 possible questions, 80 of them held out: overlap would be certain without the rule.
    config = sums(num_eval_samples_per_task=80)
    held_out = [item.question for item in tasks.eval_items(config)]

    trained = {tasks.train_item(config, i).question for i in range(300)}

    assert len(held_out) == len(set(held_out)) == 80
    assert len(trained) > 80
    assert not trained & set(held_out)


def test_evaluation_set_that_leaves_nothing_to_train_on_is_refused() -> None:
    config = sums(num_eval_samples_per_task=1000)
    assert len(tasks.eval_items(config)) == 200

    with pytest.raises(ConfigError, match="num_eval_samples_per_task"):
        tasks.train_item(config, 0)


def test_unknown_task_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        tasks.task_names(ReasoningGymEnvConfig(task_names=["chain_sums"]))


def test_refused_parameters_are_named() -> None:
    config = ReasoningGymEnvConfig(
        task_names=["chain_sum"], task_params={"chain_sum": {"min_terms": 0}}
    )

    with pytest.raises(ConfigError, match=r"chain_sum.*min_terms"):
        tasks.task_names(config)


def test_parameters_of_a_task_not_drawn_are_refused() -> None:
    with pytest.raises(ConfigError, match="task_params names"):
        sums(task_params={"countdown": {}}).validate_config()


@pytest.mark.parametrize(
    ("prompt", "roles"),
    [(None, ["system", "user"]), ("Be brief.", ["system", "user"]), ("", ["user"])],
)
def test_prompt_follows_the_system_setting(prompt: str | None, roles: list[str]) -> None:
    config = sums(system_prompt=prompt)
    item = tasks.train_item(config, 0)

    messages = tasks.prompt_messages(item, config)

    assert [message["role"] for message in messages] == roles
    assert messages[-1]["content"] == item.question
    if prompt is None:
        assert "<think>" in messages[0]["content"]
        assert "<answer>" in messages[0]["content"]


def test_random_mode_uses_the_complexity_it_notes() -> None:
    config = ReasoningGymEnvConfig(task_names=["chain_sum"], complexity_mode="random")
    items = [tasks.train_item(config, i) for i in range(60)]

    hard = [item for item in items if (item.complexity or 0) > 0.8]
    easy = [item for item in items if (item.complexity or 0) < 0.2]

    assert len(hard) > 3
    assert len(easy) > 3
    # The package's curriculum of chain_sum: 2 to 12 terms, 1 to 10 digits.
    assert min(item.params["max_terms"] for item in hard) >= 10
    assert max(item.params["max_terms"] for item in easy) <= 4
    assert all(
        item.entry["metadata"]["difficulty"]["num_terms"][1] == item.params["max_terms"]
        for item in items
    )


def test_complexity_the_generator_refuses_is_lowered() -> None:
    config = ReasoningGymEnvConfig(task_names=["caesar_cipher"], num_eval_samples_per_task=1)

    item = tasks.train_item(config, 0, 1.0)

    assert item.params["max_rotation"] <= 25


def test_settings_win_over_the_complexity() -> None:
    config = sums(complexity_mode="random")

    assert {tasks.train_item(config, i).params["max_terms"] for i in range(20)} == {2}


@pytest.mark.parametrize(
    ("scores", "lengths", "expected"),
    [
        # free up to 75 of 100; 80 is a fifth of the way to the limit
        ([1.0, 1.0], [75, 80], [1.0, 0.8]),
        ([0.5, 1.0], [10, 100], [0.5, 0.0]),
        ([0.4, 1.0], [10, 100], [0.4, 1.0]),
    ],
)
def test_long_completions_lose_only_where_all_are_correct(
    scores: list[float], lengths: list[int], expected: list[float]
) -> None:
    assert group_scores_at_100(ReasoningGymEnv, scores, lengths) == pytest.approx(expected)


async def test_process_writes_groups_whose_scores_belong_to_their_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "groups.jsonl"
    settings = {**SUMS, "data_path_to_save_groups": str(out), "include_messages": True}
    async with ScriptedEngine(AddingReplies()) as engine:
        env = make_env(
            ReasoningGymEnv,
            engine,
            monkeypatch,
            **settings,
            dump_rollouts=True,
            dump_dir=str(tmp_path),
        )

        await run_process(env, num_groups=3, group_size=4)
        sampling = engine.requests[-1].body

    groups = read_groups(out)
    assert [len(group["tokens"]) for group in groups] == [4, 4, 4]
    for group in groups:
        check_group(group)
        for chat, score, ids in zip(
            group["messages"], group["scores"], group["tokens"], strict=True
        ):
            assert score == (1.0 if chat[-1]["content"].startswith("right") else 0.0)
            assert "".join(map(chr, ids[-6:-1])) == chat[-1]["content"][-5:]
    assert (sampling["temperature"], sampling["top_p"], sampling["n"]) == (1.0, 0.95, 4)
    dumped = read_groups(tmp_path / "reasoning_gym_rollouts.jsonl")
    assert [row["scores"] for row in dumped] == [[1.0, 1.0]] * 3
    assert (tmp_path / "groups.html").exists()


@pytest.mark.parametrize(
    ("masks_truncated", "override"), [(True, {"set_advantage_to_zero": True}), (False, {})]
)
async def test_truncated_completions_are_muted_in_their_own_place(
    masks_truncated: bool, override: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED, "<answer>0</answer>", "on and on " * 100]) as engine:
        env = make_env(
            ReasoningGymEnv,
            engine,
            monkeypatch,
            **SUMS,
            group_size=2,
            system_prompt="",
            max_token_length=200,
            mask_too_long_completions=masks_truncated,
        )
        await env.setup()

        group, _ = await env.collect_trajectories(await env.get_next_item())

    assert group["overrides"] == [{}, override]
    assert group["scores"][1] == 0.0
    assert max(len(ids) for ids in group["tokens"]) < 200
    await env.close()


async def test_equal_answers_of_a_group_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([]) as engine:
        env = make_env(ReasoningGymEnv, engine, monkeypatch, **SUMS)
        await env.setup()
        item = await env.get_next_item()
        right = f"<answer>{item.entry['answer']}</answer>"

        scores = await env.score_all(item, [right, "no", right, right, "no"])

    assert scores == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert env.score_pool.counts["calls"] == 2
    await env.close()


async def test_evaluate_writes_accuracy_and_one_record_per_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine(AddingReplies(always_right=True)) as engine:
        env = make_env(
            ReasoningGymEnv,
            engine,
            monkeypatch,
            **SUMS,
            num_eval_samples_per_task=6,
            data_dir_to_save_evals=str(tmp_path),
        )
        await env.setup()

        await env.evaluate()
        temperatures = {request.body["temperature"] for request in engine.requests}

    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["results"]["all"]["eval/percent_correct"] == 1.0
    assert len(read_groups(tmp_path / "samples.jsonl")) == 6
    assert temperatures == {0.1}
    await env.close()


async def test_evaluation_item_that_leaves_no_room_is_wrong_and_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(ReasoningGymEnv, engine, monkeypatch, **SUMS, max_token_length=10)
        await env.setup()
        record = await env.evaluate_item(tasks.eval_items(env.config)[0])
        await env.close()

    assert (record["score"], record["finish_reason"]) == (0.0, "length")


async def test_curriculum_survives_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"task_names": ["chain_sum"], "complexity_mode": "curriculum", "group_size": 2}
    async with ScriptedEngine(["nothing"]) as engine:
        env = make_env(ReasoningGymEnv, engine, monkeypatch, **settings)
        again = make_env(ReasoningGymEnv, engine, monkeypatch, **settings)
        await env.setup()
        item = await env.get_next_item()
        await env.collect_trajectories(item)
    for one in (env, again):
        one.checkpoint_dir, one.wandb_prepend, one.curr_step = str(tmp_path), "rg_0", 2

    env.save_checkpoint(2)
    again.load_checkpoint()

    assert item.complexity == 0.3
    # Nothing right: a jump down from 0.3.
    assert again.curriculum.complexity("chain_sum") == pytest.approx(0.2)
    assert again.iter == 1
    await env.close()


def test_config_init_gives_the_published_settings() -> None:
    config, _ = ReasoningGymEnv.config_init()

    expected: dict[str, Any] = {
        "group_size": 8,
        "total_steps": 250,
        "batch_size": 1024,
        "steps_per_eval": 25,
        "max_token_length": 8192,
        "inference_weight": 4.0,
        "complexity_mode": "random",
        "min_batch_allocation": 0.1,
        "seed": 1918,
        "eval_seed": 123,
        "rollout_save_score_threshold": 0.51,
        "mask_too_long_completions": True,
    }
    assert {key: config.model_dump()[key] for key in expected} == expected


class AddingReplies:
    """Solves the sum in a prompt, right and wrong in turn."""

    def __init__(self, *, always_right: bool = False) -> None:
        self.always_right = always_right
        self.num_replies = 0

    def __call__(self, prompt: str) -> str:
        if "problem: " not in prompt:  # the look for a route that gives token ids
            return "ok"
        self.num_replies += 1
        left, sign, right = prompt.split("problem: ")[1].split(" =")[0].split()
        total = int(left) + int(right) * (1 if sign == "+" else -1)
        if self.always_right or self.num_replies % 2:
            return f"right <think>easy</think><answer>{total}</answer>"
        return f"wrong <think>easy</think><answer>{total + 1}</answer>"


def has_package() -> bool:
    return "reasoning_gym.factory" in sys.modules


async def test_worker_has_loaded_the_package_before_its_first_call() -> None:
    pool = ScorePool(num_workers=1, timeout_s=60)

    assert await pool.run(has_package)

    pool.close()
