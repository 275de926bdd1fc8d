"""Measure what the turn journal adds to a turn, compared with the same rollouts without it.

Usage: python benchmarks/turn_journal.py [--rollouts 64] [--turns 10] [--json FILE]

Conversations on a stand-in engine that answers at once, so only our own work is measured: prompt,
recording of the tokens, and the journal. A turn has a prompt of 64 tokens and a completion; the
state of the conversation has 200 bytes. Rollouts run in turn, or all at once; then turns that end
together share a transaction. `added` is the difference to the row without a journal,
elapsed and as processor time (CPU); `restored` is the time to repeat a saved turn after a restart.
`ratio` compares the processor times with and without the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from atroposlib.envs.checks.scripted_model import CharTokenizer
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import Limits, play
from atroposlib.envs.policies import TokenPolicy
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.turn_journal import JournaledGroup, TurnJournal

OBSERVATION = "o" * 60
STATE = {"board": "x" * 180}
REPEATS = 5
LIMITS = Limits(max_turns=1000, max_tokens=10_000_000, max_turn_tokens=1_000_000)


class InstantEngine:
    """Answers with the same completion."""

    config = SimpleNamespace(model_name="instant", base_url=None)

    def __init__(self, num_tokens: int) -> None:
        self._ids = [ord("a") + i % 20 for i in range(num_tokens - 1)] + [
            CharTokenizer().eos_token_id
        ]
        self._logprobs = [-0.1 - i / 997 for i in range(num_tokens)]

    async def tokens_and_logprobs_completion(self, **request: Any) -> Any:
        return list(request["input_ids"]), [list(self._ids)], [list(self._logprobs)], ["stop"]


class Game(Conversation):
    """Ends after a number of turns."""

    def __init__(self, num_turns: int) -> None:
        self._num_turns = num_turns
        self._state: Mapping[str, str] = STATE

    def opening(self) -> Sequence[ChatMessage]:
        return [{"role": "user", "content": OBSERVATION}]

    async def reply(self, turn: Turn) -> Reply:
        return Reply(OBSERVATION, reward=0.1, is_done=turn.index + 1 == self._num_turns)

    def state(self) -> Mapping[str, str]:
        return self._state

    def restore(self, state: Mapping[str, str]) -> None:
        self._state = state


class Case(NamedTuple):
    """One row of the table."""

    num_tokens: int
    """Tokens of a completion."""
    is_concurrent: bool


class Timing(NamedTuple):
    """Seconds of one run."""

    elapsed_s: float
    cpu_s: float


class Figure(NamedTuple):
    """Microseconds per turn."""

    case: Case
    plain_us: float
    plain_cpu_us: float
    added_us: float
    added_cpu_us: float
    restored_cpu_us: float
    bytes_per_turn: float
    ratio: float
    """Processor time with the journal, divided by that without."""


async def play_once(case: Case, num_turns: int, group: JournaledGroup | None) -> None:
    """Play one conversation, in a group of a journal or without."""
    tokenizer = CharTokenizer()
    policy = TokenPolicy(ManagedServer(InstantEngine(case.num_tokens), tokenizer), tokenizer)
    if group is None:
        await play(Game(num_turns), policy, limits=LIMITS)
        return
    async with group.rollout(lambda: Game(num_turns), policy) as record:
        rollout = await play(record.conversation, record.policy, limits=LIMITS)
        await record.note_ending(rollout.outcome)


async def play_all(case: Case, options: argparse.Namespace, group: JournaledGroup | None) -> Timing:
    """Play all conversations, and return how long it took."""
    began, cpu = time.perf_counter(), time.process_time()
    rollouts = [play_once(case, options.turns, group) for _ in range(options.rollouts)]
    if case.is_concurrent:
        await asyncio.gather(*rollouts)
    else:
        for rollout in rollouts:
            await rollout
    return Timing(time.perf_counter() - began, time.process_time() - cpu)


class Journaled(NamedTuple):
    """Timings with a journal."""

    first: Timing
    restored: Timing
    num_bytes: int


async def play_journaled(case: Case, options: argparse.Namespace, path: Path) -> Journaled:
    """Play with a journal, then again from its rows."""
    timings = []
    num_bytes = 0
    for _ in range(2):
        journal = await TurnJournal.open(path, {}, max_bytes=2**40)
        try:
            async with journal.group("item", step=0, is_dropped=lambda: False) as group:
                timings.append(
                    await play_all(
                        case._replace(is_concurrent=True) if timings else case, options, group
                    )
                )
                num_bytes = num_bytes or journal.num_bytes
                raise asyncio.CancelledError  # as a kill: the rows stay
        except asyncio.CancelledError:
            await journal.close()
    return Journaled(timings[0], timings[1], num_bytes)


async def measure(case: Case, options: argparse.Namespace, folder: Path) -> Figure:
    """Return the figures of the fastest of alternating runs."""
    plain, first, restored, num_bytes = [], [], [], 0
    for number in range(REPEATS):
        plain.append(await play_all(case, options, None))
        path = folder / f"{case.num_tokens}_{case.is_concurrent}_{number}.sqlite"
        journaled = await play_journaled(case, options, path)
        first.append(journaled.first)
        restored.append(journaled.restored)
        num_bytes = journaled.num_bytes
    before, after, again = (fastest(timings) for timings in (plain, first, restored))
    num_turns = options.rollouts * options.turns
    per_turn = 1e6 / num_turns
    return Figure(
        case,
        before.elapsed_s * per_turn,
        before.cpu_s * per_turn,
        (after.elapsed_s - before.elapsed_s) * per_turn,
        (after.cpu_s - before.cpu_s) * per_turn,
        again.cpu_s * per_turn,
        num_bytes / num_turns,
        after.cpu_s / before.cpu_s,
    )


def fastest(timings: Sequence[Timing]) -> Timing:
    """Return the smallest elapsed time and the smallest processor time."""
    return Timing(min(t.elapsed_s for t in timings), min(t.cpu_s for t in timings))


def table_of(figures: Sequence[Figure]) -> Table:
    """Return a row for each case."""
    columns = (
        "tokens",
        "rollouts",
        "plain",
        "CPU",
        "added",
        "CPU",
        "restored CPU",
        "bytes",
        "ratio",
    )
    table = Table(*columns, title="one turn, in microseconds")
    for figure in figures:
        mode = "at once" if figure.case.is_concurrent else "in turn"
        values = [f"{value:,.0f}" for value in figure[1:-1]]
        table.add_row(str(figure.case.num_tokens), mode, *values, f"{figure.ratio:.2f}")
    return table


async def run(options: argparse.Namespace) -> list[Figure]:
    """Measure all cases."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for num_tokens in (32, 256, 2048):
            for is_concurrent in (False, True):
                case = Case(num_tokens, is_concurrent)
                figures.append(await measure(case, options, Path(folder)))
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    Console().print(table_of(figures))
    if options.json is not None:
        rows = [{**figure._asdict(), "case": figure.case._asdict()} for figure in figures]
        options.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
