"""Punchlines: reasoning in completions, losses of a model, scores with the shipped model."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.errors import ConfigError, MissingExtraError
from environments.community.punchline_vrcli.punchline_vrcli_env import (
    SAMPLE,
    PerplexityModel,
    PunchlineEnv,
    context_of,
    improvement,
    reasoning_of,
)
from tests.environments.offline import make_env, ready_env
from tests.fakes import ScriptedEngine

torch = pytest.importorskip("torch")

JOKE = {"title": "Why did the broom come late?", "selftext": "It swept in."}


@pytest.mark.parametrize(
    ("completion", "reasoning"),
    [
        ("<think>\nA pun. </think>It swept in.", "A pun."),
        ("A pun.</think>It swept in.", "A pun."),  # the template has opened it
        ("<think></think>It swept in.", ""),
        ("<think>A pun.", ""),
        ("<think>A</think>B</think>", ""),
        ("<think>A</think><think>B", ""),
        ("<think><think>A</think>", ""),
        ("It swept in.", ""),
        ("", ""),
    ],
)
def test_reasoning(completion: str, reasoning: str) -> None:
    assert reasoning_of(completion) == reasoning


@pytest.mark.parametrize(
    ("loss", "with_reasoning", "score"),
    [
        (math.log(8), math.log(2), 0.75),
        (1.0, 1.0, 0.0),
        (1.0, 80.0, 0.0),
        (80.0, 0.0, 1.0),
    ],
)
def test_improvement(loss: float, with_reasoning: float, score: float) -> None:
    assert improvement(loss, with_reasoning) == pytest.approx(score)


class KnowsOneToken:
    """A model to which all of 256 tokens are equal, but for the one at a position."""

    device = "cpu"

    def __init__(self, known: int) -> None:
        self.known = known
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any) -> Any:
        logits = torch.zeros(1, input_ids.shape[1], 256)
        if self.known <= input_ids.shape[1]:
            logits[0, self.known - 1, input_ids[0, self.known]] = 1e4
        self.lengths.append(input_ids.shape[1])
        return SimpleNamespace(logits=logits)


def tokenize(text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
    assert not add_special_tokens
    return {"input_ids": list(text.encode())}


@pytest.mark.parametrize(("known", "num_unknown"), [(5, 3), (8, 3), (4, 4)])
def test_all_tokens_of_a_punchline_count(known: int, num_unknown: int) -> None:
    model = PerplexityModel(KnowsOneToken(known), tokenize, max_tokens=64)

    loss = model.mean_loss("Joke ", "haha")  # tokens 5 to 8

    assert loss == pytest.approx(num_unknown * math.log(256) / 4)


def test_long_texts_are_cut_off_before_the_punchline() -> None:
    model = KnowsOneToken(1)

    PerplexityModel(model, tokenize, max_tokens=64).mean_loss("x" * 10_000, "haha")
    PerplexityModel(model, tokenize, max_tokens=64).mean_loss("x" * 10_000, "h" * 10_000)

    assert model.lengths == [64, 64]


async def test_reasoning_is_scored_by_the_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedEngine() as engine:
        env = make_env(PunchlineEnv, engine, monkeypatch, **PunchlineEnv.check_settings)
        monkeypatch.undo()  # the model has a tokenizer of its own
        await env.setup()
        scores = await env.score_all(
            JOKE,
            [
                f"<think>{JOKE['selftext']}</think>",
                "<think>xq zvb kkw jjo</think>It swept in.",
                "It swept in.",
                "<think>\ud800 " + "9" * 5_000 + "</think>",
            ],
        )
        all_without = await env.score_all(JOKE, ["", "It swept in."])
        await env.close()
        await env.server.close()

    assert scores[0] > 0.5 > scores[1] >= 0.0
    assert scores[2] == -1.0
    assert scores[3] >= 0.0
    assert all_without == [-1.0, -1.0]


async def test_jokes_without_a_punchline_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    punchlines = ["[removed]", " ", "x" * 401, "It swept in."]
    rows = [json.dumps({"title": "Why?", "selftext": text}) for text in punchlines]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    monkeypatch.setattr(PerplexityModel, "load", lambda *_, **__: None)

    env = await ready_env(PunchlineEnv, monkeypatch, dataset_path=str(tmp_path))

    assert [joke["selftext"] for joke in env.train] == ["It swept in."]
    (tmp_path / "train.jsonl").write_text(rows[0])
    with pytest.raises(ConfigError, match="no joke has a title"):
        await env.setup()
    env = await ready_env(PunchlineEnv, monkeypatch, dataset_path=str(SAMPLE))
    assert (len(env.train), len(env.test)) == (26, 6)


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(MissingExtraError, match="torch"):
        PerplexityModel.load("model", gpu_device=0, max_tokens=16)


def test_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)cannot be loaded on cpu.*--env\.perplexity_model"):
        PerplexityModel.load(str(tmp_path), gpu_device=-1, max_tokens=16)


def test_context_has_the_reasoning() -> None:
    assert context_of("Why?", "") == "Joke: Why?\nPunchline: "
    assert context_of("Why?", "A pun.") == "Joke: Why?\nThoughts: A pun.\nPunchline: "
