"""The environments that are trained, each with small settings and a scripted policy to imitate.

items of the environment ─► scripted policy: right form, poor answers ─► conversations
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from atroposlib.adapters.env import GuardedConversation
from atroposlib.adapters.interface import Episode
from atroposlib.adapters.registry import make_adapter
from atroposlib.agent_tasks.programs.shell import PROMPT as SHELL_PROMPT
from atroposlib.envs.conversation import ChatMessage, Conversation
from atroposlib.envs.multi_turn_env import Limits, TokenSequence, play
from atroposlib.tasks.blackjack import ACTIONS, Table
from atroposlib.tasks.games import NUM_TRAINING_SEEDS, words_at
from atroposlib.tasks.single_turn_parts import DEEP_THINKING
from atroposlib.tasks.tool_calls import CLOSE, OPEN, read_calls
from atroposlib.utils.local_records import read_records
from environments.game_environments.gymnasium.blackjack.blackjack_env_no_thinking import (
    BlackjackEnvNoThinkingConfig,
    BlackjackGame,
)
from environments.game_environments.hangman.hangman_env import (
    LEVELS,
    Hangman,
    HangmanEnvConfig,
    HangmanGame,
)
from environments.tool_calling_server import SAMPLE, request_of
from example_trainer.demo.settings import DemoSettings, TinyModelShape
from example_trainer.demo.task import training_problems
from example_trainer.launch.report import SHARE_RIGHT, RewardMetric

__all__ = ["TASKS", "Messages", "TrainingTask"]

Messages = Sequence[Mapping[str, Any]]
Call = dict[str, Any]


@dataclass(frozen=True)
class WarmUp:
    """Supervised training on conversations of the scripted policy."""

    steps: int
    """Number of optimizer steps."""

    num_conversations: int = 8_000

    lr: float = 2e-3

    batch_size: int = 64
    """Conversations per step."""


@dataclass(frozen=True)
class TrainingTask:
    """One environment with all settings of its training."""

    settings: DemoSettings
    """Script and settings of the environment, sizes of the model and of the training."""

    evaluation: Mapping[str, Any]
    """Settings of the environment that differ in evaluations."""

    warm_up: WarmUp

    conversations: Callable[[int], Iterator[Messages]]
    """Function that yields a number of conversations of the scripted policy."""

    measure: str
    """Description of the measured value."""

    value: Callable[[float], float]
    """Function from the score of an evaluation episode to its measured value."""

    reward: RewardMetric
    """Metric of the training reward in the environment's log."""


@dataclass(frozen=True)
class _Written:
    text: str
    is_cut: bool = False


class _ScriptedPolicy:
    """A policy whose turns are the results of a function."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self._answer = answer

    def budget(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> int:
        return max_tokens

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> _Written:
        return _Written(self._answer())

    def sequences(self) -> list[TokenSequence]:
        return []


def played_out(
    conversation: Conversation, answer: Callable[[], str], *, max_turns: int
) -> Messages:
    """Play a conversation with the results of a function as turns; return its messages."""
    limits = Limits(max_turns=max_turns)
    return asyncio.run(play(conversation, _ScriptedPolicy(answer), limits=limits)).messages


ARITHMETIC = "basic_arithmetic"
ARITHMETIC_PARAMS = {
    "min_terms": 2,
    "max_terms": 3,
    "min_digits": 1,
    "max_digits": 1,
    "operators": ["+", "-", "*"],
    "allow_parentheses": False,
    "allow_negation": False,
}
WRONG_EQUATIONS = 0.2
NUM_HELD_OUT = 512
CORRECT = 0.5
OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
PRECEDENCE = (("*",), ("+", "-"))


def arithmetic(folder: Path, seed: int) -> TrainingTask:
    """Return the task of expressions with two or three one-digit numbers, from reasoning-gym.

    The scripted policy writes the steps out; one equation in five is wrong. `folder` is not used.
    """
    env: dict[str, Any] = {
        "task_names": [ARITHMETIC],
        "task_params": {ARITHMETIC: ARITHMETIC_PARAMS},
        "system_prompt": "Give the answer in <answer> tags.",
        "seed": seed,
        "eval_seed": 1_000_003 + seed,
        "num_eval_samples_per_task": NUM_HELD_OUT,
        "top_p": 1.0,
        "num_score_workers": 0,
    }

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for problem in training_problems(env, count):
            text = worked_out(str(problem.item.entry["metadata"]["expression"]), rng)
            yield [*problem.messages, {"role": "assistant", "content": text}]

    return TrainingTask(
        settings=DemoSettings(seed=seed, steps=40, task=None, environment_sections={"env": env}),
        evaluation={"eval_temperature": 1.0, "eval_budget_factor": 1.0},
        warm_up=WarmUp(steps=240),
        conversations=conversations,
        measure=f"accuracy on {NUM_HELD_OUT} problems never trained on",
        value=lambda score: float(score >= CORRECT),
        reward=SHARE_RIGHT,
    )


def worked_out(expression: str, rng: random.Random) -> str:
    """Return one equation per operation and the answer; some equations are wrong.

    Without errors, `2 + 3 * 4` gives `3 * 4 = 12 ; 2 + 12 = 14 <answer>14</answer>`.
    """
    first, *rest = expression.split(" ")
    numbers = [int(first), *map(int, rest[1::2])]
    operators = rest[::2]
    equations = []
    for rank in PRECEDENCE:
        index = 0
        while index < len(operators):
            if operators[index] not in rank:
                index += 1
                continue
            left, right = numbers[index : index + 2]
            operator = operators.pop(index)
            result = OPERATIONS[operator](left, right)
            if rng.random() < WRONG_EQUATIONS:
                result += rng.choice((-2, -1, 1, 2))
            equations.append(f"{left} {operator} {right} = {result}")
            numbers[index : index + 2] = [result]
    return f"{' ; '.join(equations)} <answer>{numbers[0]}</answer>"


BLACKJACK = Path("environments/game_environments/gymnasium/blackjack/blackjack_env_no_thinking.py")
NUM_BLACKJACK_GAMES = 2_000
BLACKJACK_TOKENS = 256


def blackjack(folder: Path, seed: int) -> TrainingTask:
    """Return the task of Blackjack with one word per decision.

    The scripted policy decides at random. `folder` is not used.
    """

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        config = BlackjackEnvNoThinkingConfig()
        # The last seeds: training starts at the first and does not reach them.
        for number in range(NUM_TRAINING_SEEDS - count, NUM_TRAINING_SEEDS):
            yield played_out(
                BlackjackGame(Table(config.env_name, seed=number)),
                lambda: rng.choice(ACTIONS),
                max_turns=config.max_episode_turns,
            )

    return TrainingTask(
        settings=DemoSettings(
            seed=seed,
            steps=60,
            groups_per_step=16,
            group_size=16,
            max_tokens=BLACKJACK_TOKENS,
            task=None,
            environment_door=BLACKJACK,
            environment_sections={"env": {"seed": seed, "max_turn_tokens": 4}},
        ),
        evaluation={"eval_temperature": 1.0, "eval_episodes": NUM_BLACKJACK_GAMES},
        warm_up=WarmUp(steps=60, num_conversations=2_000),
        conversations=conversations,
        measure=f"mean result (-1 to 1) of {NUM_BLACKJACK_GAMES:,} games with other cards",
        value=float,
        reward=RewardMetric(
            key="_train/avg_reward",
            label="mean result of a game",
            summary="{:+.2f} is the mean result of a game",
            limits=(-1.0, 0.25),
        ),
    )


HANGMAN = Path("environments/game_environments/hangman/hangman_env.py")
LEVEL = LEVELS["easy"]
HELD_OUT_WORDS = 0.2
JUMPS = 0.4
"""Fraction of the guesses that are any new letter instead of the next one. A model this small does
not learn to guess new letters at random, which requires attention to all earlier guesses. It learns
the next letter of the alphabet in a minute; the jumps add other continuations."""
DISCOUNT = 0.3
"""Discount of later rewards. Without it, early turns, which have more losses after them, look worse
than late ones for any guess."""
NUM_HANGMAN_GAMES = 400
HANGMAN_TOKENS = 512


def hangman(folder: Path, seed: int) -> TrainingTask:
    """Return the task of easy Hangman with the clue; writes two lists of words to `folder`.

    The scripted policy follows the alphabet, with jumps. A fifth of the words is held out.
    """
    trained, held_out = split_words(words_at(None), random.Random(seed))
    paths = {"trained": folder / "trained_words.tsv", "held_out": folder / "held_out_words.tsv"}
    for path, words in zip(paths.values(), (trained, held_out), strict=True):
        path.write_text("".join(f"{w}\t{clue}\n" for w, clue in words.items()), encoding="utf-8")

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for word in rng.choices(sorted(trained), k=count):
            game = HangmanGame(word, lives=LEVEL.lives)
            conversation = Hangman(game, clue=trained[word], thinking_active=False)
            guess = partial(guess_letter, game.guesses, rng)
            yield played_out(conversation, guess, max_turns=HangmanEnvConfig().max_turns)

    return TrainingTask(
        settings=DemoSettings(
            seed=seed,
            steps=120,
            lr=5e-4,
            groups_per_step=8,
            group_size=8,
            max_tokens=HANGMAN_TOKENS,
            shape=TinyModelShape(max_length=HANGMAN_TOKENS, max_vocabulary=1024),
            task=None,
            environment_door=HANGMAN,
            environment_sections={
                "env": {
                    "seed": seed,
                    "reward_discount": DISCOUNT,
                    "held_out_share": 0.0,  # the lists of words are disjoint
                    "thinking_active": False,
                    "words_path": str(paths["trained"]),
                    "max_turn_tokens": 12,
                }
            },
        ),
        evaluation={
            "eval_temperature": 1.0,
            "eval_episodes": NUM_HANGMAN_GAMES,
            "reward_discount": 1.0,
            "words_path": str(paths["held_out"]),
        },
        warm_up=WarmUp(steps=160, num_conversations=4_000, batch_size=32),
        conversations=conversations,
        measure=f"mean return (at most 2) of {NUM_HANGMAN_GAMES} games with held-out words",
        value=float,
        reward=RewardMetric(
            key="train/mean_return",
            label="mean discounted return of a game",
            summary="{:+.2f} is the mean discounted return of a game",
            limits=None,
        ),
    )


def split_words(
    words: Mapping[str, str], rng: random.Random
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the trained and the held-out words, with their clues."""
    fitting = sorted(w for w in words if LEVEL.min_letters <= len(w) <= LEVEL.max_letters)
    held_out = set(rng.sample(fitting, round(HELD_OUT_WORDS * len(fitting))))
    return (
        {word: words[word] for word in fitting if word not in held_out},
        {word: words[word] for word in fitting if word in held_out},
    )


def guess_letter(guesses: Sequence[str], rng: random.Random) -> str:
    """Return a new letter: the next one of the alphabet or, after a jump, any."""
    start = ascii_lowercase.index(guesses[-1]) if guesses else 0
    letters = [x for x in ascii_lowercase[start:] + ascii_lowercase[:start] if x not in guesses]
    jumps = not guesses or rng.random() < JUMPS
    return f"<guess>{rng.choice(letters) if jumps else letters[0]}</guess>"


TOOL_CALLING = Path("environments/tool_calling_server.py")
WRONG_CALLS = 0.6
NUM_REPEATS = 40
TOOL_CALL_TOKENS = 384


def tool_calling(folder: Path, seed: int) -> TrainingTask:
    """Return the task of the tool-calling sample; writes its data to `folder`.

    The scripted policy writes well-formed calls, 60 % of them wrong. The evaluation repeats the
    twelve training requests: a model this small memorizes them and does not generalize.
    """
    rows = read_records(SAMPLE / "train.jsonl", ["conversations"])
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(lines * NUM_REPEATS), encoding="utf-8")
    requests = [request for request in map(request_of, rows) if request is not None]
    expected = [read_calls(request["expected"]).calls for request in requests]

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for number in range(count):
            request = requests[number % len(requests)]
            calls = expected[number % len(requests)]
            if rng.random() < WRONG_CALLS:
                calls = wrong_calls(calls, expected, rng)
            text = "\n".join(f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in calls)
            yield [
                {"role": "system", "content": f"{DEEP_THINKING}\n\n{request['tools']}"},
                {"role": "user", "content": request["request"]},
                {"role": "assistant", "content": text},
            ]

    return TrainingTask(
        settings=DemoSettings(
            seed=seed,
            steps=40,
            groups_per_step=12,
            group_size=8,
            max_tokens=TOOL_CALL_TOKENS,
            shape=TinyModelShape(max_length=TOOL_CALL_TOKENS, max_vocabulary=860),
            task=None,
            environment_door=TOOL_CALLING,
            environment_sections={"env": {"dataset_path": str(folder)}},
        ),
        evaluation={"eval_temperature": 1.0},
        warm_up=WarmUp(steps=120, num_conversations=2_000, batch_size=32),
        conversations=conversations,
        measure=f"accuracy on the sample's {len(requests)} requests, {NUM_REPEATS} tries each",
        value=lambda score: float(score > 0),
        reward=SHARE_RIGHT,
    )


def wrong_calls(
    calls: Sequence[Call], known: Sequence[Sequence[Call]], rng: random.Random
) -> list[Call]:
    """Return a copy of correct calls in which one has another tool or value, or is missing.

    Args:
        calls: The correct calls.
        known: Correct calls of all requests, the source of other names and values.
        rng: Source of randomness.
    """
    others = [call for group in known for call in group]
    wrong: list[Call] = [json.loads(json.dumps(call)) for call in calls]
    place = rng.randrange(len(wrong))
    kind = rng.choice(["tool", "value", "value", "value", "fewer"])
    if kind == "fewer" and len(wrong) > 1:
        del wrong[place]
    elif kind == "tool":
        names = sorted({call["name"] for call in others} - {wrong[place]["name"]})
        wrong[place]["name"] = rng.choice(names)
    else:
        arguments = wrong[place]["arguments"]
        key = rng.choice(sorted(arguments))
        values = [v for call in others for v in call["arguments"].values() if v != arguments[key]]
        arguments[key] = rng.choice(values)
    return wrong


FROZEN_LAKE = "gymnasium:FrozenLake-v1"
ADAPTER_SCRIPT = """from atroposlib.adapters.env import environment_class

environment_class({spec!r}).cli()
"""
FROZEN_LAKE_TURNS = 10
FROZEN_LAKE_TOKENS = 512
NUM_LAKE_GAMES = 400
AIMED_MOVES = 0.5
"""Fraction of the moves that follow a shortest path; the others are random."""
LAKE_ROUTE = {
    **{(0, 0): "down", (1, 0): "down", (2, 0): "right", (2, 1): "down", (3, 1): "right"},
    **{(0, 1): "left", (0, 2): "down", (0, 3): "left", (1, 2): "down", (2, 2): "down"},
    (3, 2): "right",
}
"""A move on a shortest path, by row and column of the map of 4 x 4 cells."""
LAKE_MOVES = ("left", "down", "right", "up")


def frozen_lake(folder: Path, seed: int) -> TrainingTask:
    """Return the task of walking over a frozen lake, from Gymnasium through its adapter.

    The scripted policy takes a right move half of the time. `folder` gets the script.
    """
    script = folder / "frozen_lake.py"
    script.write_text(ADAPTER_SCRIPT.format(spec=FROZEN_LAKE), encoding="utf-8")

    def conversations(count: int) -> Iterator[Messages]:
        yield from asyncio.run(_walks_over_the_lake(count, random.Random(seed)))

    return TrainingTask(
        settings=DemoSettings(
            seed=seed,
            steps=40,
            groups_per_step=8,
            group_size=16,
            max_tokens=FROZEN_LAKE_TOKENS,
            shape=TinyModelShape(max_length=FROZEN_LAKE_TOKENS),
            task=None,
            environment_door=script,
            environment_sections={
                "env": {
                    "adapter_seed": seed,
                    "max_turns": FROZEN_LAKE_TURNS,
                    "max_turn_tokens": 12,
                    "num_eval_items": NUM_LAKE_GAMES,
                }
            },
        ),
        evaluation={"eval_temperature": 1.0},
        warm_up=WarmUp(steps=100, num_conversations=2_000, batch_size=32),
        conversations=conversations,
        measure=f"fraction of {NUM_LAKE_GAMES} walks that reach the goal",
        value=lambda score: float(score > CORRECT),
        reward=RewardMetric(
            key="train/metric/solved",
            label="fraction of walks that reach the goal",
            summary="{:.0%} of the walks reach the goal",
            limits=(0.0, 1.0),
        ),
    )


async def _walks_over_the_lake(count: int, rng: random.Random) -> list[Messages]:
    adapter = make_adapter(FROZEN_LAKE, {}, seed=0)
    await adapter.open()
    walks = []
    for number in range(count):
        episode = adapter.start({"seed": number})
        assert isinstance(episode, Episode)
        walk = GuardedConversation(episode, where=FROZEN_LAKE, step_timeout_s=60)
        await walk.begin()
        limits = Limits(max_turns=FROZEN_LAKE_TURNS)
        walks.append((await play(walk, _Walker(rng), limits=limits)).messages)
    return walks


class _Walker(_ScriptedPolicy):
    """Reads its cell, in brackets, from the last map of the chat."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(str)
        self._rng = rng

    async def write(self, chat: Sequence[ChatMessage], *, max_tokens: int) -> _Written:
        rows = [line for line in str(chat[-1]["content"]).splitlines() if "[" in line]
        lines = str(chat[-1]["content"]).splitlines()
        move = self._rng.choice(LAKE_MOVES)
        if rows and self._rng.random() < AIMED_MOVES:
            place = len(lines) - lines.index(rows[-1])
            move = LAKE_ROUTE.get((4 - place, rows[-1].index("[")), move)
        return _Written(f"<action>{move}</action>")


SHELL_TASKS = {
    "write-a-word": (
        "Write the word blue to color.txt.",
        {},
        '[ "$(cat color.txt)" = blue ]',
        "echo blue > color.txt",
    ),
    "append-a-line": (
        "Append the line end to list.txt.",
        {"list.txt": "start\n"},
        '[ "$(cat list.txt)" = "$(printf "start\\nend")" ]',
        "echo end >> list.txt",
    ),
    "remove-a-file": (
        "Remove old.txt and keep new.txt.",
        {"old.txt": "old\n", "new.txt": "new\n"},
        '[ ! -e old.txt ] && [ "$(cat new.txt)" = new ]',
        "rm old.txt",
    ),
}
"""Instruction, files, condition of the reward, and a command that earns it, by task."""
SHELL_WORDS = ("blue", "end", "start", "new", "old")
SHELL_FILES = ("color.txt", "list.txt", "new.txt", "old.txt")
SHELL_COMMANDS = ("echo {word} > {file}", "echo {word} >> {file}", "rm {file}")
RIGHT_COMMANDS = 0.35
SHELL_TRIES = 64


def shell_tasks(folder: Path, seed: int) -> TrainingTask:
    """Return three tasks with files, worked on by the agent `shell` with one command.

    The scripted policy writes a right command in a third of the tries, else one of a few words.
    `folder` gets the tasks and the script.
    """
    tasks = folder / "tasks"
    write_shell_tasks(tasks)
    script = folder / "shell_tasks.py"
    script.write_text(ADAPTER_SCRIPT.format(spec=f"tasks:{tasks}"), encoding="utf-8")

    def conversations(count: int) -> Iterator[Messages]:
        rng = random.Random(seed)
        for _ in range(count):
            instruction, _, _, command = rng.choice(list(SHELL_TASKS.values()))
            if rng.random() >= RIGHT_COMMANDS:
                command = rng.choice(SHELL_COMMANDS).format(
                    word=rng.choice(SHELL_WORDS), file=rng.choice(SHELL_FILES)
                )
            yield [
                {"role": "system", "content": SHELL_PROMPT},
                {"role": "user", "content": instruction},
                {"role": "assistant", "content": f"```sh\n{command}\n```"},
            ]

    return TrainingTask(
        settings=DemoSettings(
            seed=seed,
            steps=20,
            groups_per_step=4,
            group_size=8,
            lr=5e-4,
            max_tokens=192,
            task=None,
            environment_door=script,
            environment_sections={
                "env": {
                    "adapter_seed": seed,
                    "adapter_args": {"max_agent_turns": 1, "traces": False},
                    "max_turn_tokens": 32,
                    "num_eval_items": len(SHELL_TASKS),
                }
            },
        ),
        evaluation={"eval_temperature": 1.0, "eval_samples_per_item": SHELL_TRIES},
        warm_up=WarmUp(steps=100, num_conversations=2_000, batch_size=32),
        conversations=conversations,
        measure=f"fraction accepted by the verifier, of {SHELL_TRIES} tries at each of three tasks",
        value=lambda score: float(score > CORRECT),
        reward=RewardMetric(
            key="train/mean_return",
            label="fraction accepted by the verifier",
            summary="{:.0%} of the rollouts are accepted",
            limits=(0.0, 1.0),
        ),
    )


def write_shell_tasks(folder: Path) -> None:
    """Write the task folders; the tests run without the agent's files as programs."""
    for name, (instruction, files, condition, command) in SHELL_TASKS.items():
        content = {
            "task.toml": 'version = "1.0"\n\n[agent]\ntimeout_sec = 30.0\n\n'
            "[verifier]\ntimeout_sec = 30.0\n",
            "instruction.md": f"{instruction}\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n"
            + "".join(f"COPY {path} .\n" for path in files),
            "tests/test.sh": f"if {condition}; then echo 1; else echo 0; fi "
            "> /logs/verifier/reward.txt\n",
            "solution/solve.sh": f"{command}\n",
            **{f"environment/{path}": text for path, text in files.items()},
        }
        for path, text in content.items():
            file = folder / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


TASKS: Mapping[str, Callable[[Path, int], TrainingTask]] = {
    "arithmetic": arithmetic,
    "blackjack": blackjack,
    "frozen_lake": frozen_lake,
    "hangman": hangman,
    "shell_tasks": shell_tasks,
    "tool_calling": tool_calling,
}
"""Functions of a folder and a seed that return a task, by row of the benchmark."""
