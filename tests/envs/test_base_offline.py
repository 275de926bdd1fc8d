"""`process` and `evaluate`, and environments written for the first version of the library."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs import base
from atroposlib.envs import offline as env_offline
from atroposlib.envs.base import APIServerConfig, BaseEnv, ServerBaseline
from atroposlib.envs.server_handling.server_baseline import note_sampled
from atroposlib.errors import (
    ConfigError,
    EngineSetupError,
    InferenceError,
    NoDataError,
    NoVerdictError,
)
from tests.envs.small_environment import SmallEnv, small_config

MakeEnv = Callable[..., Any]


async def process(env: Any, *, groups: int, group_size: int = 2) -> None:
    env.process_mode = True
    env.n_groups_to_process = groups
    env.group_size_to_process = group_size
    await env.process_manager()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_base_env_tokenizer_that_does_not_load_names_the_setting(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoTokenizers:
        @staticmethod
        def from_pretrained(name: str) -> Any:
            raise OSError("no connection.\nSee the manual.")

    monkeypatch.setitem(vars(base), "AutoTokenizer", NoTokenizers)

    with pytest.raises(ConfigError) as caught:
        make_env()

    assert str(caught.value) == (
        "tokenizer 'characters' cannot be loaded: no connection; "
        f"there is no folder {Path.cwd() / 'characters'} either; "
        "--env.tokenizer_name takes the name of a hub repository or a local folder"
    )


async def test_process_writes_groups_page_and_metrics(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(
        data_path_to_save_groups="groups.jsonl", include_messages=True, metrics_path="m.jsonl"
    )

    await process(env, groups=3, group_size=4)

    written = records(tmp_path / "groups.jsonl")
    assert [len(group["tokens"]) for group in written] == [4, 4, 4]
    assert written[0]["messages"][0] == [{"role": "user", "content": "ABC"}]
    assert "ABC" in (tmp_path / "groups.html").read_text()
    assert [record["step"] for record in records(tmp_path / "m.jsonl")] == [0, 1, 2]
    assert env.events == ["setup", "close"]


async def test_settings_are_saved_beside_the_metrics(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", metrics_path="m.jsonl")
    env.settings_yaml = "env:\n  group_size: 2\n"

    await process(env, groups=1)

    assert (tmp_path / "m.settings.yaml").read_text() == "env:\n  group_size: 2\n"


async def test_closing_line_names_the_error_that_ends_the_run(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")

    def fail() -> None:
        raise ConfigError("wrong")

    env.get_next_item = fail
    caplog.set_level(logging.INFO)

    with pytest.raises(ConfigError):
        await process(env, groups=1)

    assert "groups dropped: none; failures: {'ConfigError': 1}" in caplog.text


async def test_process_says_why_the_engine_ended_each_trajectory(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    class CutEnv(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            group, backlog = await SmallEnv.collect_trajectories(self, item)
            note_sampled(None, tokens=group["tokens"][0], finish_reason="length")
            return group, backlog

    env = make_env(CutEnv, data_path_to_save_groups="groups.jsonl")

    await process(env, groups=1)

    [group] = records(tmp_path / "groups.jsonl")
    assert group["finish_reasons"][0] == "length"


@pytest.mark.parametrize("gold", ["ABC", ["A", "B"]])
async def test_process_writes_the_gold_answer_beside_its_groups(
    make_env: MakeEnv, tmp_path: Path, gold: Any
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", include_messages=True)
    env.check_gold_answer = lambda item: gold

    await process(env, groups=1)

    assert [group["gold_answer"] for group in records(tmp_path / "groups.jsonl")] == [gold]
    assert "Gold answer" in (tmp_path / "groups.html").read_text()


async def test_process_goes_on_where_the_gold_answer_fails(
    make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")
    env.check_gold_answer = lambda item: 1 // 0

    await process(env, groups=1)

    [group] = records(tmp_path / "groups.jsonl")
    assert "gold_answer" not in group
    assert "check_gold_answer failed" in caplog.text


async def test_process_without_items_left_ends(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")
    env.most_items = 2

    await process(env, groups=10)

    assert len(records(tmp_path / "groups.jsonl")) == 2


async def test_process_dropped_group_counts_as_done(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", group_size=1)
    env.collect_trajectory = _same_score

    await process(env, groups=2)

    assert env.drop_counts == {"scores_equal": 2}
    assert records(tmp_path / "groups.jsonl") == []


async def test_process_counts_groups_of_which_some_rollouts_returned_none(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    class SomeNoneEnv(SmallEnv):
        """Of item 1, all rollouts return None; of item 2, the second."""

        async def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:
            result, backlog = await super().collect_trajectory(item)
            is_none = item == 1 or (item == 2 and result["scores"] == 1.0)
            return None if is_none else result, backlog

    env = make_env(SomeNoneEnv)

    await process(env, groups=1, group_size=4)

    assert env.drop_counts == {"incomplete": 1}
    assert (
        "group dropped (incomplete): collect_trajectory returned None for 1 of 4 rollouts"
        in caplog.text
    )


async def _same_score(item: Any) -> tuple[Any, list[Any]]:
    return {"tokens": [65], "masks": [65], "scores": 0.0}, []


class WrongMasksEnv(SmallEnv):
    """Every group is none, from the first on or from the second."""

    first_wrong = 1

    async def collect_trajectories(self, item: Any) -> Any:
        masks = [[-100]] if item >= self.first_wrong else [[-100, 66]]
        return {"tokens": [[65, 66]] * 2, "masks": masks * 2, "scores": [0.0, 1.0]}, []


async def test_process_whose_groups_are_all_malformed_fails_and_says_why(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(WrongMasksEnv, data_path_to_save_groups="groups.jsonl")

    with pytest.raises(NoDataError, match=r"all 3 groups were dropped; .*malformed"):
        await process(env, groups=3)

    assert not (tmp_path / "groups.jsonl").exists()


async def test_process_reports_only_the_groups_that_were_kept(
    make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    env = make_env(WrongMasksEnv, data_path_to_save_groups="groups.jsonl")
    env.first_wrong = 2

    await process(env, groups=2)

    assert len(records(tmp_path / "groups.jsonl")) == 1
    assert "group 1 of 2" in caplog.text
    assert "group 2 of 2" not in caplog.text


class HalfWrongEnv(SmallEnv):
    async def collect_trajectories(self, item: Any) -> Any:
        good = {"tokens": [[65, 66]] * 2, "masks": [[-100, 66]] * 2, "scores": [0.0, 1.0]}
        return [good, None, {**good, "masks": [[-100]] * 2}], []


async def test_process_with_a_malformed_group_beside_a_good_one_keeps_the_good_one(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(HalfWrongEnv, data_path_to_save_groups="groups.jsonl")

    await process(env, groups=2)

    assert env.drop_counts == {"malformed": 2}
    assert len(records(tmp_path / "groups.jsonl")) == 2


class EmptyEnv(SmallEnv):
    async def collect_trajectories(self, item: Any) -> Any:
        return None, []


async def test_process_nothing_but_empty_groups_stops_with_a_message(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(env_offline, "MAX_EMPTY_GROUPS_IN_A_ROW", 5)
    env = make_env(EmptyEnv)

    with pytest.raises(RuntimeError, match=r"5 items in a row gave no data; EmptyEnv.*equal"):
        await process(env, groups=1)

    assert "gave no group" in caplog.text
    assert env.events == ["setup", "close"]


class CrampedEnv(SmallEnv):
    async def collect_trajectories(self, item: Any) -> Any:
        logging.getLogger("an.environment").warning("the prompt is too long")
        return None, []


async def test_process_without_data_names_the_commonest_warning(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env_offline, "MAX_EMPTY_GROUPS_IN_A_ROW", 3)

    with pytest.raises(NoDataError, match=r"3 items .* most of them with: the prompt is too long"):
        await process(make_env(CrampedEnv), groups=1)


async def test_process_exception_ends_the_run_but_keeps_what_is_done(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")

    async def fail_on_second(item: int) -> None:
        if item == 2:
            raise ValueError("reward")

    env.before_rollout = fail_on_second

    with pytest.raises(ValueError, match="reward"):
        await process(env, groups=3)

    assert records(tmp_path / "groups.jsonl")
    assert (tmp_path / "groups.html").exists()


async def test_process_that_fails_before_its_first_group_leaves_nothing_behind(
    make_env: MakeEnv, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")

    async def refuse(item: int) -> None:
        raise ConfigError("the server returns no token ids")

    env.before_rollout = refuse

    with pytest.raises(ConfigError, match="no token ids"):
        await process(env, groups=3)

    assert not (tmp_path / "groups.jsonl").exists()
    assert not (tmp_path / "groups.html").exists()
    assert capsys.readouterr().out == ""


class MayEraEnv(BaseEnv):
    """Written for version 0.1: scores in `postprocess_histories`, plain `wandb_log`."""

    name = "may_era"

    def __init__(self, config: Any, server_configs: Any, slurm_job_id: Any = False) -> None:
        super().__init__(config, server_configs, slurm_job_id, False)
        self.logged: list[dict[str, Any]] = []

    async def setup(self) -> None:
        await super().setup()
        self.iter = 0

    async def get_next_item(self) -> Any:
        self.iter += 1
        return (frozenset({("role", "user")}), "answer")

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        self.iter += 1
        return [{"role": "assistant", "content": f"reply {self.iter}"}], []

    async def postprocess_histories(self, trajectories: list[Any]) -> Any:
        return [
            None,
            {
                "tokens": [self.tokenizer.encode(chat[0]["content"]) for chat in trajectories],
                "masks": [self.tokenizer.encode(chat[0]["content"]) for chat in trajectories],
                "scores": [float(i) for i, _ in enumerate(trajectories)],
                "item_ids": "extra",
            },
        ]

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return {"accuracy": 0.5}

    async def wandb_log(self, metrics: dict[str, Any], step: int = 0) -> None:
        self.logged.append(metrics)
        await super().wandb_log(metrics)


async def test_process_environment_of_version_01_works(make_env: MakeEnv, tmp_path: Path) -> None:
    env = make_env(MayEraEnv, data_path_to_save_groups="groups.jsonl")

    await process(env, groups=2, group_size=3)

    written = records(tmp_path / "groups.jsonl")
    assert [group["scores"] for group in written] == [[0.0, 1.0, 2.0]] * 2
    assert written[0]["item_ids"] == "extra"
    assert len(env.logged) == 2


class PlainHooksEnv(SmallEnv):
    """Hooks written as plain functions, which the first versions failed to await."""

    def setup(self) -> None:  # type: ignore[override]
        self.events.append("plain setup")

    def get_next_item(self) -> int:  # type: ignore[override]
        return 1

    def collect_trajectory(self, item: int) -> tuple[Any, list[Any]]:  # type: ignore[override]
        return {"tokens": [65], "masks": [65], "scores": 1.0}, []

    def postprocess_histories(self, trajectories: Any) -> Any:  # type: ignore[override]
        return trajectories

    def evaluate(self) -> None:  # type: ignore[override]
        self.num_evaluations += 1

    def close(self) -> None:  # type: ignore[override]
        self.events.append("plain close")

    def handle_send_to_api(  # type: ignore[override]
        self, scored_data: Any, *args: Any, **flags: Any
    ) -> None:
        self.jsonl_writer.write(scored_data)  # type: ignore[union-attr]


async def test_process_and_evaluate_plain_functions_as_hooks(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(PlainHooksEnv, data_path_to_save_groups="groups.jsonl")

    await process(env, groups=1)
    await env._run_evaluate()

    assert len(records(tmp_path / "groups.jsonl")) == 1
    assert env.num_evaluations == 1
    assert env.events == ["plain setup", "plain close"] * 2


class EvaluatedEnv(SmallEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        await self.evaluate_log({"eval/percent_correct": 0.5}, samples=[{"score": 1}])
        await self.wandb_log({"eval/percent_correct": 0.5})


async def test_evaluate_writes_results_and_metrics(
    make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(EvaluatedEnv, data_dir_to_save_evals="evals", max_token_length=77)

    with caplog.at_level("INFO"):
        await env._run_evaluate()

    assert "eval/percent_correct: 0.5" in caplog.text
    result = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert result["results"]["atropos|small_eval|0"] == {"eval/percent_correct": 0.5}
    assert result["config_general"]["model_name"] == "m"
    assert result["config_general"]["generation_parameters"] == {"max_new_tokens": 77}
    assert records(tmp_path / "evals" / "samples.jsonl") == [{"score": 1}]
    logged = records(tmp_path / "logs" / "small" / "metrics.jsonl")
    assert logged[0]["eval/percent_correct"] == 0.5


class BufferedEvaluationEnv(SmallEnv):
    """Keeps its results for `wandb_log`, as many environments do."""

    kept: tuple[float, ...] = ()

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.kept = (0.25,)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {"eval/percent_correct": sum(self.kept) / len(self.kept)}
        self.kept = ()
        await super().wandb_log({**(wandb_metrics or {}), **metrics})


class LoggingItselfEnv(BufferedEvaluationEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        await super().evaluate()
        await self.wandb_log()


@pytest.mark.parametrize("env_cls", [BufferedEvaluationEnv, LoggingItselfEnv])
async def test_evaluate_results_kept_for_wandb_log_are_logged_once(
    env_cls: type[SmallEnv], make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        await make_env(env_cls)._run_evaluate()

    assert "eval/percent_correct: 0.25" in caplog.text
    logged = records(tmp_path / "logs" / "small" / "metrics.jsonl")
    assert [line["eval/percent_correct"] for line in logged] == [0.25]


class NothingToLogEnv(BufferedEvaluationEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return None


async def test_evaluate_wandb_log_that_fails_does_not_end_it(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(NothingToLogEnv)

    await env._run_evaluate()

    assert "wandb_log failed" in caplog.text
    assert env._reporter.failure_counts == {"ZeroDivisionError": 1}


async def test_evaluate_without_a_folder_only_warns(
    make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await make_env(EvaluatedEnv)._run_evaluate()

    assert "data_dir_to_save_evals" in caplog.text


def test_constructor_bare_server_config_is_that_one_server(make_env: MakeEnv) -> None:
    config = make_env().config
    server = APIServerConfig(model_name="one", base_url="http://127.0.0.1:9/v1", api_key="x")

    env = SmallEnv(config, server, False, False)

    assert env.server_configs == [server]
    assert [s.config.base_url for s in env.server.servers] == ["http://127.0.0.1:9/v1"]
    assert str(env.client.base_url) == "http://127.0.0.1:9/v1/"


def test_constructor_baseline_lists_the_servers_it_found(make_env: MakeEnv) -> None:
    config = make_env().config

    env = SmallEnv(config=config, server_configs=ServerBaseline(), slurm=False, testing=False)

    assert env.server_configs == [server.config for server in env.server.servers]


@pytest.mark.parametrize(("asked", "expected"), [(-1, 8), (3, 3)])
def test_constructor_worker_maximum(make_env: MakeEnv, asked: int, expected: int) -> None:
    assert make_env(max_num_workers=asked).max_num_workers == expected


def test_config_default_pair_is_config_and_baseline() -> None:
    config, servers = BaseEnv.config_init()

    assert config.group_size == 4
    assert isinstance(servers, ServerBaseline)


async def test_handle_env_unknown_uuid_gives_none(make_env: MakeEnv) -> None:
    assert await make_env().handle_env("unheard of") is None


def test_small_config_keeps_unknown_settings() -> None:
    assert small_config(dataset_path="x").dataset_path == "x"  # type: ignore[attr-defined]


async def test_process_rolls_out_several_items_at_once_and_writes_them_in_order(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", max_num_workers=3)
    is_third_running = asyncio.Event()
    running: set[int] = set()
    most_running = 0

    async def wait_for_the_third(item: int) -> None:
        nonlocal most_running
        running.add(item)
        most_running = max(most_running, len(running))
        if item == 3:
            is_third_running.set()
        await asyncio.wait_for(is_third_running.wait(), 60)
        if item == 1:  # the first is done last
            await asyncio.sleep(0.05)
        running.discard(item)

    async def collect(item: int) -> Any:
        await wait_for_the_third(item)
        return {"tokens": [[item], [item]], "masks": [[item]] * 2, "scores": [0.0, 1.0]}, []

    env.collect_trajectories = collect
    await process(env, groups=5)

    assert [group["tokens"][0] for group in records(tmp_path / "groups.jsonl")] == [
        [1], [2], [3], [4], [5]
    ]  # fmt: skip
    assert most_running == 3
    assert env.num_items == 5


async def test_process_that_fails_ends_what_runs_besides(make_env: MakeEnv) -> None:
    env = make_env(max_num_workers=2)

    async def fail_on_first(item: int) -> None:
        if item == 1:
            raise ConfigError("wrong")
        await asyncio.Event().wait()

    env.before_rollout = fail_on_first

    with pytest.raises(ConfigError, match="wrong"):
        await asyncio.wait_for(process(env, groups=5), 60)

    assert env.num_cancelled > 0
    assert env.num_items == 2


class ScoringEnv(SmallEnv):
    """Reports a result of 0, whatever became of its requests."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        with suppress(InferenceError):
            await self.server.chat_completion(messages=[{"role": "user", "content": "hi"}])
        await self.evaluate_log({"eval/accuracy": 0.0}, verbose=False)


async def test_evaluate_without_an_answer_reports_no_result(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(ScoringEnv, data_dir_to_save_evals="evals")
    env.server.servers[0].config.startup_timeout = 0.0
    env.server.servers[0].health_poll_s = 0.01

    with pytest.raises(EngineSetupError, match="has not answered"):
        await env._run_evaluate()

    assert not (tmp_path / "evals").exists()


async def test_evaluate_without_a_request_reports_no_zero(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(ScoringEnv, data_dir_to_save_evals="evals")
    env.server.chat_completion = _answer_nothing

    with pytest.raises(NoDataError, match="made no request to a model"):
        await env._run_evaluate()

    assert not (tmp_path / "evals").exists()


async def _answer_nothing(**_: Any) -> None:
    return None


async def test_evaluate_that_asks_nothing_and_reports_nothing_says_so(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    await make_env()._run_evaluate()

    assert "the evaluation made no request to a model" in caplog.text


async def test_process_that_fails_keeps_the_groups_that_later_items_finished(
    make_env: MakeEnv, tmp_path: Path
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", max_num_workers=3)
    is_third_done = asyncio.Event()

    async def collect(item: int) -> Any:
        if item == 1:
            await asyncio.wait_for(is_third_done.wait(), 60)
            raise ConfigError("wrong")
        if item == 3:
            asyncio.get_running_loop().call_later(0.05, is_third_done.set)
        return {"tokens": [[item], [item]], "masks": [[item]] * 2, "scores": [0.0, 1.0]}, []

    env.collect_trajectories = collect

    with pytest.raises(ConfigError, match="wrong"):
        await process(env, groups=5)

    written = [group["tokens"][0] for group in records(tmp_path / "groups.jsonl")]
    assert written[:2] == [[2], [3]]


async def test_process_leaves_out_an_item_without_a_verdict(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    class Judged(SmallEnv):
        async def collect_trajectories(self, item: Any) -> Any:
            if item == 1:
                raise NoVerdictError("the judge gave no number")
            return await super().collect_trajectories(item)

    env = make_env(Judged)

    await process(env, groups=2)

    assert (env.curr_step, env.failure_counts) == (2, {"NoVerdictError": 1})
    assert "an item is left out: the judge gave no number" in caplog.text


async def test_process_without_a_first_item_says_so_and_ends(
    make_env: MakeEnv, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env()
    env.most_items = 0

    await process(env, groups=1)

    assert "SmallEnv.get_next_item returned None at its first call" in caplog.text


class EndedIteratorEnv(SmallEnv):
    items = iter([1, 2])

    async def get_next_item(self) -> Any:
        return next(self.items)


class EndedPlainIteratorEnv(EndedIteratorEnv):
    items = iter([1, 2])

    def get_next_item(self) -> Any:  # type: ignore[override]  # accepted
        return next(self.items)


@pytest.mark.parametrize("env_cls", [EndedIteratorEnv, EndedPlainIteratorEnv])
async def test_process_end_of_the_iterator_of_items_is_named_with_its_line(
    make_env: MakeEnv, env_cls: type[SmallEnv]
) -> None:
    env = make_env(env_cls)

    with pytest.raises(
        ConfigError, match=r"get_next_item raised StopIteration \(.*test_base_offline\.py:\d+\)"
    ):
        await process(env, groups=9)


class ListForPairEnv(SmallEnv):
    async def collect_trajectories(self, item: Any) -> Any:
        group, backlog = await super().collect_trajectories(item)
        return [group, backlog]


async def test_process_with_a_list_in_place_of_a_pair_keeps_the_group(make_env: MakeEnv) -> None:
    env = make_env(ListForPairEnv)

    await process(env, groups=2)

    assert env.drop_counts == {"malformed": 2}


async def await_a_cancelled_task(*_: Any) -> Any:
    task = asyncio.create_task(asyncio.sleep(100))
    task.cancel()
    await task


@pytest.mark.parametrize("hook", ["get_next_item", "collect_trajectories"])
async def test_process_does_not_take_a_cancellation_of_the_environment_for_its_end(
    make_env: MakeEnv, hook: str
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl")
    setattr(env, hook, await_a_cancelled_task)

    with pytest.raises(RuntimeError, match="cancelled by its own code") as caught:
        await process(env, groups=2)

    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


async def test_evaluate_does_not_take_a_cancellation_of_the_environment_for_its_end(
    make_env: MakeEnv,
) -> None:
    env = make_env()
    env.evaluate = await_a_cancelled_task

    with pytest.raises(RuntimeError, match="cancelled by its own code"):
        await env._run_evaluate()


async def test_process_raises_the_first_error_of_a_hook_that_fails_for_every_group(
    make_env: MakeEnv, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    env = make_env(data_path_to_save_groups="groups.jsonl", max_num_workers=3)
    num_calls = 0

    async def fail(_: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        names = {task: task.get_coro().__qualname__ for task in asyncio.all_tasks()}
        others = [task for task, name in names.items() if name == "ProcessRun._roll_out"]
        if others:
            await asyncio.wait(others)
        raise ZeroDivisionError(f"call {num_calls}")

    env.wandb_log = fail

    with pytest.raises(ZeroDivisionError, match="call 1") as caught:
        await process(env, groups=3)

    assert caught.value.__context__ is None
    assert len(records(tmp_path / "groups.jsonl")) == 2
    assert "not recorded completely: ZeroDivisionError: call 2" in caplog.text
