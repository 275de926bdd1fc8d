"""Rubik's cube: turns against known facts, scores of replies, games of best replies."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from environments.community.selcube.selcube_env import (
    LEVEL_UP_GAMES,
    MOVES,
    SOLVED,
    RubiksCubeEnv,
    apply_moves,
    inverse,
    read_move,
    score_reply,
    scramble,
    state_score,
    thinking_score,
)
from tests.environments.offline import PROBED, make_env, ready_env
from tests.fakes import ScriptedEngine


def call(move: Any, thinking: str = "<think>a b c d</think>") -> str:
    arguments = {"name": "apply_move", "arguments": {"move": move}}
    return f"{thinking}<tool_call>{json.dumps(arguments)}</tool_call>"


def order_of(moves: list[str]) -> int:
    cube, count = apply_moves(SOLVED, moves), 1
    while cube != SOLVED:
        cube, count = apply_moves(cube, moves), count + 1
    return count


def test_turn_of_the_right_face_moves_the_columns_that_touch_it() -> None:
    cube = apply_moves(SOLVED, ["R"])

    # front to up, up to back, back to down, down to front; the left column of the back is at R
    assert cube == ("UUFUUFUUF" + "R" * 9 + "FFDFFDFFD" + "DDBDDBDDB" + "L" * 9 + "UBBUBBUBB")
    assert state_score(cube) == 36 / 48


def test_turn_of_the_upper_face_moves_rows() -> None:
    assert apply_moves(SOLVED, ["U"]) == (
        "U" * 9 + "BBBRRRRRR" + "RRRFFFFFF" + "D" * 9 + "FFFLLLLLL" + "LLLBBBBBB"
    )


@pytest.mark.parametrize(
    ("moves", "order"),
    [
        ("R", 4),
        ("F2", 2),
        ("B'", 4),
        ("R L", 4),
        ("R2 U2", 6),
        ("R U R' U'", 6),
        ("R U R' U R U2 R'", 6),
        ("R U", 105),
        ("R U'", 63),
    ],
)
def test_known_orders(moves: str, order: int) -> None:
    assert order_of(moves.split()) == order


@pytest.mark.parametrize("seed", range(5))
def test_inverse_undoes_a_scramble(seed: int) -> None:
    moves = scramble(seed=seed, num_moves=9)

    assert len(moves) == 9
    assert apply_moves(apply_moves(SOLVED, moves), inverse(moves)) == SOLVED
    assert moves == scramble(seed=seed, num_moves=9)
    assert all(a[0] != b[0] for a, b in itertools.pairwise(moves))


def test_inverse_of_each_turn() -> None:
    assert inverse(["R", "U'", "F2"]) == ["F2", "U", "R'"]
    assert len(MOVES) == 18


@pytest.mark.parametrize(
    ("completion", "move"),
    [
        (call("R"), "R"),
        (call("F2", "") + " Done.", "F2"),
        (call("r"), None),
        (call("R R"), None),
        (call(["R"]), None),
        (call("R") + call("R", ""), None),
        ("<think>" + call("R", ""), None),
        ('<tool_call>{"name": "turn", "arguments": {"move": "R"}}</tool_call>', None),
        ("<tool_call>" + "[" * 150 + "</tool_call>", None),
        (f"<tool_call>{' ' * 300}</tool_call>", None),
        ("<tool_call>3</tool_call>", None),
        ("R", None),
        ("", None),
    ],
)
def test_move_of_a_reply(completion: str, move: str | None) -> None:
    assert read_move(completion) == move


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a b c d a A</think>x", 0.23),  # 4 of 40 words: 0.2 + 0.3 / 10
        ("a b c d</think>x", 0.23),  # the template has opened it
        ("<think>" + " ".join(map(str, range(99))) + "</think>", 0.5),
        ("<think>a a a a</think>", 0.2075),
        ("<think> \n</think>R", -0.1),
        ("<think>a b", -0.2),
        ("", -0.2),
    ],
)
def test_thinking(completion: str, score: float) -> None:
    assert thinking_score(completion) == pytest.approx(score)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (call("R'"), 1 + 0.2 + 1.0 + 0.23),
        (call("R"), 36 / 48 + 0.2 + 0.23),  # R2 moves as many stickers
        (call("R'", ""), 1 + 0.2 + 1.0 - 0.2),
        (call("X"), 36 / 48 - 0.2 + 0.23),
        ("", 36 / 48 - 0.2 - 0.2),
    ],
)
def test_score(completion: str, score: float) -> None:
    assert score_reply(completion, apply_moves(SOLVED, ["R"])).score == pytest.approx(score)


async def game(monkeypatch: pytest.MonkeyPatch, replies: list[str], **settings: Any) -> Any:
    """The environment after one game, and its groups."""
    written = iter(replies)

    def play(prompt: str) -> str:
        return next(written) if "Turns left" in prompt else PROBED

    async with ScriptedEngine(play) as engine:
        chosen = {"group_size": 2, "include_messages": True, **settings}
        env = make_env(RubiksCubeEnv, engine, monkeypatch, **chosen)
        groups, _ = await env.collect_trajectories({"seed": 3, "num_moves": 2})
        await env.server.close()
    return env, groups


async def test_best_reply_of_each_turn_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = inverse(scramble(seed=3, num_moves=2))
    replies = [call("X"), call(first), call(second), call("X")]

    env, groups = await game(monkeypatch, replies)

    assert env.solved_since_log == [True]
    assert len(groups) == 2
    assert [scores[0] < scores[1] for scores in (g["scores"] for g in groups)] == [True, False]
    chat = groups[1]["messages"][0]
    assert chat[2]["content"] == call(first, "")  # without its thinking
    assert f"Moves so far: {first}. Turns left: 19." in chat[3]["content"]
    for group in groups:
        for masks, row in zip(group["masks"], group["advantages"], strict=True):
            assert {abs(value) for m, value in zip(masks, row, strict=True) if m == -100} <= {0.0}
            own = {value for m, value in zip(masks, row, strict=True) if m != -100}
            assert [abs(value) for value in own] == [pytest.approx(1.0)]


async def test_game_without_a_valid_move_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    env, groups = await game(monkeypatch, ["", "R"], use_token_level_rewards=False)

    assert len(groups) == 1
    assert "advantages" not in groups[0]
    assert env.solved_since_log == [False]


async def test_shorter_reply_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [call("R") + " " * 50, call("R")]

    _, [group] = await game(monkeypatch, replies, max_steps=1)

    assert 0 < group["scores"][1] - group["scores"][0] < 0.01


async def test_last_cube_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    settings = {"generate_visualizations": True, "visualizations_dir": str(tmp_path / "images")}

    await game(monkeypatch, [call("R"), call("X")], max_steps=1, **settings)

    assert [path.name for path in (tmp_path / "images").iterdir()] == ["cube_3_unsolved.png"]


async def test_levels_follow_the_games_that_are_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    env = await ready_env(RubiksCubeEnv, monkeypatch)
    numbers = [env.num_scramble_moves]
    for _ in range(6):
        for index in range(LEVEL_UP_GAMES):
            env._note_game(index > 3, num_moves=numbers[-1])  # 12 of 16 are solved
        numbers.append(env.num_scramble_moves)

    # 7 * level / 5, rounded
    assert numbers == [1, 3, 4, 6, 7, 7, 7]
    assert (await env.get_next_item())["num_moves"] == 7


async def test_games_of_an_earlier_level_do_not_count_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = await ready_env(RubiksCubeEnv, monkeypatch)
    for _ in range(3 * LEVEL_UP_GAMES):  # games that were under way when the level rose
        env._note_game(True, num_moves=1)

    assert env.level == 2
    assert env.num_scramble_moves == 3
    assert not env.recent


def test_one_move_for_all_cubes_solves_few() -> None:
    cubes = [apply_moves(SOLVED, scramble(seed=seed, num_moves=1)) for seed in range(200)]

    def mean(completion: str) -> float:
        return statistics.fmean(score_reply(completion, cube).score for cube in cubes)

    best = max(mean(call(move)) for move in MOVES)
    assert best < 0.5 * (1 + 0.2 + 1.0 + 0.23)
