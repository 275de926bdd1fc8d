"""The adapter of data sets, on files and on the streams of the installed `datasets`."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.adapters.dataset import DatasetAdapter, DatasetArgs
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.conversation import Turn
from atroposlib.errors import ConfigError, UnknownRewardError
from tests.adapters.playing import adapter_env, roll_out

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
ROWS = [
    {"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n % 3} for n in range(40)
]


def write(path: Path, rows: Any = ROWS) -> str:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as table:
            writer = csv.DictWriter(table, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:  # JSON is YAML
        path.write_text(json.dumps(rows), encoding="utf-8")
    return str(path)


async def opened(name: str, *, seed: int = 0, **args: Any) -> DatasetAdapter:
    adapter = DatasetAdapter(name, DatasetArgs(**{"score_workers": 0, **args}), seed=seed)
    await adapter.open()
    return adapter


async def questions(adapter: DatasetAdapter, first: int, last: int) -> list[str]:
    items = [await adapter.item(index) for index in range(first, last)]
    return [item["messages"][-1]["content"] for item in items]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".yaml", ".csv", ".parquet"])
async def test_file_of_each_format_gives_the_same_items(tmp_path: Path, suffix: str) -> None:
    adapter = await opened(write(tmp_path / f"rows{suffix}"), shuffle_buffer=0, eval_every=0)

    assert await questions(adapter, 0, 40) == [row["question"] for row in ROWS]
    assert (await adapter.item(40))["answer"] == "0"  # the second pass


@pytest.mark.parametrize("buffer", [0, 7, 1000])
async def test_restart_continues_after_the_last_row(tmp_path: Path, buffer: int) -> None:
    name = write(tmp_path / "rows.jsonl")
    first = await opened(name, shuffle_buffer=buffer)
    seen = await questions(first, 0, 100)

    restored = await opened(name, shuffle_buffer=buffer)
    restored.restore(json.loads(json.dumps(first.state())))
    stateless = await opened(name, shuffle_buffer=buffer)

    assert await questions(restored, 57, 100) == seen[57:]
    assert await questions(stateless, 90, 100) == seen[90:]


async def test_order_depends_on_the_seed_and_the_pass(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl")
    adapters = [await opened(name, seed=seed, eval_every=0) for seed in (1, 1, 2)]

    first, again, other = [await questions(adapter, 0, 80) for adapter in adapters]

    assert first == again != other
    assert sorted(first[:40]) == sorted(first[40:]) == sorted(row["question"] for row in ROWS)
    assert first[:40] != first[40:]


async def test_evaluation_rows_are_not_trained_on(tmp_path: Path) -> None:
    adapter = await opened(write(tmp_path / "rows.jsonl"), eval_every=4)

    held_out = {item["messages"][-1]["content"] for item in await adapter.eval_items(100)}
    trained = set(await questions(adapter, 0, 60))

    assert held_out
    assert trained
    assert held_out.isdisjoint(trained)
    assert held_out | trained == {row["question"] for row in ROWS}


async def test_folder_has_a_file_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS[:5])
    write(tmp_path / "test.jsonl", ROWS[5:8])

    adapter = await opened(str(tmp_path), eval_split="test")

    assert len(await adapter.eval_items(10)) == 3
    assert sorted(await questions(adapter, 0, 5)) == [row["question"] for row in ROWS[:5]]


async def test_large_file_is_not_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import atroposlib.adapters.dataset as page

    path = tmp_path / "rows.jsonl"
    path.touch()
    read = 0

    def endless(path: Path) -> Any:
        nonlocal read
        while True:
            read += 1
            yield {"question": f"number {read}", "answer": str(read)}

    monkeypatch.setattr(page, "iter_records", endless)
    monkeypatch.setattr(page, "ROWS_CHECKED", 100)
    adapter = await opened(str(path), shuffle_buffer=50)

    await questions(adapter, 0, 20)

    assert 120 <= read < 300


async def test_later_row_without_an_answer_is_named_before_training(tmp_path: Path) -> None:
    rows = [*ROWS[:5], {"question": "which one?"}]
    path = write(tmp_path / "rows.jsonl", rows)

    expected = (
        r"rows\.jsonl: a row has no column 'answer'; the columns are question; the row is "
        r"\{'question': 'which one\?'\} \(row 6\)"
    )
    with pytest.raises(ConfigError, match=expected):
        await opened(str(path))


@pytest.mark.parametrize("column", ["question", "answer"])
async def test_row_without_a_value_after_those_checked_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, caplog: pytest.LogCaptureFixture
) -> None:
    import atroposlib.adapters.dataset as page

    monkeypatch.setattr(page, "ROWS_CHECKED", 1)
    rows = [{**row, column: None} if row is ROWS[7] else row for row in ROWS]
    name = write(tmp_path / "rows.jsonl", rows)
    adapter = await opened(name, shuffle_buffer=0, eval_every=5)

    held_out = [item["messages"][-1]["content"] for item in await adapter.eval_items(100)]
    trained = await questions(adapter, 0, 39 - len(held_out))
    again = await questions(adapter, 39 - len(held_out), 41 - len(held_out))

    assert sorted([*held_out, *trained]) == sorted(r["question"] for r in ROWS if r is not ROWS[7])
    assert again == trained[:2]
    assert adapter.metrics()["rows_skipped"] > 0
    assert f"the column {column!r} has no value; the row is" in caplog.text


async def test_evaluation_split_of_one_file_is_refused(tmp_path: Path) -> None:
    adapter = await opened(write(tmp_path / "rows.jsonl"), eval_split="test")

    with pytest.raises(ConfigError, match=r"eval_split: .*rows\.jsonl is one file"):
        await adapter.eval_items(4)


async def test_chat_and_template_become_the_prompt(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
    ]
    name = write(tmp_path / "rows.json", [{"chat": chat, "a": 1, "b": "x"}])
    options: dict[str, Any] = {"answer_field": None, "eval_every": 0, "system_prompt": "Be kind."}

    by_chat = await opened(name, messages_field="chat", **options)
    by_template = await opened(name, template="{a} and {b}", item_fields=["b"], **options)

    system = {"role": "system", "content": "Be kind."}
    assert (await by_chat.item(0))["messages"] == [system, chat[0]]
    item = await by_template.item(0)
    assert item["messages"] == [system, {"role": "user", "content": "1 and x"}]
    assert item["row"] == {"b": "x"}


async def test_system_message_of_a_row_joins_that_of_the_settings(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    name = write(tmp_path / "rows.json", [{"chat": chat}])
    options: dict[str, Any] = {"answer_field": None, "eval_every": 0, "messages_field": "chat"}

    adapter = await opened(name, system_prompt="Be kind.", **options)

    system = {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert (await adapter.item(0))["messages"] == [system, chat[1]]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_calls_of_a_chat_are_kept(tmp_path: Path, suffix: str) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    chat = [
        {"role": "user", "content": "use f"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 5."},
    ]
    name = write(tmp_path / f"rows{suffix}", [{"chat": chat, "answer": "5"}])

    adapter = await opened(name, messages_field="chat", eval_every=0)

    assert (await adapter.item(0))["messages"] == [chat[0], {**chat[1], "content": ""}, chat[2]]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user", "content": None}], "the message .*; expected a role and a text"),
        ([{"role": "user", "content": 5}], "the message .*; expected a role and a text"),
        ([{"role": None, "content": "hi"}], "the message .*; expected a role and a text"),
        ([{"role": "assistant", "content": "hi"}], "assistant messages only"),
    ],
)
async def test_chat_without_a_prompt_is_named_at_the_start(
    tmp_path: Path, chat: Any, message: str
) -> None:
    name = write(tmp_path / "rows.json", [{"chat": chat, "answer": "5"}])

    with pytest.raises(ConfigError, match=rf"rows\.json: chat has .*{message}"):
        await opened(name, messages_field="chat")


async def test_list_of_right_answers_is_refused_by_functions_that_compare(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": "q", "answer": ["Paris"]}]
    one = await opened(write(tmp_path / "one.json", rows), eval_every=0)
    several = write(tmp_path / "several.json", [{"question": "q", "answer": ["Paris", "paris"]}])
    record = write(tmp_path / "record.json", [{"question": "q", "answer": {"text": "Paris"}}])
    other = await opened(several, eval_every=0, reward_functions=["format"])

    assert one.gold_answer(await one.item(0)) == "<answer>\\boxed{Paris}</answer>"
    assert (await other.item(0))["answer"] == ["Paris", "paris"]
    for name in (several, record):
        with pytest.raises(ConfigError, match=r"answer is .*accuracy compares with one text"):
            await opened(name)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "q", "answer": " "}, "answer is ' '; accuracy compares with one text"),
        ({"question": "q", "answer": float("nan")}, "answer is nan; accuracy compares with one"),
        ({"question": "q", "answer": []}, r"answer is \[\]; accuracy compares with one"),
        ({"question": "", "answer": "1"}, "the question is empty"),
    ],
)
async def test_row_with_an_empty_value_is_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    name = write(tmp_path / "rows.json", [row])

    with pytest.raises(ConfigError, match=message):
        await opened(name)


async def test_reward_functions_are_named_parts(
    tmp_path: Path, make_env: Callable[..., Any]
) -> None:
    make_env()  # puts the character tokenizer in place
    name = write(tmp_path / "rows.jsonl")
    functions = [
        "accuracy",
        {"type": "format", "weight": 3, "params": {"preferred_tags": ["think"]}},
    ]
    args = {"reward_functions": functions, "score_workers": 1, "shuffle_buffer": 0}

    async with adapter_env(f"dataset:{name}", args, lambda _: "\\boxed{4}", group_size=1) as env:
        item = {"messages": [{"role": "user", "content": "2 + 2"}], "answer": "4", "row": {}}
        [rollout], group = await roll_out(env, item)

    assert rollout.reward_parts == [{"accuracy": 0.25, "format": 0.0}]
    assert group["scores"] == [0.25]


async def test_reward_function_that_raises_fails_its_rollout_only(
    tmp_path: Path, make_env: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from atroposlib.envs.reward_fns import registry
    from atroposlib.errors import EpisodeError

    make_env()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @registry.register_function("strict_number")
    def strict_number(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(completion[0]["content"]) for completion in completions]

    name = write(tmp_path / "rows.jsonl")
    args = {"reward_functions": ["strict_number"], "score_workers": 0}
    replies = iter(["ok", "x", "x", "0.5"])
    async with adapter_env(f"dataset:{name}", args, lambda _: next(replies), group_size=1) as env:
        item = await env.get_next_item()
        with pytest.raises(EpisodeError, match="could not convert"):
            await env.collect_trajectory(item)
        rollout, _ = await env.collect_trajectory(item)

    assert rollout.rewards == [0.5]


async def test_reward_that_takes_longer_than_a_step_counts(
    tmp_path: Path, make_env: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from atroposlib.envs.reward_fns import registry

    make_env()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    is_released = threading.Event()

    @registry.register_function("patient")
    def patient(completions: list[Any], **kwargs: Any) -> list[float]:
        is_released.wait(60)
        return [1.0]

    name = write(tmp_path / "rows.jsonl")
    args = {"reward_functions": ["patient"], "score_workers": 0, "score_timeout_s": 120}
    settings = {"group_size": 1, "step_timeout_s": 3, "episode_retries": 0}
    async with adapter_env(f"dataset:{name}", args, lambda _: "4", **settings) as env:
        asyncio.get_running_loop().call_later(5, is_released.set)
        rollout, _ = await env.collect_trajectory(await env.get_next_item())

    assert rollout.rewards == [1.0]


@pytest.mark.parametrize(
    ("text", "args", "message"),
    [
        ('[{"prompt": "x", "answer": 1}]', {}, "no column 'question'; the columns are prompt"),
        ('[{"question": "x", "answr": 1}]', {}, "did you mean answr"),
        ("[]", {}, "holds no rows"),
        ("[1]", {}, "row 1 is 1; expected columns by name"),
        ("{nothing", {}, "cannot be read"),
        ('[{"question": "x", "answer": 1}]', {"template": "{q}"}, "template does not fit"),
        ('[{"q": null, "answer": 1}]', {"template": "{q:.2f}"}, "template does not fit"),
        (
            '[{"a": 2, "hint": null, "answer": 1}]',
            {"template": "{a} {hint}"},
            "'hint'.; the columns with a value are a, answer",
        ),
        ('[{"question": "x", "1": 2}]', {}, "no column 'answer'"),
        ('[{"question": "x", "answer": 1}]', {"messages_field": "question"}, "expected a list of"),
    ],
)
async def test_unusable_data_is_named_at_the_start(
    tmp_path: Path, text: str, args: dict[str, Any], message: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        await opened(str(path), **args)


async def test_rows_that_are_all_reserved_are_an_error(tmp_path: Path) -> None:
    adapter = await opened(write(tmp_path / "rows.jsonl"), eval_every=1)

    with pytest.raises(ConfigError, match="eval_every=0"):
        await adapter.item(0)


@pytest.mark.parametrize("name", ["no/such.jsonl", "/no/such/folder"])
async def test_missing_file_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="no data file"):
        await opened(name)


async def test_name_on_the_hub_is_asked_of_the_hub(offline_hub: None) -> None:
    with pytest.raises(ConfigError, match="NAME can also be a local"):
        await opened("nobody/no-such-data-set")


def test_unknown_reward_function_is_named() -> None:
    with pytest.raises(UnknownRewardError, match="accurcy"):
        make_adapter("dataset:x.jsonl", {"reward_functions": ["accurcy"]}, seed=0)


async def test_gold_answer_scores_highest(tmp_path: Path) -> None:
    adapter = await opened(write(tmp_path / "rows.jsonl"))
    item = await adapter.item(3)
    gold = adapter.gold_answer(item)

    replies = [
        await adapter.start(item).reply(Turn(text, 0, ())) for text in (str(gold), "", "1000")
    ]

    assert [reply.reward for reply in replies] == [
        {"accuracy": 1},
        {"accuracy": 0},
        {"accuracy": 0},
    ]


def test_check_command_is_green(tmp_path: Path) -> None:
    name = write(tmp_path / "rows.jsonl")
    program = [sys.executable, "-m", "atroposlib.cli.env", f"dataset:{name}", "check"]

    done = subprocess.run(
        program,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )

    assert done.returncode == 0, done.stdout + done.stderr
