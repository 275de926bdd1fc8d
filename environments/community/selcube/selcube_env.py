"""Rubik's cube: one move per turn, each sampled G times, and the best reply is played.

    seed -> scramble -> G replies -> cube after the move + form + thinking -> a group --+
              ^                                     best reply -> cube ----------------+-> next
                                                                  turn, until solved or max_steps

Each turn is a group. The thinking of earlier turns is not shown again. The cube is simulated here,
without further packages:

    python environments/community/selcube/selcube_env.py process --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import Item, ScoredDataGroup
from atroposlib.envs.conversation import visible_text
from atroposlib.envs.multi_turn_env import turn_advantages
from atroposlib.envs.single_turn_env import (
    SingleTurnEnv,
    SingleTurnEnvConfig,
    Trajectory,
    ask,
    build_group,
    sample_trajectories,
)
from atroposlib.errors import MissingExtraError
from atroposlib.scored_data import IGNORE_INDEX
from atroposlib.tasks.answers import only_tagged
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import NUM_TRAINING_SEEDS, evaluation_seeds

__all__ = [
    "MOVES",
    "SOLVED",
    "RubiksCubeConfig",
    "RubiksCubeEnv",
    "ScoredMove",
    "apply_moves",
    "inverse",
    "read_move",
    "score_reply",
    "scramble",
    "state_score",
    "thinking_score",
]

CARD = EnvironmentCard(
    task="solve a scrambled Rubik's cube, one call of a tool per move",
    turns="up to 20",
    reward="per move, the share of stickers in place, +1 solved, 0.2 valid, up to 0.5 for thinking",
    data="made on the spot",
    command="process --env.total_steps 4",
)

VALID, INVALID, WON = 0.2, -0.2, 1.0
THINKING_MISSING, THINKING_EMPTY, THINKING_LEAST, THINKING_MOST = -0.2, -0.1, 0.2, 0.5
ENOUGH_WORDS = 40
"""Different words of a thinking that earns the most."""
MAX_CALL_CHARACTERS = 200
LEVEL_UP_GAMES, LEVEL_UP_RATE = 16, 0.7
"""Games of a level, and the share of them that must be solved, before the next level."""

Vector = tuple[int, int, int]
AXES: Mapping[str, tuple[Vector, Vector, Vector]] = {
    "U": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "R": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "F": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "D": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    "L": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "B": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
}
"""Face to its normal, and to the directions of its columns and rows; x right, y up, z to us."""
SOLVED = "".join(face * 9 for face in AXES)
"""[54] stickers of a solved cube, face by face and row by row; a color is named by its face."""


def _stickers() -> list[tuple[Vector, Vector]]:
    """Return position and normal of each of the 54 stickers."""
    return [
        (_sum(normal, _scaled(right, column - 1), _scaled(down, row - 1)), normal)
        for normal, right, down in AXES.values()
        for row in range(3)
        for column in range(3)
    ]


def _sum(*vectors: Vector) -> Vector:
    x, y, z = (sum(values) for values in zip(*vectors, strict=True))
    return x, y, z


def _scaled(vector: Vector, factor: int) -> Vector:
    return vector[0] * factor, vector[1] * factor, vector[2] * factor


def _dot(a: Vector, b: Vector) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _turned(vector: Vector, axis: Vector) -> Vector:
    """Return a vector after a clockwise quarter turn around an axis that points to the reader."""
    (x, y, z), (a, b, c) = vector, axis
    cross = (b * z - c * y, c * x - a * z, a * y - b * x)
    return _sum(_scaled(axis, _dot(axis, vector)), _scaled(cross, -1))


def _quarter_turn(axis: Vector) -> tuple[int, ...]:
    """Return [54] for each sticker the index from which it is taken by a turn of a face."""
    stickers = _stickers()
    source = list(range(len(stickers)))
    for index, (position, normal) in enumerate(stickers):
        if _dot(position, axis) == 1:
            source[stickers.index((_turned(position, axis), _turned(normal, axis)))] = index
    return tuple(source)


TURNS = {face: _quarter_turn(normal) for face, (normal, _, _) in AXES.items()}
MOVES = {
    f"{face}{suffix}": (face, n) for face in AXES for n, suffix in ((1, ""), (2, "2"), (3, "'"))
}
"""Move to its face and the number of quarter turns."""


def apply_moves(cube: str, moves: Sequence[str]) -> str:
    """Return a cube after moves such as `R`, `U'` and `F2`."""
    for move in moves:
        face, count = MOVES[move]
        for _ in range(count):
            cube = "".join(cube[index] for index in TURNS[face])
    return cube


def inverse(moves: Sequence[str]) -> list[str]:
    """Return the moves that undo others."""
    names = {value: name for name, value in MOVES.items()}
    return [names[MOVES[move][0], 4 - MOVES[move][1]] for move in reversed(moves)]


def scramble(*, seed: int, num_moves: int) -> list[str]:
    """Return random moves; the faces of neighbors differ, and are not opposite to each other."""
    source = random.Random(seed)
    moves: list[str] = []
    for _ in range(num_moves):
        last = AXES[MOVES[moves[-1]][0]][0] if moves else (0, 0, 0)
        options = [m for m, (face, _) in MOVES.items() if _dot(AXES[face][0], last) == 0]
        moves.append(source.choice(options))
    return moves


def state_score(cube: str) -> float:
    """Return the share of the 48 movable stickers that have the color of their center."""
    faces = [cube[start : start + 9] for start in range(0, len(cube), 9)]
    return sum(face.count(face[4]) - 1 for face in faces) / 48


def drawing(cube: str) -> str:
    """Return the faces of a cube as rows of colors."""
    rows = []
    for start, face in zip(range(0, len(cube), 9), AXES, strict=True):
        lines = (" ".join(cube[i : i + 3]) for i in range(start, start + 9, 3))
        rows.append(f"{face}: {' / '.join(lines)}")
    return "\n".join(rows)


def read_move(completion: str) -> str | None:
    """Return the move of the only tool call after the thinking; None unless it is valid."""
    call = only_tagged(visible_text(completion), "tool_call")
    if call is None or len(call) > MAX_CALL_CHARACTERS:
        return None
    try:
        found = json.loads(call)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("name") != "apply_move":
        return None
    arguments = found.get("arguments")
    move = arguments.get("move") if isinstance(arguments, dict) else None
    return move if isinstance(move, str) and move in MOVES else None


def thinking_score(completion: str) -> float:
    """Return 0.2 to 0.5 by the number of different words, -0.1 without words, -0.2 if missing."""
    before, closed, _ = completion.rpartition("</think>")
    if not closed:
        return THINKING_MISSING
    num_words = len(set(re.findall(r"\w+", before.rpartition("<think>")[2].lower())))
    if num_words == 0:
        return THINKING_EMPTY
    share = min(1.0, num_words / ENOUGH_WORDS)
    return THINKING_LEAST + (THINKING_MOST - THINKING_LEAST) * share


class ScoredMove(NamedTuple):
    """One reply."""

    score: float
    move: str | None
    """None if the reply has no valid move."""


def score_reply(completion: str, cube: str) -> ScoredMove:
    """Score a reply to a cube; an empty text stands for a truncated one."""
    move = read_move(completion)
    after = cube if move is None else apply_moves(cube, [move])
    score = state_score(after) + thinking_score(completion)
    score += INVALID if move is None else VALID
    return ScoredMove(score + (WON if after == SOLVED else 0.0), move)


SYSTEM_PROMPT = (
    "You solve a Rubik's cube, one move per turn. Think first, between <think> and </think>, then "
    "call the tool apply_move once, in this form:\n\n<tool_call>\n"
    '{"name": "apply_move", "arguments": {"move": "R"}}\n</tool_call>\n\n'
    "A move is one of the faces U, R, F, D, L and B, for a clockwise quarter turn, followed by ' "
    "for a counterclockwise or by 2 for a half turn. The cube is shown face by face, each in its "
    "three rows; the letters are colors, named by the face that they belong to. U is seen with F "
    "below it, D with F above it, and the others with U above them."
)
STATE = "{shown}\n\nMoves so far: {moves}. Turns left: {turns_left}."


class RubiksCubeConfig(SingleTurnEnvConfig):
    """Settings of the cubes, the curriculum and the scores."""

    max_steps: int = Field(20, ge=1, le=200, description="Maximum number of moves of a game.")
    scramble_moves: int = Field(
        7, ge=1, le=50, description="Number of moves that scramble a cube, at the highest level."
    )
    use_curriculum: bool = Field(
        True, description="Whether cubes are scrambled by fewer moves at first."
    )
    curriculum_max_level: int = Field(5, ge=1, description="Number of levels.")
    use_token_level_rewards: bool = Field(
        True,
        description="Whether groups have an advantage for each token, the standardized score.",
    )
    tiebreak_token_factor: float = Field(
        0.01, ge=0, description="Taken off the longest reply of a group, and less off shorter ones."
    )
    max_turn_tokens: int = Field(1024, ge=1, description="Token limit of one reply.")
    generate_visualizations: bool = Field(
        False, description="Whether the last cube of each training game is drawn as an image."
    )
    visualizations_dir: str = Field("rubiks_cube_images", description="Folder of these images.")
    eval_episodes: int = Field(32, ge=0, description="Number of games of one evaluation.")
    seed: int = Field(0, ge=0, lt=NUM_TRAINING_SEEDS, description="Seed of the first game.")


class CubeGame:
    """One game.

    Attributes:
        cube: current stickers.
        moves: moves so far.
        messages: chat so far, without thinking.
    """

    def __init__(self, item: Mapping[str, int], *, max_steps: int) -> None:
        self.cube = apply_moves(SOLVED, scramble(seed=item["seed"], num_moves=item["num_moves"]))
        self.moves: list[str] = []
        self._max_steps = max_steps
        self.messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": self._state()},
        ]
        self._is_stuck = False

    @property
    def is_solved(self) -> bool:
        return self.cube == SOLVED

    @property
    def goes_on(self) -> bool:
        return not (self.is_solved or self._is_stuck or len(self.moves) >= self._max_steps)

    def play(self, completion: str, move: str | None) -> None:
        """Add a reply to the chat and make its move; a reply without one ends the game."""
        self._is_stuck = move is None
        self.messages = [
            *self.messages,
            {"role": "assistant", "content": visible_text(completion)},
        ]
        if move is not None:
            self.cube = apply_moves(self.cube, [move])
            self.moves.append(move)
            self.messages.append({"role": "user", "content": self._state()})

    def _state(self) -> str:
        turns_left = self._max_steps - len(self.moves)
        moves = " ".join(self.moves) or "none"
        return STATE.format(shown=drawing(self.cube), moves=moves, turns_left=turns_left)


class RubiksCubeEnv(SingleTurnEnv):
    """Games with a cube; an item has a `seed` and `num_moves`, which scramble it.

    Attributes:
        iter: training games handed out so far; kept in checkpoints, as `level` is.
        level: current level of the curriculum, from 1.
        recent: whether the latest games of this level were solved.
    """

    name = "rubiks_cube"
    env_config_cls = RubiksCubeConfig
    config: RubiksCubeConfig
    scores_thinking = True
    logs_percent_correct = True
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 8192,
        "wandb_name": "rubiks_cube",
    }
    check_settings: ClassVar[dict[str, Any]] = {"max_steps": 1, "eval_episodes": 2}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.level = 1
        self.recent: deque[bool] = deque(maxlen=LEVEL_UP_GAMES)
        self.solved_since_log: list[bool] = []

    @property
    def num_scramble_moves(self) -> int:
        """Number of moves at the current level."""
        config = self.config
        if not config.use_curriculum:
            return config.scramble_moves
        level = min(self.level, config.curriculum_max_level)
        return max(1, round(config.scramble_moves * level / config.curriculum_max_level))

    async def get_next_item(self) -> dict[str, int]:
        seed = (self.config.seed + self.iter) % NUM_TRAINING_SEEDS
        self.iter += 1
        return {"seed": seed, "num_moves": self.num_scramble_moves}

    def eval_items(self) -> Sequence[dict[str, int]]:
        moves = self.config.scramble_moves
        seeds = evaluation_seeds(self.config.eval_episodes)
        return [{"seed": seed, "num_moves": moves} for seed in seeds]

    def prompt(self, item: Mapping[str, int]) -> list[dict[str, str]]:
        return CubeGame(item, max_steps=self.config.max_steps).messages

    async def score(self, item: Mapping[str, int], answer: str) -> float:
        """Return the score of the first move."""
        return score_reply(answer, CubeGame(item, max_steps=1).cube).score

    async def collect_trajectories(  # type: ignore[override]
        self, item: Mapping[str, int]
    ) -> tuple[list[ScoredDataGroup], list[Item]]:
        """Play a game; each turn is a group."""
        game = CubeGame(item, max_steps=self.config.max_steps)
        groups: list[ScoredDataGroup] = []
        while game.goes_on:
            budget = self._budget(game.messages)
            if budget < 1:
                if not groups:
                    self.prompt_room.skip(self.config.max_token_length, missing=1 - budget)
                break
            self.prompt_room.has_fit = True
            trajectories = await sample_trajectories(
                self.server,
                self.tokenizer,
                game.messages,
                group_size=self.config.group_size,
                max_tokens=budget,
                **self.sampling(),
            )
            replies = [
                score_reply("" if t.is_truncated else t.completion, game.cube) for t in trajectories
            ]
            scores = self._with_tiebreak([reply.score for reply in replies], trajectories)
            groups.append(self._group(game.messages, trajectories, scores))
            best = max(range(len(scores)), key=scores.__getitem__)
            game.play(trajectories[best].completion, replies[best].move)
        self._note_game(game.is_solved, num_moves=item["num_moves"])
        if self.config.generate_visualizations:
            name = f"cube_{item['seed']}_{'solved' if game.is_solved else 'unsolved'}.png"
            path = Path(self.config.visualizations_dir) / name
            await asyncio.to_thread(draw_cube, game.cube, path)
        return groups, []

    def _with_tiebreak(
        self, scores: Sequence[float], trajectories: Sequence[Trajectory]
    ) -> list[float]:
        lengths = [trajectory.num_completion_tokens for trajectory in trajectories]
        factor = self.config.tiebreak_token_factor / max(1, *lengths)
        return [score - factor * n for score, n in zip(scores, lengths, strict=True)]

    def _group(
        self,
        messages: Sequence[Mapping[str, Any]],
        trajectories: Sequence[Trajectory],
        scores: Sequence[float],
    ) -> ScoredDataGroup:
        group = build_group(
            messages,
            trajectories,
            scores,
            is_muted=[self._is_muted(trajectory) for trajectory in trajectories],
            generation_params=self.sampling(),
            include_messages=self.config.include_messages,
        )
        if self.config.use_token_level_rewards:
            advantages = turn_advantages([[score] for score in scores])
            group["advantages"] = [
                [advantage if mask != IGNORE_INDEX else 0.0 for mask in trajectory.masks]
                for trajectory, [advantage] in zip(trajectories, advantages, strict=True)
            ]
        return group

    def _budget(self, messages: Sequence[Mapping[str, Any]]) -> int:
        return min(super()._budget(messages), self.config.max_turn_tokens)

    def _note_game(self, is_solved: bool, *, num_moves: int) -> None:
        self.solved_since_log.append(is_solved)
        if num_moves != self.num_scramble_moves:
            return  # it began at an earlier level
        self.recent.append(is_solved)
        is_mastered = (
            len(self.recent) == LEVEL_UP_GAMES and statistics.fmean(self.recent) >= LEVEL_UP_RATE
        )
        if is_mastered and self.level < self.config.curriculum_max_level:
            self.level += 1
            self.recent.clear()

    async def evaluate_item(self, item: Mapping[str, int]) -> dict[str, Any]:
        """Play a game with one reply per turn; the score is 1.0 if it is solved."""
        game = CubeGame(item, max_steps=self.config.max_steps)
        while game.goes_on:
            budget = self._budget(game.messages)
            if budget < 1:
                break
            [reply] = await ask(
                self.server,
                self.tokenizer,
                game.messages,
                n=1,
                max_tokens=budget,
                temperature=self.config.eval_temperature,
                split="eval",
            )
            is_cut = reply.finish_reason == "length"
            game.play(reply.completion, None if is_cut else read_move(reply.completion))
        return {
            "messages": game.messages,
            "score": float(game.is_solved),
            "num_moves": len(game.moves),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        if self.solved_since_log:
            metrics["train/fraction_solved"] = statistics.fmean(self.solved_since_log)
            metrics["train/level"] = float(self.level)
        self.solved_since_log = []
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter, "level": self.level})

    def check_gold_answer(self, item: Mapping[str, int]) -> list[str]:
        moves = inverse(scramble(seed=item["seed"], num_moves=item["num_moves"]))
        return [_call(move) for move in moves]


def _call(move: str) -> str:
    call = json.dumps({"name": "apply_move", "arguments": {"move": move}})
    return f"<think>One move brings it nearer.</think>\n<tool_call>\n{call}\n</tool_call>"


NET = {"U": (3, 6), "L": (0, 3), "F": (3, 3), "R": (6, 3), "B": (9, 3), "D": (3, 0)}
"""Face to the column and row of its place in an unfolded cube, from the lower left."""
COLORS = {"U": "white", "R": "red", "F": "green", "D": "yellow", "L": "orange", "B": "blue"}


def draw_cube(cube: str, path: Path) -> None:
    """Write an image of an unfolded cube.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise MissingExtraError("matplotlib", extra="trainer") from error
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    for index, face in enumerate(AXES):
        column, row = NET[face]
        for place in range(9):
            corner = (column + place % 3, row + 2 - place // 3)
            color = COLORS[cube[9 * index + place]]
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=color, edgecolor="black"))
    axes.set(xlim=(0, 12), ylim=(0, 9), aspect="equal")
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    RubiksCubeEnv.cli()
