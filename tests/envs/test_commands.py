"""The command line of an environment, from words to the instance that ran."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from pydantic import Field
from pydantic_cli import Cmd

from atroposlib.envs.base import BaseEnv
from atroposlib.envs.commands import run_cli
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.config import APIServerConfig, ServerBaseline
from atroposlib.errors import ConfigError, MissingExtraError, NoTokenIdsError
from atroposlib.utils.cli import get_prefixed_pydantic_model
from tests.envs.command_environment import StandInConfig, StandInEnv, stand_in


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class ConfigWithTimeout(StandInConfig):
    timeout: float = 1.0


def call(env_cls: Any, line: str | list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command line; return the exit code."""
    words = line.split() if isinstance(line, str) else line
    monkeypatch.setattr("sys.argv", ["env.py", *words])
    with pytest.raises(SystemExit) as caught:
        run_cli(env_cls)
    return int(caught.value.code or 0)


def built_by(line: str | list[str], monkeypatch: pytest.MonkeyPatch, **attributes: Any) -> Any:
    """The one instance a successful command line built."""
    env_cls = stand_in(**attributes)
    assert call(env_cls, line, monkeypatch) == 0
    (env,) = env_cls.built
    return env


@pytest.mark.parametrize("line", ["", "--env.group_size 3 serve"])
def test_run_cli_without_command_prints_usage_and_exits_2(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(stand_in(), line, monkeypatch) == 2
    assert "usage: env.py {serve,process,evaluate,check}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srve", "unknown command 'srve'; did you mean serve?"),
        ("serve --env.grup_size 3", "did you mean --env.group_size?"),
        ("serve --grup_size 3", "unknown flag --grup_size; did you mean --env.group_size?"),
        ("serve --group-size 3", "unknown flag --group-size; did you mean --env.group_size?"),
        ("serve --timeout 3", "--timeout is ambiguous: write --env.timeout or --openai.timeout"),
        ("serve --env.group 7", "unknown flag --env.group"),
        ("serve --env.group_size x", "env.group_size: input should be a valid integer"),
        ("serve --env.group_size 0", "env.group_size: input should be greater than or equal to 1"),
        ("serve --env.eval_handling X", "env.eval_handling: input should be 'STOP_TRAIN'"),
        ("serve --openai.server_type x", "openai.server_type: input should be 'openai'"),
        ("serve --env.use_wandb", "--env.use_wandb needs a value: true or false"),
        ("serve --config missing.yaml", "config: cannot read missing.yaml: No such file"),
        ("process --env.data_path_to_save_groups None", "process needs a file to write to"),
        ("process --env.total_steps -1", "needs the number of groups to make, got -1"),
        ("serve --max_n_completions 0", "max_n_completions: input should be greater than"),
    ],
)
def test_run_cli_wrong_line_exits_2_with_one_message(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env_cls = stand_in(env_config_cls=ConfigWithTimeout)

    code = call(env_cls, line, monkeypatch)

    errors = capsys.readouterr().err
    assert (code, env_cls.built) == (2, [])
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no file there"),
        MissingExtraError("some-package", extra="examples"),
        NoTokenIdsError("use server_type vllm"),
    ],
)
def test_run_cli_setting_found_unusable_in_the_run_exits_2_with_its_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(_: Any) -> None:
        raise error

    assert call(stand_in(process_manager=fail), "process", monkeypatch) == 2

    assert f"env.py: error: {error}\n" in capsys.readouterr().err


def test_serve_runs_the_main_loop_with_flags_and_yaml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    content = {"env": {"group_size": 3, "tags": ["y"]}, "openai": {"model_name": "y"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    line = "serve --config run.yaml --env.tags a b --env.total_steps -1 --slurm true"

    env = built_by(line, monkeypatch)

    assert env.ran == ["serve"]
    assert (env.config.group_size, env.config.tags, env.config.total_steps) == (3, ["a", "b"], -1)
    assert env.server_configs == [
        APIServerConfig(model_name="y", base_url="http://inference:9001/v1")
    ]
    assert (env.slurm, env.testing) == (True, False)


@pytest.mark.parametrize(
    "line", ["--tokenizer_name=t --model_name=m", "--tokenizer_name t --model_name m"]
)
def test_serve_takes_names_without_their_prefix(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = built_by(f"serve {line} --group_size=3 --tags a b --total_steps -1", monkeypatch)

    assert (env.config.tokenizer_name, env.config.group_size) == ("t", 3)
    assert (env.config.tags, env.config.total_steps) == (["a", "b"], -1)
    assert env.server_configs == [
        APIServerConfig(model_name="m", base_url="http://inference:9001/v1")
    ]


def test_process_takes_settings_from_a_file_and_names_without_prefix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("env: {total_steps: 3}\nopenai: {model_name: y}\n")

    env = built_by("process --config run.yaml --data_path_to_save_groups g.jsonl", monkeypatch)

    assert env.ran == ["process"]
    assert (env.n_groups_to_process, env.config.data_path_to_save_groups) == (3, "g.jsonl")


def test_serve_total_steps_minus_one_means_minus_one_in_both_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for line in ("serve --env.total_steps -1", "serve --env.total_steps=-1"):
        assert built_by(line, monkeypatch).config.total_steps == -1


def test_serve_prints_changed_settings_and_keeps_all_with_secrets_masked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env = built_by("serve --openai.api_key sk-1234 --env.group_size 5", monkeypatch)

    printed = capsys.readouterr().out
    assert "sk-1234" not in printed + env.settings_yaml
    assert yaml.safe_load(printed) == {
        "env": {"group_size": 5, "use_wandb": False, "wandb_name": "stand_in"},
        "openai": [{"api_key": "***", "base_url": "http://inference:9001/v1", "model_name": "m"}],
    }
    kept = yaml.safe_load(env.settings_yaml)
    assert kept["openai"][0]["api_key"] == "***"
    assert kept["env"]["group_size"] == 5
    assert kept["env"]["max_token_length"] == StandInConfig().max_token_length
    assert list(kept) == ["env", "openai", "slurm", "testing"]


def test_serve_manager_settings_reach_the_server_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    env = built_by("serve --max_n_completions 3 --proxy_url http://p", monkeypatch)

    assert vars(env.server) == {
        "max_n_completions": 3,
        "proxy_url": "http://p",
        "use_proxy": True,
    }


def test_serve_manager_settings_not_given_leave_the_server_manager_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OwnManager(StandInEnv):
        built = []  # noqa: RUF012

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.server.max_n_completions = 99

    assert call(OwnManager, "serve", monkeypatch) == 0
    assert OwnManager.built[0].server.max_n_completions == 99


def test_serve_bare_server_config_arrives_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = APIServerConfig(base_url="http://inference/v1", n_kwarg_is_ignored=True)

    assert built_by("serve", monkeypatch, servers=bare).server_configs == [bare]


def test_serve_baseline_arrives_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_by("serve", monkeypatch, servers=ServerBaseline()).server_configs == (
        ServerBaseline()
    )


def test_process_sets_what_the_process_loop_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    env = built_by("process --env.total_steps 4", monkeypatch)

    assert env.ran == ["process"]
    assert env.process_mode is True
    assert (env.n_groups_to_process, env.group_size_to_process) == (4, 7)
    assert env.config.data_path_to_save_groups == "data/stand_in.jsonl"


@pytest.mark.parametrize("command", ["process", "evaluate"])
@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", "127.0.0.1"])
def test_process_and_evaluate_warn_about_a_local_server(
    command: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"{command} --openai.base_url http://{host}:9001/v1"

    with pytest.warns(UserWarning, match="inference server is on this machine"):
        built_by(line, monkeypatch)


def test_scripted_server_causes_no_warning_about_a_local_one(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    built_by("process --testing true --openai.base_url http://localhost:9001/v1", monkeypatch)

    assert not [w for w in recwarn if "inference server" in str(w.message)]


@pytest.mark.parametrize(
    ("servers", "shown"),
    [
        (
            [APIServerConfig(api_key="sk-1")],  # pragma: allowlist secret
            [{**APIServerConfig().model_dump(), "api_key": "***"}],
        ),
        (APIServerConfig(timeout=3), {**APIServerConfig().model_dump(), "timeout": 3}),
        (ServerBaseline(), {}),
    ],
)
def test_evaluate_writes_its_settings_with_secrets_masked(
    servers: Any, shown: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = built_by(
        "evaluate --env.data_dir_to_save_evals results/deep", monkeypatch, servers=servers
    )

    written = yaml.safe_load(Path("results/deep/evaluate_config.yaml").read_text())
    assert env.ran == ["evaluate"]
    assert list(written) == ["env", "openai", "slurm", "testing"]
    assert written["env"]["use_wandb"] is True
    assert written["openai"] == shown


def test_evaluate_without_a_directory_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built_by("evaluate", monkeypatch)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "env:\n", "openai:\nslurm:\n", "# only a comment\n"])
def test_serve_empty_yaml_changes_nothing(
    content: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(content)

    env = built_by("serve --config run.yaml", monkeypatch)

    assert env.config == built_by("serve", monkeypatch).config


def test_serve_repeated_key_of_yaml_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(
        "x: &base {group_size: 2, seed: 1}\nenv:\n  <<: *base\n  group_size: 3\n  group_size: 4\n"
    )

    with pytest.warns(UserWarning, match="last value of group_size in lines 4 and 5 is used"):
        env = built_by("serve --config run.yaml", monkeypatch)

    assert env.config.group_size == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- a\n", "must hold sections"),
        ("env: {", "is not YAML"),
        ("env:\n  x: 2001-13-45\n", "is not YAML in line 2, column 6: a value is not one of its"),
        ("env:\n\tgroup_size: 1", "yaml is not YAML in line 2, column 1: found character"),
        ("env:\n  grup_size: 1\n", "env.grup_size in the YAML file: no such setting; did you mean"),
    ],
)
def test_serve_wrong_yaml_exits_2(
    content: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.yaml").write_text(content)

    assert call(stand_in(), "serve --config run.yaml", monkeypatch) == 2
    assert message in capsys.readouterr().err


def test_serve_required_field_may_come_from_yaml_or_flags(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Needs(BaseEnvConfig):
        dataset: str = Field(description="Where it is.")
        split: str

    def config_init(cls: Any) -> Any:
        return cls.env_config_cls(), ServerBaseline()

    attributes = {"env_config_cls": Needs, "config_init": classmethod(config_init)}
    (tmp_path / "run.yaml").write_text("env:\n  dataset: d\n")

    env = built_by("serve --config run.yaml --env.split train", monkeypatch, **attributes)

    assert (env.config.dataset, env.config.split) == ("d", "train")
    assert call(stand_in(**attributes), "serve --env.split train", monkeypatch) == 2
    assert "env.dataset: field required" in capsys.readouterr().err


def test_serve_mapping_and_list_fields_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["serve", "--env.limits", json.dumps({"a": 1}), "--env.levels", "1", "-2"]

    env = built_by(words, monkeypatch)

    assert (env.config.limits, env.config.levels) == ({"a": 1}, [1, -2])


def test_run_cli_exception_of_the_command_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(StandInEnv):
        async def env_manager(self) -> None:
            raise KeyError("inside")

    monkeypatch.setattr("sys.argv", ["env.py", "serve"])
    with pytest.raises(KeyError, match="inside"):
        run_cli(Breaks)


def test_run_cli_refusal_of_an_inference_server_is_one_line_with_its_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = httpx.Request("POST", "http://127.0.0.1:1/v1/completions")
    response = httpx.Response(400, request=request)

    async def fail(_: Any) -> None:
        raise openai.BadRequestError("no 'max_tokens', sk-secret0123", response=response, body=None)

    assert call(stand_in(process_manager=fail), "process", monkeypatch) == 1

    last_line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        r"env\.py: error: .*test_commands\.py:\d+: an inference server refused a request: "
        r"no 'max_tokens', \*\*\*",
        last_line,
    )


def test_run_cli_refusal_of_a_chat_template_is_one_line_with_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def apply_chat_template() -> None:
        raise ValueError("Conversation roles\nmust alternate")

    async def fail(_: Any) -> None:
        apply_chat_template()

    assert call(stand_in(process_manager=fail), "process", monkeypatch) == 1

    assert re.fullmatch(
        r"env\.py: error: .*test_commands\.py:\d+: the tokenizer's chat template does not render "
        r"the conversation: ValueError: Conversation roles must alternate",
        capsys.readouterr().err.splitlines()[-1],
    )


async def test_run_cli_inside_a_running_event_loop_works(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built_by("serve", monkeypatch).ran == ["serve"]


def test_run_cli_own_command_class_of_an_environment_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    prefixed = get_prefixed_pydantic_model(BaseEnvConfig, "env.")

    class Own(prefixed, Cmd):  # type: ignore[valid-type,misc]
        note: str = "none"

        def run(self) -> None:
            seen.append((getattr(self, "env.total_steps"), self.note, self.model_fields_set))

    env_cls = stand_in(get_cli_serve_config_cls=classmethod(lambda cls: Own))

    assert call(env_cls, "serve --env.total_steps -1 --note x", monkeypatch) == 0
    assert seen == [(-1, "x", {"env.total_steps", "note"})]


def test_run_cli_subclassed_command_adds_flags_and_constructor_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def serve_class(cls: Any) -> Any:
        base: Any = StandInEnv.get_cli_serve_config_cls.__func__(cls)  # type: ignore[attr-defined]

        class WithTeacher(base):  # type: ignore[misc]
            teacher: str | None = None

            def extra_arguments(self, yaml_config: Any) -> dict[str, Any]:
                return {"teacher": self.teacher}

        return WithTeacher

    class Taught(StandInEnv):
        built = []  # noqa: RUF012
        get_cli_serve_config_cls = classmethod(serve_class)  # type: ignore[assignment]

        def __init__(self, *args: Any, teacher: str | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = teacher

    assert call(Taught, "serve --teacher t", monkeypatch) == 0
    assert Taught.built[0].teacher == "t"  # type: ignore[attr-defined]


@pytest.mark.parametrize("http_client", ["httpx", "httpx2"])
def test_run_cli_hides_the_line_per_request_of_the_openai_client(
    http_client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(http_client), "level", logging.NOTSET)

    built_by("serve", monkeypatch)

    assert logging.getLogger(http_client).level == logging.WARNING


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("serve", "env.data_path_to_save_groups"),
        ("serve", "env.metrics_path"),
        ("serve", "env.data_dir_to_save_evals"),
        ("process", "env.data_path_to_save_groups"),
        ("process", "env.metrics_path"),
        ("evaluate", "env.data_dir_to_save_evals"),
        ("evaluate", "env.metrics_path"),
        ("check", "json"),
    ],
)
def test_place_that_cannot_be_written_is_refused_before_anything_is_built(
    command: str,
    setting: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("")
    env_cls = stand_in()

    code = call(env_cls, f"{command} --{setting} afile/sub/out.jsonl", monkeypatch)

    assert code == 2
    assert env_cls.built == []
    *_, line = capsys.readouterr().err.splitlines()
    assert "afile" in line
    assert line.endswith(f"choose another place with --{setting}")


async def _later(cls: Any) -> Any:
    return BaseEnvConfig(), []


@pytest.mark.parametrize(
    ("config_init", "message"),
    [
        (classmethod(lambda cls: BaseEnvConfig()), "returned BaseEnvConfig; expected settings"),
        (classmethod(lambda cls: ({}, [])), "returned (dict, list); expected settings and servers"),
        (classmethod(lambda cls: None), "returned NoneType; expected settings and servers"),
        (classmethod(_later), "returned coroutine; expected settings and servers"),
        (lambda cls: (BaseEnvConfig(), []), "is not a class method: write @classmethod"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "check"])
def test_run_cli_config_init_that_does_not_fit_is_named_with_its_file(
    command: str,
    config_init: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    env_cls = stand_in(config_init=config_init)

    assert call(env_cls, command, monkeypatch) == 2

    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("env.py: error: StandIn.config_init in ")
    assert message in line


def test_run_cli_constructor_without_that_of_the_base_class_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Alone(BaseEnv):
        def __init__(self, config: Any, server_configs: Any) -> None:
            self.config = config

        async def get_next_item(self) -> Any: ...

        async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...

    assert call(Alone, "serve", monkeypatch) == 2
    assert "test_commands.py does not call super().__init__(config," in capsys.readouterr().err


def test_run_cli_exit_of_the_environment_names_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(self: Any) -> None:
        raise SystemExit(3)

    assert call(stand_in(env_manager=leave), "serve", monkeypatch) == 3
    assert "test_commands.py:" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "process", "evaluate", "check"])
def test_run_cli_name_that_is_no_string_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(stand_in(name=3), command, monkeypatch) == 2
    assert re.search(r"StandIn\.name in .* is 3; expected a string", capsys.readouterr().err)


@pytest.mark.parametrize("name", [3, property(lambda env: "own")])
def test_name_that_the_run_does_not_need_is_not_refused(
    name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config_init() -> tuple[Any, Any]:
        return StandInConfig(wandb_name="run"), StandInEnv.servers

    env = built_by("serve", monkeypatch, name=name, config_init=staticmethod(config_init))

    assert env.config.wandb_name == "run"


def test_process_of_an_environment_with_a_property_as_name_has_the_default_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = built_by("process", monkeypatch, name=property(lambda env: "own"))

    assert env.config.data_path_to_save_groups == "data/groups.jsonl"


@pytest.mark.parametrize("line", ["--help", "serve --help all"])
def test_help_may_be_read_in_part(
    line: str, monkeypatch: pytest.MonkeyPatch, leave_reader: Callable[[], None]
) -> None:
    leave_reader()

    assert call(stand_in(), line, monkeypatch) == 0
