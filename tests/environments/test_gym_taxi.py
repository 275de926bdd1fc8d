from __future__ import annotations

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.envs.multi_turn_env import Rollout
from environments.game_environments.gymnasium.gym_taxi import (
    DROP_OFF,
    PICK_UP,
    PLACES,
    GymTaxiEnv,
    TaxiRide,
    read_action,
    taxi_world,
)
from tests.environments.game_players import Player, play_game

pytestmark = pytest.mark.slow


def ride(seed: int) -> TaxiRide:
    return TaxiRide(taxi_world(), seed=seed, thinking_active=False)


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        ("0", 0),
        ("I go north: 1\n", 1),
        ("4 or 5", 5),
        ("12", 2),
        ("6", None),
        ("9", None),
        ("-", None),
        ("1.", None),
        ("\u0663", None),  # an Arabic 3
        ("\uff13", None),  # a full-width 3
        ("\u00b2", None),  # a superscript 2
        ("north", None),
        ("", None),
    ],
)
def test_action_is_the_last_character(answer: str, action: int | None) -> None:
    assert read_action(answer) == action


def test_places_are_where_the_map_has_their_letters() -> None:
    world = taxi_world()

    letters = [world.map[row + 1][2 * column + 1] for row, column in world.places]
    assert letters == [place[0] for place in PLACES]


def test_map_is_shown_in_a_fence() -> None:
    text = str(ride(0).opening()[-1]["content"])

    fenced = text.split("```\n")[1]
    assert fenced.startswith("+---------+\n|R: | : :G|")
    assert fenced.endswith("+---------+\n")


def test_shortest_way_picks_up_once_and_ends_with_the_delivery() -> None:
    world = taxi_world()

    for seed in range(50):
        state = world.start(seed)
        way = world.shortest_way(state)
        assert way.count(PICK_UP) == 1
        assert way[-1] == DROP_OFF
        assert len(way) <= 18
        for action in way:
            assert action in world.legal(state)
            state, is_done = world.step(state, action)
        assert is_done


def test_text_tells_the_state_and_the_map_shows_the_taxi() -> None:
    world = taxi_world()
    state = world.start(3)
    traffic = world.decode(state)

    row = world.draw(state).splitlines()[traffic.row + 1]
    assert row[2 * traffic.column + 1] == "T"
    assert f"row {traffic.row}, column {traffic.column}." in world.describe(state)
    assert f"at {PLACES[traffic.passenger]} (" in world.describe(state)


async def test_oracle_scores_highest_and_garbage_lowest() -> None:
    for seed in range(20):
        games = [ride(seed) for _ in range(3)]
        way = games[0].world.shortest_way(games[0].world_state)
        to_passenger = way[: way.index(PICK_UP) + 1]
        turns = [iter(map(str, way)), iter([*map(str, to_passenger), "x"]), iter(["qxz"])]
        players: list[Player] = [lambda _, rest=rest: next(rest) for rest in turns]  # type: ignore[misc]
        scores = [
            sum(await play_game(game, player)) for game, player in zip(games, players, strict=True)
        ]

        assert scores == [1.0, 0.0, -1.0]
        assert [game.is_won for game in games] == [True, False, False]
        assert [game.was_picked_up for game in games] == [True, True, False]


async def test_going_west_is_no_pick_up() -> None:
    seed = next(s for s in range(99) if 3 in ride(s).world.legal(ride(s).world_state))
    game = ride(seed)

    await play_game(game, lambda _: "3", max_turns=1)

    assert not game.was_picked_up


async def test_action_that_changes_nothing_ends_the_ride() -> None:
    game = ride(0)
    blocked = next(
        action for action in range(6) if action not in game.world.legal(game.world_state)
    )

    assert await play_game(game, lambda _: str(blocked)) == [-1.0]


@pytest.mark.parametrize("text", ["<think>go 0", "<think>0</think>", "", "south"])
async def test_unreadable_action_ends_the_ride(text: str) -> None:
    assert await play_game(ride(0), lambda _: text) == [-1.0]


async def test_ride_without_end_is_worth_what_was_reached() -> None:
    before, after = ride(5), ride(5)
    way = after.world.shortest_way(after.world_state)
    to_passenger = way[: way.index(PICK_UP) + 1]

    def around(game: TaxiRide, start: list[int]) -> Player:
        return lambda chat: str(
            start.pop(0) if start else next(a for a in game.world.legal(game.world_state) if a < 4)
        )

    assert sum(await play_game(before, around(before, []))) == -1.0
    assert sum(await play_game(after, around(after, list(to_passenger)))) == 0.0


def test_figures_are_shares_of_the_rides() -> None:
    env = GymTaxiEnv.__new__(GymTaxiEnv)
    env.config, _ = GymTaxiEnv.config_init()  # type: ignore[assignment]
    picked_up, none = ride(0), ride(0)
    picked_up.was_picked_up = True

    rollouts = [Rollout(rewards=[0.0], conversation=game) for game in (picked_up, none)]
    metrics = env.metrics_of(rollouts, "train")

    assert metrics["train/percent_correct"] == 0.0
    assert metrics["train/percent_picked_up_passenger"] == 0.5
    assert (env.config.group_size, env.config.max_token_length) == (32, 8192)


def test_environment_passes_the_check() -> None:
    report = check_environment(GymTaxiEnv)

    assert report.passed, report.text
