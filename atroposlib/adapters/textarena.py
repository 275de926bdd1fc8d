"""TextArena games: the policy plays one seat, and an opponent the others.

    reset(seed) ─► prompt ─► turn of the policy ─► step ─┬► messages of the game ─► turn ─► …
                                                         ├► opponent: random legal moves, or a model
                                                         └► end: the reward of the seat

NAME is an id of the package, such as `GuessTheNumber-v0`. The policy reads what the game sends to
its seat since its last turn; wrappers of the package that repeat the whole history are left out,
those that change actions are kept. Games draw from a generator of their episode, so that all
rollouts of an item start alike, and go on alike after the same moves.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.adapters.interface import (
    Adapter,
    AdapterArgs,
    Episode,
    EpisodeThreads,
    Item,
    finite_reward,
    separate_random,
    shown_error,
)
from atroposlib.envs.conversation import ChatMessage, Reply, Turn, visible_text
from atroposlib.errors import ConfigError, EpisodeConnectionError, EpisodeFailedError
from atroposlib.utils.text import near_name

__all__ = ["TextArenaAdapter", "TextArenaArgs", "TextArenaEpisode", "legal_move"]

EVAL_SEEDS = 1_000_000_000
"""First seed of evaluations; those of training are smaller."""
MAX_PLAYERS = 16
MAX_OTHER_MOVES = 1000
"""Moves of others between two turns of the policy."""
MAX_ACTION_CHARACTERS = 100_000
START_TIMEOUT_S = 600.0
"""Time to wait for the starts of other games: some take seconds, one at a time."""
MAX_RETRIES = 3
INVALID_MOVE = "Invalid Move: "
"""Start of the reason for which a game of one player ended."""
KNOWN_MOVES: Mapping[str, Sequence[str]] = {
    "ConnectFour": [f"[col {n}]" for n in range(7)] + [f"[{n}]" for n in range(7)],
    "IteratedMatchingPennies": ["[heads]", "[tails]"],
    "IteratedRockPaperScissors": ["[rock]", "[paper]", "[scissors]"],
    "KuhnPoker": ["[check]", "[bet]", "[call]", "[fold]"],
    "Nim": [f"[{pile} {count}]" for pile in range(8) for count in range(1, 8)],
    "PigDice": ["[roll]", "[hold]"],
    "ReverseTicTacToe": [f"[{n}]" for n in range(9)],
    "TicTacToe": [f"[{n}]" for n in range(9)],
    "WildTicTacToe": [f"[{mark} {n}]" for mark in "XO" for n in range(9)],
}
"""Moves of games from which `opponent: random` chooses the legal ones, by the start of the id."""


MAKING_ERRORS = (
    *(ImportError, LookupError, SyntaxError, TypeError, AssertionError),
    *(OSError, ValueError),  # a file or the key of an API that the game needs is missing
)


class TextArenaArgs(AdapterArgs):
    """The game, the seat of the policy, and the opponent."""

    env_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of textarena.make, such as max_turns."
    )
    num_players: int | None = Field(
        None, ge=1, le=MAX_PLAYERS, description="Number of players; null: the fewest that can play."
    )
    seat: int | Literal["random"] = Field(
        0, description="Seat of the policy, counted from 0, or random: drawn for each item."
    )
    opponent: Literal["random", "model"] = Field(
        "random",
        description="Who plays the other seats: random legal moves, or a model with an "
        "OpenAI-compatible API.",
    )
    opponent_moves: list[str] | None = Field(
        None,
        max_length=10_000,
        description="Moves from which random draws the legal ones; null: those of games that are "
        "known.",
    )
    opponent_base_url: str | None = Field(
        None, description="Base URL of the opponent's API, which ends in /v1."
    )
    opponent_model: str | None = Field(None, description="Name of the opponent's model.")
    opponent_api_key_variable: str | None = Field(
        None, description="Environment variable with the opponent's API key."
    )
    opponent_max_tokens: int = Field(
        512, ge=1, le=100_000, description="Maximum tokens of one move of the opponent."
    )
    opponent_temperature: float = Field(
        0.7, ge=0, le=2, description="Sampling temperature of the opponent."
    )


def legal_move(env: Any, moves: Sequence[str], source: Any) -> str:
    """Return a random legal move of the current player, found by trying moves on copies.

    Args:
        env: the game, without wrappers; not changed.
        moves: moves to choose from.
        source: generator, of which the order of the moves is drawn.

    Raises:
        EpisodeFailedError: none of the moves is legal.
    """
    player = env.state.current_player_id
    shuffled: list[str] = source.sample(list(moves), len(moves))
    for move in shuffled:
        tried = copy.deepcopy(env)
        errors = getattr(tried.state, "error_count", 0)
        tried.step(move)
        has_lost = tried.state.game_info[player].get("invalid_move", False)
        is_error = tried.state.current_player_id == player and (
            getattr(tried.state, "error_count", 0) > errors
        )
        if not has_lost and not is_error:
            return move
    raise EpisodeFailedError(
        f"none of the {len(moves)} moves of the opponent is legal; set --args opponent_moves"
    )


class TextArenaEpisode(Episode):
    """One game, in a thread of its own."""

    def __init__(self, adapter: TextArenaAdapter, item: Item) -> None:
        super().__init__()
        self._adapter = adapter
        self._seed = item["seed"]
        self._seat = item["seat"]
        self._thread = adapter.threads.open()
        self._env: Any = None
        self._actions: list[Any] = []
        self._is_over = False
        self._others: dict[int, list[dict[str, str]]] = {}
        self._num_moves = 0

    async def begin(self) -> Sequence[ChatMessage]:
        await self._thread.call(self._reset)
        shown = await self._until_own_turn()
        if shown is None:
            raise EpisodeFailedError(f"{self._adapter.name} ended before the first turn")
        return [{"role": "user", "content": shown}]

    async def reply(self, turn: Turn) -> Reply:
        self._num_moves += 1
        await self._thread.call(self._step, turn.answer[:MAX_ACTION_CHARACTERS], True)
        shown = await self._until_own_turn()
        if shown is not None:
            return Reply(shown)
        reward, info = await self._thread.call(self._outcome)
        self.metrics["invalid_move"] = float(bool(info.get("invalid_move", False)))
        return Reply(reward=reward, is_done=True)

    async def close(self) -> None:
        self.metrics["moves"] = self._num_moves
        await self._thread.close()

    async def _until_own_turn(self) -> str | None:
        """Let the others play; return what the policy reads at its turn, or None at the end."""
        for _ in range(MAX_OTHER_MOVES):
            if self._is_over:
                return None
            player, shown = await self._thread.call(self._observation)
            if player == self._seat:
                return shown
            if self._adapter.args.opponent == "model":
                move = await self._model_move(player, shown)
            else:
                move = await self._thread.call(self._random_move)
            await self._thread.call(self._step, move, self._adapter.args.opponent == "model")
        raise EpisodeFailedError(
            f"{self._adapter.name}: {MAX_OTHER_MOVES} moves of others without a turn of seat "
            f"{self._seat}"
        )

    async def _model_move(self, player: int, shown: str) -> str:
        chat = self._others.setdefault(player, [])
        chat.append({"role": "user", "content": shown})
        move = await self._adapter.ask_opponent(chat)
        chat.append({"role": "assistant", "content": move})
        return move

    def _reset(self) -> None:
        separate_random("textarena").seed(self._seed)
        # Some games are made with variables of their module.
        with self._adapter.threads.alone(START_TIMEOUT_S):
            env, self._actions = self._adapter.make()
            env.reset(num_players=self._adapter.num_players, seed=self._seed)
        self._env = env

    def _observation(self) -> tuple[int, str]:
        import textarena

        player, messages = self._env.get_observation()
        names = self._env.state.role_mapping
        shown = []
        for sender, text, kind in messages or ():
            if sender == player and kind == textarena.ObservationType.PLAYER_ACTION:
                continue  # the chat has it already
            if kind == textarena.ObservationType.PROMPT:
                shown.append(str(text))
            else:
                shown.append(f"[{names.get(sender, f'Player {sender}')}] {text}")
        return player, "\n".join(shown).strip() or "It is your turn."

    def _step(self, move: str, is_written: bool) -> None:
        for wrapper in self._actions if is_written else ():
            move = wrapper.action(move)
        done, _ = self._env.step(move)
        self._is_over = bool(done)

    def _random_move(self) -> str:
        return legal_move(self._env, self._adapter.moves, separate_random("textarena"))

    def _outcome(self) -> tuple[float, Mapping[str, Any]]:
        rewards, infos = self._env.close()
        where = f"the end of {self._adapter.name}"
        reward = None if rewards is None else rewards.get(self._seat)
        info = infos.get(self._seat) or {}
        if isinstance(reward, str) and info.get("invalid_move"):
            # Countdown, Cryptarithm and Slitherlink exchange the reward and its reason.
            reward = str(info.get("reason")).removeprefix(INVALID_MOVE)
        return finite_reward(reward, where), info


class TextArenaAdapter(Adapter):
    """One game; an item is the seed of a match and the seat of the policy.

    Attributes:
        num_players: number of players, from `open` on.
        moves: moves of a random opponent.
    """

    args_cls = TextArenaArgs
    begin_timeout_s = START_TIMEOUT_S
    default_settings: ClassVar[Mapping[str, Any]] = {"max_turns": 40, "max_token_length": 8192}
    args: TextArenaArgs

    def __init__(self, name: str, args: TextArenaArgs, **settings: Any) -> None:
        super().__init__(name, args, **settings)
        self.threads = EpisodeThreads(name)
        self.num_players = args.num_players or 1
        known = next((KNOWN_MOVES[k] for k in KNOWN_MOVES if name.startswith(k)), ())
        self.moves = known if args.opponent_moves is None else args.opponent_moves
        self._client: Any = None
        self._has_answered = False

    async def open(self) -> None:
        if self.args.opponent == "model":
            self._client = self._opponent_client()
        thread = self.threads.open()
        try:
            await thread.call(self._inspect)
        finally:
            await thread.close()
        if self.num_players > 1 and self.args.opponent == "random" and not self.moves:
            raise ConfigError(
                f"{self.name} has {self.num_players} players: give the moves of a random opponent "
                "with --args opponent_moves, or a model with opponent=model"
            )

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def item(self, index: int) -> Item:
        return self._item(random.Random(f"{self.seed}:{index}").randrange(EVAL_SEEDS))

    async def eval_items(self, limit: int) -> Sequence[Item]:
        return [self._item(EVAL_SEEDS + i) for i in range(limit)]

    def start(self, item: Item) -> TextArenaEpisode:
        return TextArenaEpisode(self, item)

    def make(self) -> tuple[Any, list[Any]]:
        """Return a new game without wrappers, and its wrappers of actions, the outer one first.

        Raises:
            ConfigError: the package does not know the game, or the game refuses its arguments.
        """
        import textarena

        try:
            env = textarena.make(self.name, **self.args.env_kwargs)
        except MAKING_ERRORS as error:
            raise ConfigError(
                f"textarena.make({self.name!r}) failed: {shown_error(error)}"
            ) from error
        actions = []
        while isinstance(env, textarena.Wrapper):
            if isinstance(env, textarena.ActionWrapper):
                actions.append(env)
            env = env.env
        return env, actions

    async def ask_opponent(self, chat: Sequence[Mapping[str, str]]) -> str:
        """Return a move of the opponent's model, without its thinking.

        Raises:
            EpisodeConnectionError: its API does not answer, or no longer does.
            ConfigError: its address, model or key is wrong; not once it has answered.
        """
        import openai

        try:
            answer = await self._client.chat.completions.create(
                model=self.args.opponent_model,
                messages=list(chat),
                max_tokens=self.args.opponent_max_tokens,
                temperature=self.args.opponent_temperature,
            )
        except (
            openai.AuthenticationError,
            openai.NotFoundError,
            openai.PermissionDeniedError,
        ) as error:
            raise self._refused(
                f"the opponent's API at {self.args.opponent_base_url} refuses its requests; check "
                f"opponent_base_url, opponent_model and opponent_api_key_variable: {error}"
            ) from error
        except openai.OpenAIError as error:
            raise EpisodeConnectionError(f"the opponent's API failed: {error}") from error
        if isinstance(answer, str):  # a page in HTML
            raise self._refused(
                f"opponent_base_url {self.args.opponent_base_url} is not that of an API, which "
                "ends in /v1"
            )
        if not answer.choices:  # as some services answer an error
            raise EpisodeConnectionError("the opponent's API failed: its answer has no choices")
        self._has_answered = True
        return visible_text(answer.choices[0].message.content or "")

    def _refused(self, message: str) -> Exception:
        """Return an error that ends the run, or fails the rollout if the settings were right."""
        return EpisodeConnectionError(message) if self._has_answered else ConfigError(message)

    def _item(self, seed: int) -> Item:
        seat = self.args.seat
        if seat == "random":
            seat = random.Random(f"seat {seed}").randrange(self.num_players)
        return {"seed": seed, "seat": seat}

    def _opponent_client(self) -> Any:
        from openai import AsyncOpenAI

        if not self.args.opponent_base_url or not self.args.opponent_model:
            raise ConfigError("opponent=model needs opponent_base_url and opponent_model")
        variable = self.args.opponent_api_key_variable
        if variable is not None and variable not in os.environ:
            raise ConfigError(f"the environment variable {variable} is not set")
        return AsyncOpenAI(
            base_url=self.args.opponent_base_url,
            api_key=os.environ[variable] if variable is not None else "none",
            timeout=self.step_timeout_s,
            max_retries=MAX_RETRIES,
        )

    def _inspect(self) -> None:
        """Check the name and the arguments, and find out how many players the game has."""
        import textarena
        from textarena.envs.registration import ENV_REGISTRY

        if self.name not in ENV_REGISTRY:
            raise ConfigError(
                f"textarena has no game {self.name!r}{near_name(self.name, list(ENV_REGISTRY))}"
            )
        chosen = self.args.num_players
        problem: Exception | None = None
        for count in range(1, MAX_PLAYERS + 1) if chosen is None else (chosen,):
            env, _ = self.make()
            separate_random("textarena")
            try:
                env.reset(num_players=count, seed=0)
            except Exception as error:  # noqa: BLE001 - any exception of the game
                problem = error
                continue
            self.num_players = env.state.num_players  # that of some games is fixed
            is_for_one = isinstance(env.state, textarena.SinglePlayerState)
            if self.num_players > 1 or is_for_one or chosen is not None:
                break
        else:
            raise ConfigError(
                f"{self.name} cannot start with "
                f"{'1 to 16' if chosen is None else chosen} players: {shown_error(problem)}"
            ) from problem
        seat = self.args.seat
        if seat != "random" and not 0 <= seat < self.num_players:
            raise ConfigError(
                f"seat is {seat}; {self.name} has the seats 0 to {self.num_players - 1}"
            )
