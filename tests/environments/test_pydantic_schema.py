from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from atroposlib.sandbox import SandboxLimits, SandboxUnavailableError, open_sandbox
from atroposlib.tasks.schemas import (
    ERROR_TYPES,
    ModelSourceError,
    SchemaChecker,
    Syntax,
    example_of,
    write_object,
)
from environments.pydantic_schema_following_environment.pydantic_schema_following_environment import (  # noqa: E501 - the published path
    CONTAINERS,
    SAMPLE,
    SYNTAXES,
    Container,
    PydanticEnvConfig,
    PydanticSchemaFollowingEnv,
    contained_text,
    read_model_row,
)
from tests.environments.offline import PROBED, make_env, read_groups
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

SOURCE = """
from typing import Optional
from pydantic import BaseModel, EmailStr, Field

class Pet(BaseModel):
    name: str
    age: int = Field(ge=0)

class Owner(BaseModel):
    email: EmailStr
    pets: list[Pet]
    tags: list[str]
    phone: Optional[str]
"""
OWNER = {
    "email": "a@example.com",
    "pets": [{"name": "Rex", "age": 3}],
    "tags": ["one"],
    "phone": None,
}
LIMITS = SandboxLimits(wall_s=120, cpu_s=30, memory_bytes=2**30)
BRIEF = SandboxLimits(wall_s=60, cpu_s=1, memory_bytes=2**30)
"""For a program without end; to import pydantic may take a slow machine longer."""


@pytest.fixture
async def checker() -> SchemaChecker:
    """A checker in a sandbox whose Python can load pydantic."""
    try:
        opened = SchemaChecker(open_sandbox(), LIMITS)
        await opened.open()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return opened


@pytest.mark.parametrize("syntax", SYNTAXES)
async def test_valid_and_invalid_texts(checker: SchemaChecker, syntax: Syntax) -> None:
    if syntax == "toml":  # it has no null
        source, owner = SOURCE.replace("Optional[str]", "str"), {**OWNER, "phone": "1"}
    else:
        source, owner = SOURCE, OWNER
    objects = [
        owner,
        {**owner, "pets": [], "tags": []},
        {**owner, "pets": [{"name": "Rex", "age": 3}, {"name": "Tom", "age": 0}]},
        {**owner, "pets": [{"name": "Rex", "age": -1}]},
        {**owner, "email": "nowhere"},
        {key: value for key, value in owner.items() if key != "pets"},
    ]
    texts = [write_object(each, syntax) for each in objects]

    valid = await checker.validate(source, "Owner", syntax, [*texts, "", "}{ <", texts[0] * 2])

    assert valid == [True, True, True, False, False, False, False, False, False]


async def test_xml_list_may_be_repeated_elements(checker: SchemaChecker) -> None:
    pet = "<pets><name>Rex</name><age>3</age></pets>"
    text = "<o><email>a@example.com</email>{}<tags>a</tags><tags>b</tags><phone/></o>"

    valid = await checker.validate(
        SOURCE, "Owner", "xml", [text.format(pet), text.format(pet + pet), text.format("<pets/>")]
    )

    assert valid == [True, True, True]


STRICT = """
import datetime, enum, pydantic
class Color(enum.Enum):
    RED = "red"
class Car(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    color: Color
    built: datetime.date
    size: tuple[int, int]
"""


@pytest.mark.parametrize("syntax", ["json", "yaml"])
async def test_strict_model_takes_what_it_takes_from_json(
    checker: SchemaChecker, syntax: Syntax
) -> None:
    car = {"color": "red", "built": "2024-05-17", "size": [4, 2]}
    others = ({}, {"color": "blue"}, {"built": "May"}, {"size": ["4", 2]}, {"size": [4]})
    texts = [write_object({**car, **other}, syntax) for other in others]

    assert await checker.validate(STRICT, "Car", syntax, texts) == [True, *[False] * 4]


@pytest.mark.parametrize(
    ("source", "name", "message", "limits"),
    [
        ("class Pet: pass", "Pet", "not a pydantic model", LIMITS),
        (SOURCE, "Cat", "KeyError", LIMITS),
        ("import no_such_module", "Pet", "no_such_module", LIMITS),
        ("x = (", "Pet", "SyntaxError", LIMITS),
        ("raise SystemExit('out')", "Pet", "SystemExit: out", LIMITS),
        ("while True: pass", "Pet", "exceeds the limits", BRIEF),
    ],
)
async def test_source_that_cannot_be_used_is_an_error(
    checker: SchemaChecker, source: str, name: str, message: str, limits: SandboxLimits
) -> None:
    limited = SchemaChecker(checker._sandbox, limits)
    limited._files = checker._files

    with pytest.raises(ModelSourceError, match=message):
        await limited.schema(source, name)


async def test_source_runs_without_files_and_network_of_the_machine(
    checker: SchemaChecker, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    source = f"import os\nif os.path.exists({str(secret)!r}): raise ValueError('seen')\n"
    source += "print('{\"schema\": 1}')\n" + SOURCE

    schema = await checker.schema(source, "Pet")

    assert schema["required"] == ["name", "age"]


async def test_text_that_exhausts_the_limits_does_not_spoil_the_others(
    checker: SchemaChecker,
) -> None:
    source = SOURCE + (
        "\nfrom pydantic import field_validator\n"
        "class Slow(Pet):\n"
        "    @field_validator('name')\n"
        "    def wait(cls, name):\n"
        "        while name == 'slow': pass\n"
        "        return name\n"
    )
    limited = SchemaChecker(checker._sandbox, replace(BRIEF, cpu_s=5))
    limited._files = checker._files
    texts = [json.dumps({"name": name, "age": 1}) for name in ("a", "slow", "b")]

    assert await limited.validate(source, "Slow", "json", texts) == [True, False, True]


@pytest.mark.parametrize(
    ("container", "answer", "text"),
    [
        ("tagged", "So: <json_output>\n{}\n</json_output> done", "{}"),
        ("tagged", "<json_output>{}</json_output><json_output>{}</json_output>", None),
        ("tagged", "<yaml_output>{}</yaml_output>", None),
        ("tagged", "<json_output></json_output>", None),
        ("tagged", "{}", None),
        ("markdown", "So:\n```json\n{}\n```\ndone", "{}"),
        ("markdown", "```json\n{}\n```\n```json\n{}\n```", None),
        ("markdown", "```\n{}\n```", None),
        ("markdown", "```json\n{}", None),
        ("none", "\n{}\n", "{}"),
        ("none", "  ", None),
    ],
)
def test_object_is_taken_from_its_container(
    container: Container, answer: str, text: str | None
) -> None:
    assert contained_text(f"<think>{answer}</think>{answer}", "json", container) == text
    assert contained_text(answer, "json", container) is None


@pytest.mark.parametrize(
    "info",
    [
        "{",
        "[]",
        '{"model_name": "A"}',
        '{"pydantic_config": "x", "model_name": "not a name"}',
        '{"pydantic_config": 3, "model_name": "A"}',
        None,
    ],
)
def test_malformed_row_is_an_error(info: Any) -> None:
    with pytest.raises(ConfigError, match="verification_info"):
        read_model_row({"prompt": "p", "verification_info": info})


def test_settings_are_the_published_ones() -> None:
    config, _ = PydanticSchemaFollowingEnv.config_init()

    assert config.allowed_structured_formats == ["json", "yaml", "toml"]
    assert config.allowed_container_formats == list(CONTAINERS)
    assert (config.group_size, config.max_num_workers, config.eval_set_percentage) == (
        *(16, 16, 0.005),
    )
    defaults = PydanticEnvConfig()
    assert defaults.dataset_name == "justus27/pydantic-adherance-test"
    assert defaults.allowed_structured_formats is None
    assert defaults.error_types_enabled == list(ERROR_TYPES)
    assert (defaults.task_type, defaults.error_introduction_probability) == ("generation", 1.0)
    assert (defaults.max_errors_per_item, defaults.include_messages) == (1, True)


async def make(monkeypatch: pytest.MonkeyPatch, engine: ScriptedEngine, **settings: Any) -> Any:
    settings = {"dataset_path": str(SAMPLE), "debug_logging": False, **settings}
    env = make_env(PydanticSchemaFollowingEnv, engine, monkeypatch, **settings)
    await env.setup()
    return env


async def test_generation_group_scores_right_and_wrong_answers(
    checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = [PROBED]
    async with ScriptedEngine(lambda _: answers.pop(0)) as engine:
        dump = {"dump_rollouts": True, "dump_dir": str(tmp_path)}
        env = await make(monkeypatch, engine, group_size=3, **dump)
        item = await env.get_next_item()
        gold = env.check_gold_answer(item)
        answers += [gold, gold.replace("think>", "thought>"), "<think>I am not sure.</think> {"]
        group, _ = await env.collect_trajectories(item)
        answers += [gold] * 3
        equal, _ = await env.collect_trajectories(item)
        metrics: dict[str, Any] = {}
        await env.wandb_log(metrics)
        await env.close()
        await env.server.close()

    assert group["scores"] == [1.0, 0.0, 0.0]
    assert [chat[-1]["role"] for chat in group["messages"]] == ["assistant"] * 3
    assert equal is None
    assert metrics["train/percent_perfect"] == pytest.approx(4 / 6)
    saved = read_groups(tmp_path / "pydantic_schema_rollouts.jsonl")
    assert [row["scores"] for row in saved] == [[1.0], [1.0, 1.0, 1.0]]


async def test_object_to_correct_is_invalid_and_its_example_valid(
    checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = await make(monkeypatch, engine, task_type="editing", max_errors_per_item=2)
        items = [await env.get_next_item() for _ in range(3)]
        for item in items:
            gold = write_object(item.example, item.syntax)
            row = item.row
            valid = await checker.validate(
                row.source, row.model_name, item.syntax, [gold, item.broken]
            )
            assert valid == [True, False]
            assert item.broken in env.prompt(item)[1]["content"]
        await env.close()
        await env.server.close()


async def test_objects_to_correct_are_sound_with_probability_zero(
    checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        settings = {"task_type": "editing", "error_introduction_probability": 0.0}
        env = await make(monkeypatch, engine, **settings)
        item = await env.get_next_item()
        await env.close()
        await env.server.close()

    assert item.broken == write_object(item.example, item.syntax)


async def test_row_with_an_unusable_model_is_skipped_and_counted(
    checker: SchemaChecker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good, bad = (
        {"prompt": "p", "verification_info": {"pydantic_config": source, "model_name": "Pet"}}
        for source in (SOURCE, "import no_such_module")
    )
    for name, rows in (("mixed", [bad, good]), ("bad", [bad])):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (tmp_path / name / f"{split}.jsonl").write_text(text)
    async with ScriptedEngine([PROBED]) as engine:
        env = await make(monkeypatch, engine, dataset_path=str(tmp_path / "mixed"))
        items = [await env.get_next_item() for _ in range(2)]
        broken = await make(monkeypatch, engine, dataset_path=str(tmp_path / "bad"))
        with pytest.raises(ConfigError, match="no row has a model that can be used"):
            await broken.get_next_item()
        for each in (env, broken):
            await each.close()
            await each.server.close()

    assert {item.row.source for item in items} == {SOURCE}
    assert env.failure_counts["bad_model"] >= 2
    assert len(env.test_items) == 1


async def test_examples_of_the_sample_are_valid(checker: SchemaChecker) -> None:
    rows = [
        read_model_row(json.loads(line))
        for split in ("train", "test")
        for line in (SAMPLE / f"{split}.jsonl").read_text().splitlines()
    ]
    for number, row in enumerate(rows):
        schema = await checker.schema(row.source, row.model_name)
        examples = [example_of(schema, Random(seed)) for seed in range(5)]
        syntax = SYNTAXES[number % len(SYNTAXES)]
        texts = [write_object(example, syntax) for example in examples]
        assert await checker.validate(row.source, row.model_name, syntax, texts) == [True] * 5


@pytest.mark.long
async def test_environment_passes_the_check(checker: SchemaChecker) -> None:
    report = check_environment(PydanticSchemaFollowingEnv, task_type="editing")

    # A busy machine holds the loop too.
    assert {failure.name for failure in report.failures} <= {"blocking"}, report.text
