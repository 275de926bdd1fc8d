from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from environments.sft_loader_server import (
    SAMPLE,
    DatasetFormat,
    SFTConfig,
    SFTEnv,
    chat_labels,
    num_to_send,
    read_chat,
    text_labels,
)
from tests.environments.offline import PROBED, make_env, read_groups, run_process
from tests.envs.live_service import LiveService, ScriptedTrainer, serve_until
from tests.fakes import CharTokenizer, ScriptedEngine

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "Ok"},
    {"role": "user", "content": "Bye"},
]
TEXT = "[user]Hi</s>\n[assistant]Yo</s>\n[user]So?</s>\n[assistant]Ok</s>\n[user]Bye</s>\n"


def shown(labels: tuple[list[int], list[int]] | None) -> tuple[str, str]:
    """Return the text, and the trained part of it with dots for masked characters."""
    assert labels is not None
    tokens, masks = labels
    assert len(tokens) == len(masks)
    marked = "".join("." if m == -100 else {1: "^", 2: "$"}.get(m, chr(m)) for m in masks)
    return CharTokenizer().decode(tokens), marked.strip(".")


def test_labels_of_texts_end_with_the_end_of_text() -> None:
    tokenizer = CharTokenizer()

    assert shown(text_labels(tokenizer, "abc")) == ("<s>abc</s>", "^abc$")
    assert shown(text_labels(tokenizer, "abc", prefix="Q: ")) == ("<s>Q: abc</s>", "abc$")
    assert shown(text_labels(tokenizer, "abc</s>")) == ("<s>abc</s>", "^abc$")


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        # masked between them: 9 of "[user]So?", eos, a line break, 11 of "[assistant]"
        ({}, f"Yo$\n{'.' * 22}Ok$\n"),
        ({"only_last": True}, "Ok$\n"),
        ({"only_last": True, "only_assistant": False}, "Ok$\n"),
        ({"only_assistant": False}, TEXT.replace("</s>", "$")),
    ],
)
def test_labels_of_chats_train_the_chosen_messages(settings: Any, trained: str) -> None:
    text, marked = shown(chat_labels(CharTokenizer(), CHAT, **settings))

    assert text == TEXT
    assert marked == trained.strip(".")


def test_labels_are_unknown_if_the_template_changes_earlier_messages() -> None:
    class HidesEarlierThoughts(CharTokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            last = len(conversation) - 1
            shortened = [
                {**m, "content": m["content"].split("</think>")[-1] if i < last else m["content"]}
                for i, m in enumerate(conversation)
            ]
            return super().apply_chat_template(shortened, **options)

    thoughtful = [
        {**m, "content": f"<think>a</think>{m['content']}" if m["role"] != "user" else "Hi"}
        for m in CHAT[:4]
    ]

    assert chat_labels(HidesEarlierThoughts(), thoughtful) is None
    assert chat_labels(HidesEarlierThoughts(), thoughtful[:2]) is not None


def test_sharegpt_rows_become_chats() -> None:
    row = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo", "weight": 1}]

    assert read_chat(row, DatasetFormat.SHAREGPT_FORMAT) == CHAT[:2]
    assert read_chat(CHAT, DatasetFormat.OAI_FORMAT) == CHAT


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "expected a list of messages"),
        ([{"from": "human"}], "message 0: expected from and value"),
        ([{"from": "alien", "value": "Hi"}], "expected from to be one of human"),
        ([{"from": "human", "value": "Hi"}], "no message is of the assistant"),
        ([], "no message is of the assistant"),
    ],
)
def test_malformed_chat_is_an_error(messages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_chat(messages, DatasetFormat.SHAREGPT_FORMAT)


@pytest.mark.parametrize(
    ("settings", "step", "queued", "num"),
    [
        ({}, 0, 0, 12),  # 3 batches of 4
        ({}, 1, 5, 7),
        ({}, 1, 12, 0),
        ({}, 1, 99, 0),
        ({"max_sft_per_step": 2}, 1, 0, 2),
        ({"max_sft_per_step": 0}, 1, 0, 0),
        ({"add_every_n_steps": 3}, 2, 0, 0),
        ({"add_every_n_steps": 3}, 3, 0, 12),
        ({"max_batches_offpolicy": 0}, 1, 0, 4),
    ],
)
def test_number_of_demonstrations(settings: Any, step: int, queued: int, num: int) -> None:
    config = SFTConfig(batch_size=4, **settings)

    assert num_to_send(config, step=step, queue_sequences=queued) == num


def test_settings_are_the_published_ones() -> None:
    config, _ = SFTEnv.config_init()

    assert config.dataset_name == "AlignmentLab-AI/open-instruct-sharegpt"
    assert (config.dataset_format.value, config.dataset_column_name) == (
        "sharegpt_format",
        "conversations",
    )
    assert (config.inference_weight, config.max_sft_per_step) == (-1, 8)
    assert not config.ensure_scores_are_not_same
    defaults = SFTConfig()
    assert (defaults.dataset_name, defaults.dataset_column_name) == ("gsm8k", "text")
    assert defaults.dataset_format.value == "completion"
    assert (defaults.max_sft_per_step, defaults.add_every_n_steps) == (-1, 1)
    assert [each.value for each in DatasetFormat] == [
        *("completion", "prefix_completion", "oai_format", "sharegpt_format")
    ]
    with pytest.raises(ValidationError, match="needs prefix_column_name"):
        SFTConfig(dataset_format="prefix_completion")


ROWS = [
    ("completion", {"text": "abc"}, {}, "^abc$"),
    ("prefix_completion", {"text": "abc", "q": "Q"}, {"prefix_column_name": "q"}, "abc$"),
    ("oai_format", {"text": CHAT[:2]}, {}, "Yo$\n"),
    (
        "sharegpt_format",
        {"text": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"mask_everything_but_assistant_answer": False},
        "[user]Hi$\n[assistant]Yo$\n",
    ),
]


@pytest.mark.parametrize(("kind", "row", "settings", "trained"), ROWS)
async def test_process_writes_the_rows_as_demonstrations(
    kind: str,
    row: dict[str, Any],
    settings: Any,
    trained: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(
            SFTEnv,
            engine,
            monkeypatch,
            dataset_path=str(tmp_path / "rows.jsonl"),
            dataset_format=DatasetFormat(kind),
            dataset_column_name="text",
            data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
            **settings,
        )
        await run_process(env, num_groups=2, group_size=1)

    for group in read_groups(tmp_path / "groups.jsonl"):
        check_group(group)
        assert shown((group["tokens"][0], group["masks"][0]))[1] == trained
        assert group["scores"] == [1.0]
        assert group["overrides"] == [{"sft": True}]
        assert group["group_overrides"] == {"sft": True, "group_size": 1}
        assert group["advantages"] == [[1.0] * len(group["tokens"][0])]


async def test_malformed_row_is_named_at_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"conversations": "Hi"}\n')
    async with ScriptedEngine([PROBED]) as engine:
        path = str(tmp_path / "rows.jsonl")
        env = make_env(SFTEnv, engine, monkeypatch, dataset_path=path)
        with pytest.raises(ConfigError, match="row 0: expected a list of messages"):
            await env.setup()
        await env.server.close()


@pytest.fixture
def service(free_port: int) -> Iterator[LiveService]:
    live = LiveService(free_port)
    live.start()
    yield live
    live.stop()


@pytest.mark.slow
async def test_serve_fills_the_batches_of_a_trainer_without_an_engine(
    service: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(
            SFTEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            rollout_server_url=service.url,
            max_sft_per_step=4,
            num_rollouts_to_keep=0,
        )
        async with ScriptedTrainer(service.url, batch_size=4, max_token_len=4000) as trainer:
            await trainer.register()
            await serve_until(env, trainer.train(3))
        num_requests = len(engine.requests)
    metrics: dict[str, Any] = {}
    await env.wandb_log(metrics)

    assert num_requests == 0
    assert [len(group["tokens"]) for group in trainer.groups] == [1] * 12
    assert all(group["group_overrides"]["sft"] for group in trainer.groups)
    # twelve of eight rows: one epoch and four
    texts = {json.dumps(group["tokens"]) for group in trainer.groups}
    assert len(texts) == 8
    assert (metrics["train/idx"] + 8 * metrics["train/epoch"]) >= 12


async def test_cancelled_conversion_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine([PROBED]) as engine:
        env = make_env(SFTEnv, engine, monkeypatch, dataset_path=str(SAMPLE))
        await env.setup()
        rollout = asyncio.create_task(env.collect_trajectories(env.train[0]))
        await asyncio.sleep(0)
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        await env.server.close()


def test_environment_passes_the_check() -> None:
    report = check_environment(SFTEnv)

    assert report.passed, report.text
