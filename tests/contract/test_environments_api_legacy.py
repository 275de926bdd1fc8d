"""What existing environment files rely on without saying so: each way of writing one still runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from atroposlib.envs.base import (
    APIServer,
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    Item,
    OpenaiConfig,
    ServerBaseline,
)
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer_dpo
from tests.contract.scored_groups import scored, take
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from tests.envs.test_base_offline import process, records

MakeEnv = Callable[..., Any]
SERVER = APIServerConfig(model_name="one", base_url="http://10.0.0.1:9/v1", api_key="x")


class Legacy(BaseEnv):
    """The least an environment has; what a test is about is added by a subclass."""

    name = "legacy"
    servers: ClassVar[Any] = [SERVER]

    @classmethod
    def config_init(cls) -> Any:
        return small_config(total_steps=1), cls.servers

    async def get_next_item(self) -> Any:
        return {"prompt": "p"}

    async def collect_trajectories(self, item: Any) -> Any:
        return scored(), []

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return None


def run_process(env_cls: type[Any], monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """Run `process` of a fresh subclass through the command line; return what was built."""
    built: list[Any] = []

    class Noted(env_cls):  # type: ignore[misc]  # whichever the test is about
        async def setup(self) -> None:
            built.append(self)
            await super().setup()

    defaults = ["--env.use_wandb", "false", "--env.data_path_to_save_groups", "groups.jsonl"]
    monkeypatch.setattr(sys, "argv", ["legacy.py", "process", *defaults, *words])
    with pytest.raises(SystemExit) as ended:
        Noted.cli()
    assert ended.value.code == 0
    return built[0]


def test_unknown_keywords_of_a_config_are_attributes_everywhere(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Settings(BaseEnvConfig):
        own: int = 1

    class Reading(Legacy):
        @classmethod
        def config_init(cls) -> Any:
            return Settings(dataset_path="d", debug_mode=True, tokenizer_name="c", group_size=2), [
                SERVER
            ]

        async def setup(self) -> None:
            self.config.added_later = self.config.dataset_path  # type: ignore[attr-defined]

    make_env()  # for its folder and its tokenizer

    env = run_process(Reading, monkeypatch, "--env.total_steps", "1")

    assert (env.config.own, env.config.debug_mode, env.config.added_later) == (1, True, "d")


@pytest.mark.parametrize(
    ("servers", "models"),
    [
        ([SERVER], ["one"]),
        ([SERVER, SERVER], ["one", "one"]),
        ([], ["default"]),
        (SERVER, ["one"]),
        (OpenaiConfig(model_name="may", base_url="http://10.0.0.1:9/v1"), ["may"]),
        (ServerBaseline(model_name="base"), ["base"] * 4),  # the four ports it looks at
    ],
)
def test_config_init_may_return_servers_in_every_form(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch, servers: Any, models: list[str]
) -> None:
    make_env()
    env_cls = type("WithServers", (Legacy,), {"servers": servers})
    monkeypatch.setenv("OPENAI_API_KEY", "x")

    env = run_process(env_cls, monkeypatch)

    assert [server.config.model_name for server in env.server.servers] == models
    assert [config.model_name for config in env.server_configs] == models


class Usual(Legacy):
    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = True, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)


class SlurmJobId(Legacy):
    def __init__(
        self, config: Any, server_configs: Any, slurm_job_id: Any = None, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm_job_id, testing)


class Keywords(Legacy):
    def __init__(self, config: Any, server_configs: Any, **kwargs: Any) -> None:
        super().__init__(config, server_configs, **kwargs)


class AllKeywords(Legacy):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


class Words(Legacy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)


class OnlyTwo(Legacy):
    def __init__(self, config: Any, server_configs: Any) -> None:
        super().__init__(config, server_configs)


@pytest.mark.parametrize("env_cls", [Usual, SlurmJobId, Keywords, AllKeywords, Words, OnlyTwo])
def test_constructors_are_called_with_what_they_accept(
    make_env: MakeEnv, monkeypatch: pytest.MonkeyPatch, env_cls: type[Any]
) -> None:
    make_env()

    env = run_process(env_cls, monkeypatch)

    assert (env.config.total_steps, env.server_configs) == (1, [SERVER])


@pytest.mark.parametrize("result", [None, {"acc": 0.5}, [("acc", 0.5)], ("acc", 0.5)])
async def test_evaluate_may_return_anything(make_env: MakeEnv, result: Any) -> None:
    class Evaluated(SmallEnv):
        async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            assert (args, kwargs) == ((), {})
            return result

    await make_env(Evaluated)._run_evaluate()


class OneParameter(SmallEnv):
    async def wandb_log(self, metrics: Any) -> None:  # type: ignore[override]
        metrics["own"] = 1
        await super().wandb_log(metrics)


class WithStep(SmallEnv):
    async def wandb_log(self, metrics: Any, step: int = 0) -> None:  # type: ignore[override]
        metrics["own"] = 1
        await super().wandb_log(metrics)


class AnyWords(SmallEnv):
    async def wandb_log(self, *args: Any, **kwargs: Any) -> None:
        args[0]["own"] = 1
        await super().wandb_log(*args, **kwargs)


class Optional(SmallEnv):
    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        wandb_metrics = {} if wandb_metrics is None else wandb_metrics
        wandb_metrics["own"] = 1
        await super().wandb_log(wandb_metrics)


@pytest.mark.parametrize("env_cls", [OneParameter, WithStep, AnyWords, Optional])
async def test_wandb_log_overrides_of_every_signature_work_while_processing_and_serving(
    make_env: MakeEnv, tmp_path: Path, env_cls: type[Any]
) -> None:
    env = make_env(env_cls, metrics_path="m.jsonl")

    await process(env, groups=1)
    env.status_dict = {"current_step": 1, "queue_size": 0}
    env.items_sent_this_step = 2
    env.curr_step = 0
    await env.env_step_checks()

    assert [record["own"] for record in records(tmp_path / "m.jsonl")] == [1, 1]
    assert env.items_sent_this_step == 0


async def test_super_hooks_that_files_call_do_nothing(make_env: MakeEnv) -> None:
    env = make_env()

    assert await BaseEnv.setup(env) is None
    assert await BaseEnv.close(env) is None
    assert await BaseEnv.cleanup(env) is None
    assert BaseEnv.save_checkpoint(env, 3) is None
    assert BaseEnv.load_checkpoint(env) is None


class Opaque:
    """An item that can only be passed on."""

    __hash__ = None  # type: ignore[assignment]

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("an item was looked into")

    __eq__ = __bool__ = __len__ = __iter__ = __copy__ = __deepcopy__ = __reduce_ex__ = _refuse


OPAQUE_ITEMS = [
    ((frozenset({("role", "user")}),), "answer", None),
    {"question": "q", "answer": {1, 2}},
    Opaque(),
    0,
    "",
]


@pytest.mark.parametrize("item", OPAQUE_ITEMS, ids=lambda item: type(item).__name__)
async def test_items_are_opaque(make_env: MakeEnv, item: Any) -> None:
    seen: list[Any] = []

    class Items(SmallEnv):
        async def get_next_item(self) -> Any:
            return item

        async def collect_trajectories(self, item: Any) -> Any:
            seen.append(item)
            return scored(), [item]

        async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
            seen.append(item)

    env = make_env(Items)
    await process(env, groups=1)
    env._send_scored_data_to_api = take
    await env.rollout_scheduler.fill(lambda: 1, timeout_s=0)
    [worker] = env.workers
    await worker

    assert len(seen) == 4
    assert all(one is item for one in seen)
    assert len(env.backlog) == 1
    assert env.backlog[0] is item


async def test_none_from_get_next_item_starts_nothing_now_and_is_asked_again(
    make_env: MakeEnv,
) -> None:
    env = make_env()
    env.most_items = 0

    await env.rollout_scheduler.fill(lambda: 2, timeout_s=0)
    assert env.workers == set()
    env.most_items = 1
    await env.rollout_scheduler.fill(lambda: 2, timeout_s=0)

    assert len(env.workers) == 1
    await env.rollout_scheduler.shut_down(grace_s=1)


async def test_buffers_may_be_replaced_by_the_subclass(make_env: MakeEnv, tmp_path: Path) -> None:
    class Own(SmallEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.completion_lengths = []
            self.rollouts_for_wandb = []

        async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
            texts = self.tokenizer.batch_decode(scored_data["tokens"])
            rows = zip(texts, scored_data["scores"], ["answer"] * 2, strict=True)
            self.rollouts_for_wandb = [*self.rollouts_for_wandb, list(rows)]

        async def create_rollout_table(self, wdict: Any) -> Any:  # the name of its own
            wdict["own_rows"] = len(self.rollouts_for_wandb)
            self.rollouts_for_wandb = []
            return wdict

    await process(make_env(Own, metrics_path="m.jsonl"), groups=2)

    assert [record["own_rows"] for record in records(tmp_path / "m.jsonl")] == [1, 1]


def test_attributes_may_be_assigned_before_the_base_class_is_constructed(make_env: MakeEnv) -> None:
    class Early(SmallEnv):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.backlog = ["early"]
            self.completion_lengths = [1]
            self.eval_runner = None
            self.own = 3
            super().__init__(*args, **kwargs)

    env = make_env(Early)

    assert (env.backlog, env.completion_lengths, env.own) == ([], [], 3)


def test_servers_may_come_as_a_tuple(make_env: MakeEnv) -> None:
    make_env()

    env = SmallEnv(small_config(), (SERVER, SERVER))

    assert env.server_configs == [SERVER, SERVER]
    assert len(env.server.servers) == 2


def test_names_that_files_import_exist() -> None:
    assert Item is Any
    assert issubclass(APIServer, object)
    assert OpenaiConfig is APIServerConfig
    assert callable(tokenize_for_trainer_dpo)
    assert SERVERS[0].model_name == "m"
