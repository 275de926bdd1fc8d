from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.conversation import Turn
from atroposlib.errors import MissingExtraError
from atroposlib.scored_data import check_group
from environments.game_environments.diplomacy_environment.diplomacy_env_minimal import (
    OPENINGS,
    DiplomacyEnvConfig,
    DiplomacyEnvMinimal,
    DiplomacyGame,
    Orders,
    RulePlayer,
    as_engine_order,
    check_orders,
    load_diplomacy,
    orders_of,
    read_orders,
)
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow

IS_INSTALLED = importlib.util.find_spec("diplomacy") is not None
needs_package = pytest.mark.skipif(not IS_INSTALLED, reason="needs the package diplomacy")

SPRING = Orders(
    {"MAR": ["A MAR - BUR", "A MAR H"], "PAR": ["A PAR - BUR", "A PAR S A MAR - BUR"]}, 2
)
BUILDS = Orders({"BRE": ["A BRE B", "F BRE B", "WAIVE"], "PAR": ["A PAR B", "WAIVE"]}, 1)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<orders>\n- A PAR H.\n\n* F BRE - ENG\n</orders>", ["A PAR H", "F BRE - ENG"]),
        ("<orders>a</orders> no: <ORDERS>b\r\nc</ORDERS>", ["b", "c"]),
        ("A PAR H", None),
        ("<orders>A PAR H", None),
        ("<orders></orders>", []),
    ],
)
def test_orders_are_read_from_the_last_block(answer: str, expected: list[str] | None) -> None:
    assert read_orders(answer) == expected


def test_long_line_is_cut_and_never_legal() -> None:
    [line] = read_orders(f"<orders>A PAR H{' ' * 5000}X</orders>") or []

    assert len(line) == 81
    assert check_orders([line.strip() + "x"], SPRING).valid == []


@pytest.mark.parametrize("text", ["a mar->bur", "A MAR-BUR", " A  MAR - BUR", "A MAR --> BUR"])
def test_spellings_of_a_move(text: str) -> None:
    assert as_engine_order(text) == "A MAR - BUR"


@pytest.mark.parametrize(
    ("given", "orders", "valid", "num_invalid"),
    [
        (["A MAR hold", "A PAR supports A MAR - BUR"], SPRING, 2, 0),
        (["A MAR H", "A MAR - BUR"], SPRING, 1, 1),  # a unit has one order
        (["A MAR - PAR", "A BER H", "", "WAIVE"], SPRING, 0, 4),
        (["A BRE B", "A PAR B"], BUILDS, 1, 1),  # one unit may be built
        (["WAIVE"], BUILDS, 1, 0),
        (["A PAR B", "WAIVE"], BUILDS._replace(max_orders=2), 2, 0),
        (["WAIVE", "A PAR B"], BUILDS._replace(max_orders=2), 2, 0),
        (["A MAR H"] * 1000, SPRING, 1, 999),
    ],
)
def test_only_legal_orders_count(
    given: list[str], orders: Orders, valid: int, num_invalid: int
) -> None:
    checked = check_orders(given, orders)

    assert (len(checked.valid), len(checked.invalid)) == (valid, num_invalid)


@pytest.mark.skipif(IS_INSTALLED, reason="the package diplomacy is installed")
def test_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"\.\[diplomacy\]"):
        load_diplomacy()


def game_of(*, rule: str = "hold", seed: int = 0, **settings: Any) -> DiplomacyGame:
    config = DiplomacyEnvConfig(**settings)
    engine = load_diplomacy().Game()
    player = RulePlayer(rule, seed=seed)
    others = [name for name in engine.powers if name != config.training_power]
    return DiplomacyGame(engine, config, dict.fromkeys(others, player))


async def play(game: DiplomacyGame, *orders: str) -> list[Any]:
    game.opening()
    turns = [Turn(f"<orders>{text}</orders>", index, ()) for index, text in enumerate(orders)]
    return [await game.reply(turn) for turn in turns]


@needs_package
async def test_rewards_are_centers_gained_and_turns_survived() -> None:
    game = game_of(max_game_turns=4)

    spring, fall, winter = await play(game, *OPENINGS["FRANCE"], "A PAR B\nF BRE B\nA MAR B")

    # Spain and Portugal at the end of fall; two units are built
    assert [spring.reward, fall.reward, winter.reward] == pytest.approx([0.1, 2.1, 0.0])
    assert "Your last orders: A MAR - SPA; F BRE - MAO" in spring.messages
    assert "You build 2." in fall.messages
    assert (game.num_centers, game.num_invalid, len(game.engine.powers["FRANCE"].units)) == (
        5,
        1,
        5,
    )
    assert game.unfinished_reward == -5.0


@needs_package
async def test_game_ends_after_its_last_turn() -> None:
    spring, fall = await play(game_of(max_game_turns=2), "A MAR - SPA", "A SPA H")

    assert (spring.is_done, fall.is_done) == (False, True)
    assert fall.reward == pytest.approx(1.1)


@needs_package
async def test_invalid_orders_are_ignored_and_named() -> None:
    game = game_of()

    [reply] = await play(game, "A MUN - BER\nA MAR - LON\n" + "x" * 500)

    assert game.engine.powers["FRANCE"].units == ["F BRE", "A MAR", "A PAR"]
    assert (game.num_orders, game.num_invalid) == (3, 3)
    assert reply.messages.startswith("Not legal, ignored: A MUN - BER; A MAR - LON; xxx")
    assert max(map(len, reply.messages.split("\n")[:1])) < 200


@needs_package
async def test_winner_gets_the_bonus_and_a_lost_power_ends() -> None:
    won, lost = game_of(), game_of()
    centers = sorted(set(won.engine.map.scs) - {"PAR"})
    won.engine.set_current_phase("F1905M")
    won.opening()
    for power in won.engine.powers:
        won.engine.set_centers(power, [], reset=True)
        won.engine.set_units(power, ["A PAR"] * (power == "FRANCE"), reset=True)
    won.engine.set_centers("FRANCE", centers[:17], reset=True)  # and Paris
    lost.opening()
    lost.engine.set_units("FRANCE", [], reset=True)
    lost.engine.set_centers("FRANCE", [], reset=True)

    reply = await won.reply(Turn("", 0, ()))
    last = await lost.reply(Turn("", 0, ()))

    assert won.is_won
    assert reply.is_done
    assert reply.reward == pytest.approx(1 + 0.1 + 5)
    assert won.num_missing == 1
    assert (last.is_done, lost.num_survived, lost.is_won) == (True, 0, False)


@needs_package
@pytest.mark.parametrize("power", OPENINGS)
@pytest.mark.parametrize("seed", range(5))
async def test_openings_gain_a_center_against_random_orders(power: str, seed: int) -> None:
    game = game_of(rule="random", seed=seed, training_power=power, max_game_turns=2)

    await play(game, *OPENINGS[power])

    assert game.num_centers > game.num_centers_at_start
    assert game.num_invalid <= 1  # one of the two may be prevented, and then be impossible


@needs_package
async def test_random_players_follow_the_seed_through_a_long_game() -> None:
    games = [game_of(rule="random", seed=seed, max_game_turns=60) for seed in (1, 1, 2)]
    france, boards = RulePlayer("random", seed=7), []
    for game in games:
        game.opening()
        index, is_done = 0, False
        while not is_done:
            legal = orders_of(game.engine, "FRANCE")
            assert legal.max_orders > 0, "the policy is asked only if it can decide"
            orders = "\n".join(await france.orders(game.engine, "FRANCE", legal))
            is_done = (await game.reply(Turn(f"<orders>{orders}</orders>", index, ()))).is_done
            index += 1
        boards.append(game.engine.get_state()["units"])
        assert game.num_invalid == 0
        assert 60 <= index <= DiplomacyEnvConfig(max_game_turns=60).max_turns

    assert boards[0] == boards[1]
    assert boards[0] != boards[2]


@needs_package
async def test_group_trains_the_orders_and_writes_a_log_of_each_game(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: Any = {"max_game_turns": 2, "game_logs_dir": str(tmp_path), "max_game_logs": 1}
    replies = ["ok", *(["<orders>A MAR - SPA</orders>"] * 2), *(["<orders></orders>"] * 2)]
    async with ScriptedEngine(replies) as engine:
        env = make_env(
            DiplomacyEnvMinimal, engine, monkeypatch, **settings, max_token_length=20_000
        )
        await env.setup()
        item = await env.get_next_item()
        rollouts = [(await env.collect_trajectory(item))[0] for _ in range(2)]
        group = await env.postprocess_histories(rollouts)
        metrics = env.metrics_of(rollouts, "train")
        await env.close()
        await env.server.close()

    check_group(group)
    # the second reply of the first rollout repeats a move that is then not legal
    assert group["scores"] == pytest.approx([1.2, 0.2])
    assert metrics["train/invalid_order_rate"] == pytest.approx(1 / 2)
    [log] = read_logs(tmp_path, "france_0_*.json")
    assert [phase["name"] for phase in log["phases"]][:2] == ["S1901M", "F1901M"]


def read_logs(folder: Path, pattern: str) -> list[Any]:
    return [json.loads(path.read_text()) for path in folder.glob(pattern)]


@needs_package
async def test_models_of_another_server_play_the_other_powers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders = "<think>x</think><orders>A BUD - SER\nA VIE - LON</orders>"
    async with ScriptedEngine(["ok"]) as engine, ScriptedEngine([orders] * 6, model="foe") as foe:
        env = make_env(
            DiplomacyEnvMinimal,
            engine,
            monkeypatch,
            opponent_models=["foe"],
            opponent_base_url=foe.base_url,
            save_game_logs=False,
        )
        await env.setup()
        game = env.start_conversation({"seed": 0})
        game.opening()
        await game.reply(Turn("", 0, ()))
        await env.close()
        await env.server.close()

    asked = [request.body["messages"][0]["content"].split()[2] for request in foe.requests]
    assert sorted(asked) == sorted(set(OPENINGS) - {"FRANCE"})
    assert "A SER" in game.engine.powers["AUSTRIA"].units


def test_config_init_gives_the_published_settings() -> None:
    config, servers = DiplomacyEnvMinimal.config_init()

    expected = {
        "max_game_turns": 10,
        "training_power": "FRANCE",
        "total_steps": 10,
        "supply_center_weight": 1.0,
        "survival_bonus": 0.1,
        "win_bonus": 5.0,
        "diplomacy_server_port": 8432,
        "start_diplomacy_server": True,
        "save_game_logs": True,
        "game_logs_dir": "./game_logs",
        "eval_episodes": 10,
        "opponent_models": None,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert [s.base_url for s in servers] == [f"http://localhost:{p}/v1" for p in range(9004, 9008)]
    assert DiplomacyEnvMinimal.name == "diplomacy_minimal"


@needs_package
def test_environment_passes_the_check() -> None:
    report = check_environment(DiplomacyEnvMinimal)

    assert report.passed, report.text
