"""A teacher's log-probabilities: what is asked, what is attached, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import atroposlib.envs.teacher_distillation_env as module
from atroposlib.envs.teacher_distillation_env import (
    TeacherDistillationConfig,
    TeacherDistillationEnv,
)
from tests.envs.small_environment import SERVERS, SmallEnv, small_config
from tests.fakes import CharTokenizer


class ConcreteEnv(TeacherDistillationEnv):
    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        return None


class Teacher:
    """Answers two ids per position; `fails_at` counts from 1."""

    def __init__(self, *, fails_at: int = 0, rows_lost: int = 0) -> None:
        self.calls: list[dict[str, Any]] = []
        self.fails_at = fails_at
        self.rows_lost = rows_lost

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(kwargs)
        if len(self.calls) == self.fails_at:
            raise RuntimeError("the teacher is away")
        ids = kwargs["input_ids"]
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [[token, token + 1] for token in ids],
            "prompt_topk_logprobs": [[-0.1, -0.2] for _ in ids[self.rows_lost :]],
        }


def bare_env(*, top_k: int = 0, enabled: bool = True, teacher: Any = None) -> Any:
    env: Any = object.__new__(ConcreteEnv)
    env.config = SimpleNamespace(teacher_enabled=enabled, teacher_top_k=top_k)
    env.teacher_server = teacher
    return env


def group(**fields: Any) -> Any:
    return {"tokens": [[1, 2, 3], [4, 5]], "group_overrides": None, **fields}


async def attach(env: Any, candidate: Any) -> Any:
    return await TeacherDistillationEnv._attach_teacher_distillation(env, candidate)


async def test_attach_gives_every_position_of_every_sequence_its_rows() -> None:
    teacher = Teacher()

    out = await attach(bare_env(top_k=2, teacher=teacher), group())

    assert [len(rows) for rows in out["distill_token_ids"]] == [3, 2]
    assert out["distill_token_ids"][1] == [[4, 5], [5, 6]]
    assert [len(rows) for rows in out["distill_logprobs"]] == [3, 2]
    assert teacher.calls[0] == {
        "input_ids": [1, 2, 3],
        "top_k": 2,
        "max_tokens": 1,
        "split": "train",
    }


@pytest.mark.parametrize("teacher", [Teacher(fails_at=2), Teacher(rows_lost=1)])
async def test_attach_failing_teacher_leaves_the_group_without(teacher: Teacher) -> None:
    out = await attach(bare_env(teacher=teacher), group())

    assert out["distill_token_ids"] is None
    assert out["distill_logprobs"] is None


@pytest.mark.parametrize(("top_k", "num_calls"), [(-1, 0), (0, 2), (5, 2)])
async def test_attach_top_k_of_minus_one_asks_nothing(top_k: int, num_calls: int) -> None:
    teacher = Teacher()

    out = await attach(bare_env(top_k=top_k, teacher=teacher), group())

    assert len(teacher.calls) == num_calls
    assert (out["distill_token_ids"] is not None) is (num_calls > 0)
    assert (out["distill_logprobs"] is not None) is (num_calls > 0)


async def test_attach_group_may_ask_for_another_top_k() -> None:
    env = bare_env(top_k=0, teacher=Teacher())
    seen: list[int] = []

    async def fetch(token_ids: list[int], top_k: int) -> Any:
        seen.append(top_k)
        return [[token] for token in token_ids], [[-0.5] for _ in token_ids]

    env._fetch_teacher_for_sequence = fetch

    out = await attach(env, group(group_overrides={"teacher_top_k": 7}))

    assert seen == [7, 7]
    assert out["distill_token_ids"] == [[[1], [2], [3]], [[4], [5]]]


@pytest.mark.parametrize(
    "fields",
    [
        {"group_overrides": {"skip_teacher_top_k": True}},
        {"group_overrides": {"teacher_top_k": -1}},
        {"tokens": []},
        {"tokens": None},
    ],
)
async def test_attach_group_that_wants_none_gets_none(fields: dict[str, Any]) -> None:
    teacher = Teacher()

    out = await attach(bare_env(top_k=3, teacher=teacher), group(**fields))

    assert teacher.calls == []
    assert (out["distill_token_ids"], out["distill_logprobs"]) == (None, None)


@pytest.mark.parametrize(("enabled", "teacher"), [(False, Teacher()), (True, None)])
async def test_attach_without_a_teacher_changes_nothing(enabled: bool, teacher: Any) -> None:
    candidate = group()

    out = await attach(bare_env(enabled=enabled, teacher=teacher), candidate)

    assert out is candidate
    assert out == group()


class Tokenizer:
    def __init__(self, vocabulary: dict[str, int], name_or_path: str = "student-model") -> None:
        self.vocabulary = vocabulary
        self.name_or_path = name_or_path

    def get_vocab(self) -> dict[str, int]:
        return self.vocabulary


def use_teacher_tokenizer(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)


def validate(teacher_name: str) -> None:
    env: Any = object.__new__(ConcreteEnv)
    env.tokenizer = Tokenizer({"a": 1})
    TeacherDistillationEnv._validate_teacher_tokenizer_compatibility(
        env, teacher_tokenizer_name=teacher_name
    )


def test_tokenizer_with_another_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_teacher_tokenizer(monkeypatch, lambda name, use_fast: Tokenizer({"b": 1}))

    with pytest.raises(ValueError, match="Cross-tokenizer distillation is not supported"):
        validate("teacher-model")


def test_tokenizer_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, use_fast: bool) -> Any:
        raise OSError("no such repository")

    use_teacher_tokenizer(monkeypatch, load)

    with pytest.raises(ValueError, match=r"Cross-tokenizer .* no such repository"):
        validate("teacher-model")


def test_tokenizer_with_the_same_vocabulary_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(name: str, **kwargs: Any) -> Any:
        asked.append((name, kwargs))
        return Tokenizer({"a": 1})

    use_teacher_tokenizer(monkeypatch, load)

    validate("teacher-model")
    validate("student-model")  # the same name: nothing is loaded

    assert asked == [("teacher-model", {"use_fast": True})]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the constructor hands to the parts that the contract names."""
    seen: dict[str, Any] = {}

    def init(
        self: Any, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        self.config = config
        seen["base"] = (server_configs, slurm, testing)

    class Manager:
        def __init__(self, configs: Any, slurm: bool = False, testing: bool = False) -> None:
            seen["configs"] = configs

    monkeypatch.setattr(module.BaseEnv, "__init__", init)
    monkeypatch.setattr(module, "ServerManager", Manager)
    monkeypatch.setattr(
        TeacherDistillationEnv,
        "_validate_teacher_tokenizer_compatibility",
        lambda self, name: seen.update(tokenizer=name),
    )
    return seen


ENABLED = SimpleNamespace(teacher_enabled=True, teacher_top_k=0)
TEACHER = module.APIServerConfig(
    model_name="teacher-model", base_url="http://t/v1", tokenizer_name="teacher-tokenizer"
)


def test_constructor_without_teacher_servers_is_refused(seen: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no teacher server configuration was provided"):
        ConcreteEnv(ENABLED, [])


@pytest.mark.parametrize("given", [[TEACHER], TEACHER])
def test_constructor_connects_the_teacher(seen: dict[str, Any], given: Any) -> None:
    env = ConcreteEnv(ENABLED, ["policy"], teacher_server_configs=given)

    assert seen["configs"] == [TEACHER]
    assert seen["tokenizer"] == "teacher-tokenizer"
    assert seen["base"] == (["policy"], False, False)
    assert isinstance(env.teacher_server, module.ServerManager)


@pytest.mark.parametrize("unnamed", ["", "none"])
def test_constructor_tokenizer_defaults_to_the_model(seen: dict[str, Any], unnamed: str) -> None:
    config = TEACHER.model_copy(update={"tokenizer_name": unnamed})

    ConcreteEnv(ENABLED, [], teacher_server_configs=[config])

    assert seen["tokenizer"] == "teacher-model"


def test_constructor_disabled_needs_no_teacher(seen: dict[str, Any]) -> None:
    env = ConcreteEnv(SimpleNamespace(teacher_enabled=False), [], teacher_server_configs=[TEACHER])

    assert env.teacher_server is None
    assert "configs" not in seen


def test_constructor_called_by_position_as_environments_do(seen: dict[str, Any]) -> None:
    class Mixed(ConcreteEnv):
        teacher_server_configs = (TEACHER,)

        def __init__(self, config: Any, server_configs: Any, slurm: bool, testing: bool) -> None:
            super().__init__(config, server_configs, slurm, testing)

    Mixed(ENABLED, ["policy"], True, False)

    assert seen["base"] == (["policy"], True, False)
    assert seen["configs"] == (TEACHER,)


def resolve(default: Any = None, yaml: Any = None, flags: Any = None) -> Any:
    return TeacherDistillationEnv._resolve_teacher_server_configs(
        default_teacher_server_configs=default,
        yaml_config=yaml or {},
        cli_passed_flags=flags or {},
    )


def test_resolve_nothing_given_is_none() -> None:
    assert resolve() is None
    assert resolve(yaml={"env": {}, "teacher": None}, flags={"openai.base_url": "x"}) is None


def test_resolve_hands_the_merged_layers_on(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: dict[str, Any] = {}

    def resolve_openai_configs(**kwargs: Any) -> str:
        captured.update(kwargs)
        return "resolved"

    monkeypatch.setattr(module, "resolve_openai_configs", resolve_openai_configs)
    default = module.APIServerConfig(model_name="m", base_url="http://default/v1")

    result = resolve(
        default,
        {"teacher": {"tokenizer_name": "teacher-tokenizer"}},
        {"teacher.base_url": "http://override/v1"},
    )

    assert result == "resolved"
    assert captured["default_server_configs"] is default
    assert captured["openai_config_dict"]["base_url"] == "http://override/v1"
    assert captured["openai_config_dict"]["tokenizer_name"] == "teacher-tokenizer"
    assert captured["openai_config_dict"]["model_name"] == "m"
    assert captured["yaml_config"] == {"openai": {"tokenizer_name": "teacher-tokenizer"}}
    assert captured["cli_passed_flags"] == {"openai.base_url": "http://override/v1"}
    assert captured["logger"] is module.logger


class TaughtEnv(TeacherDistillationEnv, SmallEnv):
    """A scripted environment whose teacher is scripted too."""

    def connect_teacher(self, server_configs: Any) -> None:
        self.teacher_server = Teacher()  # type: ignore[assignment]  # all that is asked of it


@pytest.fixture
def taught(make_env: Any) -> Any:
    class Settings(TeacherDistillationConfig):
        pass

    made = make_env(SmallEnv)  # for its folder and its tokenizer
    values = {**made.config.model_dump(), "teacher_enabled": True, "teacher_top_k": 2}
    env = TaughtEnv(Settings(**values), SERVERS, teacher_server_configs=[TEACHER])
    env.sent = []

    async def send(scored_data: Any) -> None:
        env.sent.append(scored_data)

    env._send_scored_data_to_api = send
    return env


def scored(*scores: float) -> dict[str, Any]:
    size = len(scores)
    return {"tokens": [[65, 66]] * size, "masks": [[-100, 66]] * size, "scores": list(scores)}


async def test_send_asks_the_teacher_for_admitted_groups_only(taught: Any) -> None:
    await taught.handle_send_to_api([scored(1.0, 1.0), None, scored(0.0, 1.0), scored(1.0)])

    [[sent]] = taught.sent
    assert sent["distill_token_ids"] == [[[65, 66], [66, 67]]] * 2
    assert len(taught.teacher_server.calls) == 2
    assert taught.drop_counts == {"scores_equal": 1, "wrong_size": 1}


async def test_send_goes_on_without_a_failing_teacher_and_counts(taught: Any) -> None:
    taught.teacher_server.fails_at = 1

    await taught.handle_send_to_api(scored(0.0, 1.0))

    assert taught.sent[0]["distill_logprobs"] is None
    assert taught.failure_counts == {"teacher_logprobs": 1}


async def test_send_group_without_wish_for_a_teacher_is_no_failure(taught: Any) -> None:
    group_without = {**scored(0.0, 1.0), "group_overrides": {"skip_teacher_top_k": True}}

    await taught.handle_send_to_api(group_without)

    assert taught.failure_counts == {}
    assert taught.teacher_server.calls == []


def test_late_teacher_may_be_connected(make_env: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    env: Any = object.__new__(ConcreteEnv)
    env.tokenizer = CharTokenizer()
    env.tokenizer.name_or_path = "teacher-tokenizer"

    env.connect_teacher(TEACHER)

    assert env.teacher_server.servers[0].config.base_url == "http://t/v1"


def test_names_on_the_module_are_the_ones_of_base() -> None:
    from atroposlib.envs import base

    reexported = set(module.__all__) - {
        "TeacherDistillationConfig",
        "TeacherDistillationEnv",
        "logger",
    }
    assert len(reexported) == 8
    for name in reexported:
        assert getattr(module, name) is getattr(base, name)


def test_config_bounds() -> None:
    config = TeacherDistillationConfig()

    assert (config.teacher_enabled, config.teacher_top_k) == (False, 0)
    assert TeacherDistillationConfig(teacher_top_k=-1).teacher_top_k == -1
    with pytest.raises(ValueError, match="teacher_top_k"):
        TeacherDistillationConfig(teacher_top_k=-2)
    assert small_config().group_size == 2
