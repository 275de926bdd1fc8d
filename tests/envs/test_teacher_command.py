"""`serve --teacher.*`: flags, YAML section, and how the teacher reaches the constructor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

import atroposlib.envs.teacher_distillation_env as module
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.settings import Defaults, field_values, layer_settings
from atroposlib.utils.cli import UsageError
from tests.envs.live_service import LiveService, ScriptedTrainer
from tests.envs.small_environment import SERVERS, SmallEnv
from tests.fakes import ScriptedEngine, logprob_of


class TaughtEnv(module.TeacherDistillationEnv, SmallEnv):
    """Notes its teacher instead of connecting to it, and serves nothing."""

    name = "taught"
    built: ClassVar[list[Any]] = []

    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        self.built.append(self)

    @classmethod
    def config_init(cls) -> Any:
        config = cls.env_config_cls(use_wandb=False, teacher_enabled=True, total_steps=1)
        return config, [APIServerConfig(model_name="m", base_url="http://policy/v1")]

    def connect_teacher(self, server_configs: Any) -> None:
        pass

    async def env_manager(self) -> None:
        self.events.append("serve")


@pytest.fixture
def run(make_env: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line in an empty folder; return the exit code and what was built."""

    def run(*words: str, env_cls: type[Any] = TaughtEnv) -> tuple[int, list[Any]]:
        env_cls.built = []
        monkeypatch.setattr(sys, "argv", ["taught.py", *words])
        with pytest.raises(SystemExit) as ended:
            env_cls.cli()
        return ended.value.code, env_cls.built

    return run


def test_serve_flags_reach_an_environment_whose_constructor_knows_no_teacher(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, [env] = run(
        "serve",
        *("--teacher.base_url", "http://teacher/v1", "--teacher.model_name", "big"),
        *("--teacher.api_key", "sk-secret", "--teacher.server_type", "vllm"),
    )

    assert code == 0
    [teacher] = [env.teacher_server_configs]
    assert (teacher.model_name, teacher.base_url) == ("big", "http://teacher/v1")
    assert env.events == ["serve"]
    shown = capsys.readouterr().out
    assert "teacher:\n  model_name: big" in shown
    assert "http://teacher/v1" in shown
    assert "sk-secret" not in shown


def test_serve_yaml_section_may_list_several_teachers(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("teacher:\n- model_name: a\n- model_name: b\n")

    code, [env] = run("serve", "--config", str(path))

    assert code == 0
    assert [server.model_name for server in env.teacher_server_configs] == ["a", "b"]


def test_serve_constructor_that_names_the_teacher_gets_it_by_name(run: Any) -> None:
    class NamingEnv(TaughtEnv):
        def __init__(
            self, config: Any, server_configs: Any, *, teacher_server_configs: Any = None
        ) -> None:
            self.given = teacher_server_configs
            super().__init__(config, server_configs)

    _, [env] = run("serve", "--teacher.model_name", "big", env_cls=NamingEnv)

    assert env.given.model_name == "big"


def test_serve_teacher_may_come_after_an_environment_that_knows_nothing_of_it(run: Any) -> None:
    class Plain(SmallEnv):
        def __init__(
            self, config: Any, server_configs: Any, slurm: bool = True, testing: bool = False
        ) -> None:
            super().__init__(config, server_configs, slurm, testing)

    class Mixed(Plain, module.TeacherDistillationEnv):
        env_config_cls = module.TeacherDistillationConfig
        config_init = TaughtEnv.config_init
        connect_teacher = TaughtEnv.connect_teacher
        built: ClassVar[list[Any]] = []

        async def env_manager(self) -> None:
            self.built.append(self)

    code, [env] = run("serve", "--teacher.model_name", "big", env_cls=Mixed)

    assert code == 0
    assert env.teacher_server_configs.model_name == "big"


def test_serve_own_default_teacher_is_used_and_may_be_changed(run: Any) -> None:
    class DefaultEnv(TaughtEnv):
        @classmethod
        def teacher_config_init(cls) -> Any:
            return [APIServerConfig(model_name="big", base_url="http://teacher/v1")]

    _, [env] = run("serve", "--teacher.timeout", "5", env_cls=DefaultEnv)

    [teacher] = env.teacher_server_configs
    assert (teacher.model_name, teacher.timeout) == ("big", 5)


@pytest.mark.parametrize("command", ["serve", "process", "evaluate"])
def test_teacher_enabled_without_servers_exits_2(
    run: Any, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(command)

    assert code == 2
    assert "no teacher server configuration was provided" in capsys.readouterr().err


def test_check_needs_no_teacher() -> None:
    config, servers = TaughtEnv.config_init()
    defaults = Defaults(type(config), field_values(config), servers)

    settings = layer_settings("check", defaults, {}, {})

    assert config.teacher_enabled is True
    assert settings.env.teacher_enabled is False  # type: ignore[attr-defined]


def test_process_knows_no_teacher_flags(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("process", "--teacher.model_name", "big")

    assert code == 2
    assert "unknown flag --teacher.model_name" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["serve", "--help", "all"], ["--help", "all"]])
def test_help_lists_every_teacher_flag(
    run: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(*words)

    text = capsys.readouterr().out
    assert code == 0
    assert "Teacher's inference server" in text
    for name in APIServerConfig.model_fields:
        assert f"--teacher.{name} " in text
    assert "--env.teacher_enabled" in text
    assert "--env.teacher_top_k" in text


TEACHER = APIServerConfig(model_name="teacher-model", base_url="http://t/v1")


def resolve(default: Any, yaml: Any, flags: Any) -> Any:
    return module.TeacherDistillationEnv._resolve_teacher_server_configs(default, yaml, flags)


@pytest.mark.parametrize(
    ("default", "yaml", "flags", "models"),
    [
        (None, None, {"teacher.model_name": "b"}, "b"),
        (None, {"model_name": "a"}, {}, "a"),
        (None, [{"model_name": "a"}, {"model_name": "b"}], {}, ["a", "b"]),
        ([TEACHER], None, {}, ["teacher-model"]),
        (module.ServerBaseline(), {"model_name": "a"}, {}, "a"),
        (TEACHER, {"model_name": "a"}, {"teacher.model_name": "b"}, "b"),
    ],
)
def test_resolve_gives_servers(default: Any, yaml: Any, flags: Any, models: Any) -> None:
    servers = resolve(default, {"teacher": yaml}, flags)

    listed = [s.model_name for s in servers] if isinstance(servers, list) else servers.model_name
    assert listed == models
    first = servers[0] if isinstance(servers, list) else servers
    assert isinstance(first, module.APIServerConfig)


def test_resolve_baseline_alone_stays_one() -> None:
    assert isinstance(resolve(module.ServerBaseline(), {}, {}), module.ServerBaseline)


@pytest.mark.parametrize(
    ("yaml", "flags", "message"),
    [
        ({"model": "a"}, {}, "teacher.model in the YAML file"),
        ({"timeout": "soon"}, {}, "teacher.timeout"),
        ([{}, {}], {"teacher.timeout": "1"}, "under teacher: in the YAML"),
        (3, {}, "teacher: expected one server"),
    ],
)
def test_resolve_refusals_name_the_teacher(yaml: Any, flags: Any, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve(None, {"teacher": yaml}, flags)

    assert message in refused.value.message


class ServingEnv(module.TeacherDistillationEnv, SmallEnv):
    """A teacher over HTTP; its tokenizer is the policy's."""

    def _validate_teacher_tokenizer_compatibility(self, teacher_tokenizer_name: str) -> None:
        pass


def serving(make_env: Any, url: str, engine_url: str, **settings: Any) -> Any:
    """An environment with a teacher at an engine, for a service."""
    base = make_env(rollout_server_url=url).config.model_dump()
    config = module.TeacherDistillationConfig(
        **{**base, "teacher_enabled": True, "teacher_top_k": 2, **settings}
    )
    teacher = APIServerConfig(base_url=engine_url, model_name="scripted", server_type="vllm")
    return ServingEnv(config, SERVERS, teacher_server_configs=teacher)


async def test_serving_sends_what_the_teacher_says_to_the_trainer(
    service: LiveService, make_env: Any
) -> None:
    service.start()
    async with ScriptedEngine(["ok"]) as engine, ScriptedTrainer(service.url) as trainer:
        env = serving(make_env, service.url, engine.base_url)
        await trainer.register()
        running = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 60)
        await asyncio.wait_for(running, 60)

    group = trainer.groups[0]
    assert group["tokens"] == [[65, 66, 67]] * 2
    ids, logprobs = group["distill_token_ids"][0], group["distill_logprobs"][0]
    assert [len(row) for row in ids] == [len(row) for row in logprobs] == [0, 2, 2]
    assert (ids[1][0], logprobs[1][0]) == (66, logprob_of(66, 1))
    assert env.failure_counts == {}


async def test_serving_goes_on_without_a_teacher_that_takes_too_long(
    service: LiveService, make_env: Any
) -> None:
    service.start()
    async with ScriptedTrainer(service.url) as trainer:
        env = serving(make_env, service.url, "http://127.0.0.1:9/v1", worker_timeout=0.05)
        await trainer.register()
        running = asyncio.create_task(env.env_manager())
        await asyncio.wait_for(trainer.train(3), 60)
        await asyncio.wait_for(running, 60)

    assert trainer.groups[0]["distill_token_ids"] is None
    assert env.failure_counts["teacher_logprobs"] >= 6
