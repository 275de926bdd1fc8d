"""Fight predictions: names in boxes, the shipped bouts, the keys of a group."""

from __future__ import annotations

import base64
import io
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from atroposlib.errors import ConfigError
from environments.community.ufc_prediction_env.ufc_prediction_env import UFCEnv, score_prediction
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("She is taller: \\boxed{Ada Brandt}", 1.0),
        ("\\boxed{ ada  BRANDT }", 1.0),
        ("\\boxed{Ada}", -1.0),
        ("\\boxed{Ada Brandt or Boris Quill}", -1.0),
        ("\\boxed{Ada Brandt} \\boxed{Boris Quill}", -1.0),
        ("\\boxed{Ada Brandt", -1.0),
        ("Ada Brandt", -1.0),
        ("", -1.0),
    ],
)
def test_score(answer: str, score: float) -> None:
    assert score_prediction(answer, "Ada Brandt") == score


async def test_places_and_names_of_the_shipped_bouts_earn_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(UFCEnv, monkeypatch)
    bouts = [*env.train, *env.test]

    def mean(name: str) -> float:
        return statistics.fmean(
            score_prediction(f"\\boxed{{{bout.get(name, name)}}}", bout["winner"]) for bout in bouts
        )

    assert len(bouts) == 40
    assert mean("winner") == 1.0
    assert mean("fighter_1") == mean("fighter_2") == 0.0
    assert max(mean(bout["winner"]) for bout in bouts) == pytest.approx(-0.8)


async def test_bouts_without_a_winner_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bout = {"fighter_1": "A B", "record_1": "1", "fighter_2": "C D", "record_2": "2"}
    rows = [{**bout, "winner": name} for name in ("draw", "a b")]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    env = await ready_env(UFCEnv, monkeypatch, dataset_path=str(tmp_path))

    assert [row["winner"] for row in env.train] == ["a b"]
    (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]))
    with pytest.raises(ConfigError, match="no training bout"):
        await env.setup()


async def test_group_names_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter(["\\boxed{Ada Brandt}", "\\boxed{Boris Quill}"])

    def play(prompt: str) -> str:
        return next(replies) if "Who wins?" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        env = make_env(UFCEnv, engine, monkeypatch, group_size=2)
        await env.setup()
        bout = {**env.train[0], "winner": "Ada Brandt"}
        group, _ = await env.collect_trajectories(bout)
        await env.server.close()

    assert group["scores"] == [1.0, -1.0]
    assert group["ground_truths"] == ["Ada Brandt"] * 2
    assert group["group_overrides"] == {"group_size": 2}


async def test_bouts_in_pictures_are_the_same_and_a_picture_of_the_data_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image", reason="the extra examples is not installed")
    from environments.community.ufc_prediction_env.ufc_image_env import CARD_SIZE, UFCImageEnv

    def size(item: Any) -> tuple[int, int]:
        return image.open(io.BytesIO(base64.b64decode(item["image"]))).size

    bout = {"fighter_1": "José 山", "record_1": "1; " * 99, "fighter_2": "B", "record_2": ""}
    rows = [{**bout, "winner": "B", "image": name} for name in ("given.png", None)]
    image.new("RGB", (32, 16)).save(tmp_path / "given.png")
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    async with ScriptedEngine(lambda _: "\\boxed{b}") as engine:
        env = make_env(UFCImageEnv, engine, monkeypatch, group_size=2, dataset_path=str(tmp_path))
        await env.setup()
        items = [await env.get_next_item() for _ in range(2)]
        group, _ = await env.collect_trajectories(items[0])
        await env.server.close()

    assert sorted(map(size, items)) == [(32, 16), CARD_SIZE]
    assert all("José 山 and B" in item["question"] for item in items)
    assert len(env.held_out) == 2
    assert group["scores"] == [1.0, 1.0]
    assert group["ground_truths"] == ["B", "B"]
    assert group["group_overrides"] == {"group_size": 2}


def test_settings_of_the_pictures_are_those_of_their_own_class() -> None:
    from environments.community.ufc_prediction_env.ufc_image_env import UFCImageConfig, UFCImageEnv

    config, _ = UFCImageEnv.config_init()

    assert type(config) is UFCImageConfig  # else --help explains those of the base class
