"""Diplomacy: the policy gives the orders of one power against six others.

    seed -> board -> [orders of one phase -> all powers move -> board, results] x N -> centers won

The rules are those of the package `diplomacy`, which runs in this process. The other powers give
random legal orders, or are played by models on a server of their own; `README.md` has the rewards.

With the inference servers in a YAML file, as `README.md` shows:

    python environments/game_environments/diplomacy_environment/diplomacy_env_minimal.py process \
        --config servers.yaml --env.total_steps 4 --env.max_game_turns 2 --env.tokenizer_name NAME
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import statistics
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

from pydantic import Field, model_validator

from atroposlib.envs.base import APIServerConfig, Item
from atroposlib.envs.conversation import ChatMessage, Reply, Turn, visible_text
from atroposlib.envs.multi_turn_env import Rollout
from atroposlib.envs.server_handling.chat_rendering import text_of_content
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError, MissingExtraError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import Game, GameEnv, GameEnvConfig
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.utils.text import inert_line, texts_in_tag

__all__ = [
    "CheckedOrders",
    "DiplomacyEnvConfig",
    "DiplomacyEnvMinimal",
    "DiplomacyGame",
    "ModelPlayer",
    "Orders",
    "RulePlayer",
    "check_orders",
    "load_diplomacy",
    "read_orders",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="Diplomacy: order the units of one power against six others",
    turns="up to 3 per spring or fall: orders, retreats, builds",
    reward="supply centers gained or lost, +0.1 per turn survived, +5 for a win",
    data="made on the spot",
    needs="`pip install '.[diplomacy]'`, which is under the AGPL",
    command="process --env.max_game_turns 2 --env.save_game_logs false --env.total_steps 4",
)

MODEL = "NousResearch/DeepHermes-3-Llama-3-8B-Preview"
PORTS = (9004, 9005, 9006, 9007)
Power = Literal["AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY"]
MAX_LINE_CHARACTERS = 80
MAX_SHOWN_INVALID = 5
WAIVE = "WAIVE"
PHASES = {"M": "movement", "R": "retreats", "A": "adjustments"}
RULES = """You play {power} in Diplomacy, on the standard map, against six other powers, without \
negotiations. The game has {max_turns} turns, a spring and a fall in each year. After a fall, a \
supply center belongs to the power whose unit is in it; 18 centers win. After movement, units that \
were dislodged retreat, and at the end of a year each power builds or disbands units until it has \
one per center. Your score is the number of centers that you gain.

Give your orders between tags, one per line, as they are listed below:
<orders>
{example}
</orders>
H is hold, S is support, C is convoy. A unit without an order holds."""
OPENINGS: Mapping[str, tuple[str, str]] = {
    "AUSTRIA": ("A BUD - SER", "A SER H"),
    "ENGLAND": ("F EDI - NWG\nF LON - NTH", "F NTH - NWY\nF NWG S F NTH - NWY"),
    "FRANCE": ("A MAR - SPA\nF BRE - MAO", "A SPA H\nF MAO - POR"),
    "GERMANY": ("F KIE - DEN\nA BER - KIE", "F DEN H\nA KIE - HOL"),
    "ITALY": ("F NAP - ION", "F ION - TUN"),
    "RUSSIA": ("F STP/SC - BOT\nF SEV - RUM", "F BOT - SWE\nF RUM H"),
    "TURKEY": ("A CON - BUL", "A BUL H"),
}
"""Orders of a first year that gain a center, unless others oppose them."""


class DiplomacyEnvConfig(GameEnvConfig):
    """Settings of the game, of its score and of the other powers."""

    max_game_turns: int = Field(
        10, ge=1, le=200, description="Turns of one game; a spring is a turn, and so is a fall."
    )
    training_power: Power = Field("FRANCE", description="Power that the policy plays.")
    total_steps: int = Field(
        10, ge=-1, description="Trainer steps after which the run ends; -1: the trainer's number."
    )
    supply_center_weight: float = Field(
        1.0, ge=0, le=1000, description="Reward of a supply center gained; a lost one costs it."
    )
    survival_bonus: float = Field(
        0.1, ge=0, le=1000, description="Reward of each turn after which the power is in the game."
    )
    win_bonus: float = Field(5.0, ge=0, le=1000, description="Reward of a win.")
    diplomacy_server_port: int = Field(
        8432, ge=1, le=65535, description="No effect: the rules run in this process."
    )
    start_diplomacy_server: bool = Field(
        True, description="No effect: the rules run in this process."
    )
    save_game_logs: bool = Field(
        True,
        description="Whether finished games are written in the file format of the package.",
    )
    game_logs_dir: str = Field("./game_logs", description="Folder of those files.")
    max_game_logs: int = Field(
        1000, ge=1, le=1_000_000, description="Maximum number of games that one run writes."
    )
    eval_episodes: int = Field(
        10, ge=0, le=100_000, description="Number of games of one evaluation."
    )
    opponent_models: list[str] | None = Field(
        None,
        description="Models that play the other powers, assigned in turn; None plays them by "
        "opponent_rule.",
    )
    opponent_rule: Literal["random", "hold"] = Field(
        "random", description="Other powers without a model: random legal orders, or none."
    )
    opponent_base_url: str = Field(
        "http://localhost:9005/v1", description="URL of the server of opponent_models."
    )
    opponent_api_key_env: str = Field(
        "OPENAI_API_KEY", description="Environment variable with the key of that server."
    )
    opponent_max_tokens: int = Field(
        512, ge=1, le=65536, description="Token limit of an opponent's reply."
    )
    max_listed_orders: int = Field(
        40, ge=1, le=1000, description="Orders of one unit that a prompt lists; others are legal."
    )
    max_turn_tokens: int | None = Field(
        512, ge=1, description="Token limit of one turn; None: the rest of the conversation's."
    )
    max_token_length: int = Field(32768, ge=1, description="Token limit of one game.")

    @model_validator(mode="after")
    def _set_max_turns(self) -> DiplomacyEnvConfig:
        self.max_turns = 3 * self.max_game_turns
        return self


class Orders(NamedTuple):
    """The orders that a power may give in a phase."""

    by_location: Mapping[str, Sequence[str]]
    """Sorted orders of each unit, or home center in which to build."""
    max_orders: int
    """Number of orders that count."""


class CheckedOrders(NamedTuple):
    """The orders of a reply."""

    valid: list[str]
    invalid: list[str]
    """Texts that are not legal orders, second orders of a unit, and those beyond the limit."""


def read_orders(answer: str) -> list[str] | None:
    """Return the lines of the last `<orders>` block of a reply; None without a block."""
    blocks = texts_in_tag(answer, "orders")
    if not blocks:
        return None
    lines = (line.strip(" \t\r-*•.;") for line in blocks[-1].split("\n"))
    return [line[: MAX_LINE_CHARACTERS + 1] for line in lines if line]


def as_engine_order(text: str) -> str:
    """Return an order in the spelling of the engine: `a par->bur` is `A PAR - BUR`."""
    text = re.sub(r"\s*-+>?\s*", " - ", text.upper())
    text = re.sub(r"\bHOLDS?\b", "H", re.sub(r"\bSUPPORTS?\b", "S", text))
    return " ".join(re.sub(r"\bCONVOYS?\b", "C", text).split())


def check_orders(given: Iterable[str], orders: Orders) -> CheckedOrders:
    """Divide orders into those that the engine executes, one per unit, and the others."""
    location_of = {order: at for at, legal in orders.by_location.items() for order in legal}
    checked = CheckedOrders([], [])
    used: set[str] = set()
    for text in given:
        order = as_engine_order(text)
        location = location_of.get(order)
        is_repeated = location in used and order != WAIVE  # any center may stay empty
        if location is None or is_repeated or len(checked.valid) == orders.max_orders:
            checked.invalid.append(text)
            continue
        checked.valid.append(order)
        if order != WAIVE:
            used.add(location)
    return checked


def orders_of(engine: Any, power: str) -> Orders:
    """Return the orders that a power may give now; none if it has nothing to decide."""
    possible = engine.get_all_possible_orders()
    found = {at: sorted(possible[at]) for at in sorted(engine.get_orderable_locations(power))}
    by_location = {at: legal for at, legal in found.items() if legal}
    if engine.phase_type != "A":
        return Orders(by_location, len(by_location))
    state = engine.powers[power]
    missing = abs(len(state.centers) - len(state.units))
    return Orders(by_location, min(missing, len(by_location)))


class Player(Protocol):
    """Gives the orders of a power that the policy does not play."""

    async def orders(self, engine: Any, power: str, legal: Orders) -> list[str]: ...


class RulePlayer:
    """Gives random legal orders, or none; the same ones in the same phase of a game's seed."""

    def __init__(self, rule: str, *, seed: int) -> None:
        self._rule, self._seed = rule, seed

    async def orders(self, engine: Any, power: str, legal: Orders) -> list[str]:
        if self._rule == "hold":
            return []
        source = random.Random(f"{self._seed} {engine.get_current_phase()} {power}")
        chosen = [source.choice(options) for options in legal.by_location.values()]
        return source.sample(chosen, len(chosen))[: legal.max_orders]


class ModelPlayer:
    """Asks a model of another server, which sees the board and no earlier phase.

    Args:
        server: object with `chat_completion`.
        config: settings of the environment.
    """

    def __init__(self, server: Any, config: DiplomacyEnvConfig) -> None:
        self._server, self._config = server, config

    async def orders(self, engine: Any, power: str, legal: Orders) -> list[str]:
        config = self._config
        rules = RULES.format(power=power, max_turns=config.max_game_turns, example=example(legal))
        board = board_text(engine, power, legal, max_listed=config.max_listed_orders)
        answer = await self._server.chat_completion(
            messages=[{"role": "user", "content": f"{rules}\n\n{board}"}],
            n=1,
            max_tokens=config.opponent_max_tokens,
        )
        text = text_of_content(answer.choices[0].message.content)
        return check_orders(read_orders(visible_text(text)) or [], legal).valid


def board_text(engine: Any, power: str, legal: Orders, *, max_listed: int) -> str:
    """Return the phase, all centers and units, and the orders that a power may give."""
    words = engine.phase.split()  # such as SPRING 1901 MOVEMENT
    phase = PHASES[engine.phase_type]
    lines = [f"{words[0].title()} {words[1]}, {phase}.", "Centers and units:"]
    for name, state in sorted(engine.powers.items()):
        units, centers = " ".join(state.units) or "none", " ".join(sorted(state.centers)) or "none"
        lines.append(f"{name}: {len(state.centers)} centers {centers}; units {units}")
    owned = {center for state in engine.powers.values() for center in state.centers}
    lines.append(f"neutral centers: {' '.join(sorted(set(engine.map.scs) - owned)) or 'none'}")
    if engine.phase_type == "A":
        kind = next(iter(legal.by_location.values()))[0].split()[-1]
        lines.append(
            f"You {'disband' if kind == 'D' else 'build'} {legal.max_orders}. Your orders:"
        )
        listed = {order: "" for options in legal.by_location.values() for order in options}
        return "\n".join([*lines, *sorted(listed)])
    lines.append("Your orders, by unit:")
    return "\n".join([*lines, *(_listed(o, max_listed) for o in legal.by_location.values())])


def _listed(orders: Sequence[str], max_listed: int) -> str:
    """Return the orders of a unit as `A PAR: H, - BUR, S A MAR - BUR`; holding and moves first."""
    unit = " ".join(orders[0].split()[:2])
    rest = sorted((order[len(unit) + 1 :] for order in orders), key=lambda o: "H-RDSC".find(o[0]))
    more = f", and {len(rest) - max_listed} more" if len(rest) > max_listed else ""
    return f"{unit}: {', '.join(rest[:max_listed])}{more}"


def example(legal: Orders) -> str:
    """Return the first order of the first unit."""
    return next(iter(legal.by_location.values()))[0]


class DiplomacyGame(Game):
    """One game as a conversation.

    Attributes:
        engine: the game of the package.
        num_turns: springs and falls that are over.
        num_survived: those after which the power was in the game.
        num_orders: orders given, invalid ones included.
        num_invalid: orders that were not executed.
        num_missing: replies without an `<orders>` block.
    """

    def __init__(
        self, engine: Any, config: DiplomacyEnvConfig, players: Mapping[str, Player]
    ) -> None:
        self.engine = engine
        self.num_turns = self.num_survived = 0
        self.num_orders = self.num_invalid = self.num_missing = 0
        self._config = config
        self._players = players
        self._power: str = config.training_power
        self.num_centers_at_start = self.num_centers

    @property
    def num_centers(self) -> int:
        return len(self.engine.powers[self._power].centers)

    def opening(self) -> list[ChatMessage]:
        self._legal = orders_of(self.engine, self._power)
        rules = RULES.format(
            power=self._power,
            max_turns=self._config.max_game_turns,
            example=example(self._legal),
        )
        self._forfeit()
        return [{"role": "user", "content": f"{rules}\n\n{self._board()}"}]

    async def reply(self, turn: Turn) -> Reply:
        given = read_orders(turn.answer)
        checked = check_orders(given or [], self._legal)
        self.num_missing += given is None
        self.num_orders += len(checked.valid) + len(checked.invalid)
        self.num_invalid += len(checked.invalid)
        centers, survived = self.num_centers, self.num_survived
        await self._process(checked.valid)
        results = self._results()
        while not self._is_over():
            self._legal = orders_of(self.engine, self._power)
            if self._legal.max_orders:
                break
            await self._process([])
        earned = self._config.supply_center_weight * (self.num_centers - centers)
        earned += self._config.survival_bonus * (self.num_survived - survived)
        if self._is_over():
            return Reply(reward=earned + self._config.win_bonus * self.is_won, is_done=True)
        self._forfeit()
        shown = [inert_line(text, max_characters=60) for text in checked.invalid]
        ignored = f"Not legal, ignored: {'; '.join(shown[:MAX_SHOWN_INVALID])}\n" if shown else ""
        return Reply(f"{ignored}{results}{self._board()}", reward=earned)

    async def _process(self, own_orders: list[str]) -> None:
        """Execute one phase, with the orders of the other powers."""
        engine = self.engine
        engine.set_orders(self._power, own_orders)
        legal = {name: orders_of(engine, name) for name in self._players}
        deciding = [name for name, orders in legal.items() if orders.max_orders]
        given = await asyncio.gather(
            *(self._players[name].orders(engine, name, legal[name]) for name in deciding)
        )
        for name, orders in zip(deciding, given, strict=True):
            engine.set_orders(name, orders)
        is_movement = engine.phase_type == "M"
        engine.process()
        if is_movement:
            self.num_turns += 1
            self.num_survived += not self._is_eliminated()
        # The outcome of a finished game is its phase and the winner, or all powers in a draw.
        self.is_won = engine.is_game_done and engine.outcome[1:] == [self._power]

    def _is_over(self) -> bool:
        is_last = self.num_turns >= self._config.max_game_turns and self.engine.phase_type != "R"
        return is_last or self.engine.is_game_done or self._is_eliminated()

    def _is_eliminated(self) -> bool:
        state = self.engine.powers[self._power]
        return not (state.units or state.centers or state.retreats)

    def _forfeit(self) -> None:
        """Set the reward of a game that a limit ends: all centers are lost."""
        self.unfinished_reward = -self._config.supply_center_weight * self.num_centers

    def _board(self) -> str:
        turn = min(self.num_turns + 1, self._config.max_game_turns)
        limit = self._config.max_listed_orders
        board = board_text(self.engine, self._power, self._legal, max_listed=limit)
        return f"Turn {turn} of {self._config.max_game_turns}. {board}"

    def _results(self) -> str:
        """Return the orders of the power in the latest phase, and what prevented them."""
        phase = self.engine.get_phase_history()[-1]
        lines = []
        for order in phase.orders.get(self._power) or ():
            unit = " ".join(order.split()[:2])
            reasons = ", ".join(filter(None, map(str, phase.results.get(unit, ()))))
            lines.append(f"{order}{f' ({reasons})' if reasons else ''}")
        return f"Your last orders: {'; '.join(lines)}\n" if lines else ""


@lru_cache(maxsize=1)
def load_diplomacy() -> Any:
    """Return the package, whose log is limited to warnings.

    Raises:
        MissingExtraError: diplomacy is not installed.
    """
    try:
        import diplomacy
    except ImportError as error:
        raise MissingExtraError("diplomacy", extra="diplomacy") from error
    logging.getLogger("diplomacy").setLevel(logging.WARNING)
    return diplomacy


class DiplomacyEnvMinimal(GameEnv):
    """Games of Diplomacy; an item is the seed of the other powers."""

    name = "diplomacy_minimal"
    env_config_cls = DiplomacyEnvConfig
    config: DiplomacyEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "max_game_turns": 2,
        "save_game_logs": False,
        "eval_episodes": 2,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._opponents: list[ServerManager] = []
        self._num_logs = 0

    @classmethod
    def config_init(cls) -> tuple[DiplomacyEnvConfig, list[APIServerConfig]]:
        config, server = default_configs(DiplomacyEnvConfig, MODEL, wandb_name="diplomacy")
        urls = [f"http://localhost:{port}/v1" for port in PORTS]
        return config, [server.model_copy(update={"base_url": url}) for url in urls]

    async def setup(self) -> None:
        """Load the package and the map, and connect to the opponents' server.

        Raises:
            MissingExtraError: diplomacy is not installed.
            ConfigError: the opponents' server is at an `https` address and has no key.
        """
        self._package = await asyncio.to_thread(load_diplomacy)
        await asyncio.to_thread(self._package.Game)  # reads the map
        config = self.config
        key = os.environ.get(config.opponent_api_key_env)
        if config.opponent_models and config.opponent_base_url.startswith("https://") and not key:
            raise ConfigError(f"{config.opponent_api_key_env} is not set; opponent_models need it")
        self._opponents = [
            ServerManager(
                [
                    APIServerConfig(
                        model_name=model,
                        base_url=config.opponent_base_url,
                        api_key=key or "x",
                        health_check=False,
                    )
                ]
            )
            for model in config.opponent_models or ()
        ]

    def start_conversation(self, item: Item) -> DiplomacyGame:
        config = self.config
        engine = self._package.Game()
        others = [name for name in sorted(engine.powers) if name != config.training_power]
        models = [ModelPlayer(server, config) for server in self._opponents]
        rule = RulePlayer(config.opponent_rule, seed=item["seed"])
        players: dict[str, Player] = {
            name: models[i % len(models)] if models else rule for i, name in enumerate(others)
        }
        return DiplomacyGame(engine, config, players)

    async def collect_trajectory(self, item: Item) -> tuple[Rollout, list[Item]]:
        rollout, backlog = await super().collect_trajectory(item)
        await self._save(rollout, item)
        return rollout, backlog

    async def play_for_evaluation(self, item: Item) -> Rollout:
        rollout = await super().play_for_evaluation(item)
        await self._save(rollout, item)
        return rollout

    async def _save(self, rollout: Rollout, item: Item) -> None:
        if not self.config.save_game_logs or self._num_logs >= self.config.max_game_logs:
            return
        self._num_logs += 1
        name = f"{self.config.training_power.lower()}_{item['seed']}_{uuid.uuid4().hex}.json"
        path = Path(self.config.game_logs_dir) / name
        await asyncio.to_thread(self._write_game, cast(DiplomacyGame, rollout.conversation), path)

    def _write_game(self, game: DiplomacyGame, path: Path) -> None:
        from diplomacy.utils.export import to_saved_game_format

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(to_saved_game_format(game.engine)), encoding="utf-8")

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        metrics = super().metrics_of(rollouts, area)
        if not rollouts:
            return metrics
        games = [cast(DiplomacyGame, rollout.conversation) for rollout in rollouts]
        num_orders = sum(game.num_orders for game in games)
        num_replies = sum(len(rollout.replies) for rollout in rollouts)
        gained = [game.num_centers - game.num_centers_at_start for game in games]
        own = {
            "supply_centers": statistics.fmean(game.num_centers for game in games),
            "supply_centers_gained": statistics.fmean(gained),
            "survival_rate": statistics.fmean(g.num_survived == g.num_turns for g in games),
            "game_turns": statistics.fmean(game.num_turns for game in games),
            "invalid_order_rate": sum(g.num_invalid for g in games) / max(1, num_orders),
            "missing_orders_rate": sum(g.num_missing for g in games) / max(1, num_replies),
        }
        return {**metrics, **{f"{area}/{name}": value for name, value in own.items()}}

    def is_correct(self, rollout: Rollout) -> bool:
        """Whether the power has more centers than at the start."""
        game = cast(DiplomacyGame, rollout.conversation)
        return game.num_centers > game.num_centers_at_start

    def check_gold_answer(self, item: Item) -> list[str]:
        orders = OPENINGS[self.config.training_power]
        return [f"<orders>\n{of_turn}\n</orders>" for of_turn in orders]

    async def close(self) -> None:
        for server in self._opponents:
            await server.close()
        await super().close()


if __name__ == "__main__":
    DiplomacyEnvMinimal.cli()
