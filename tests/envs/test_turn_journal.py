"""The turn journal: format, continuation, limits and refusals."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from atroposlib.adapters.tool_episode import ForeignTool, ToolEpisode, ToolOutcome, ToolQuestion
from atroposlib.api.client import TrajectoryApiClient
from atroposlib.api.settings import ApiSettings
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.conversation import ChatMessage, Conversation, Reply, Turn
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from atroposlib.envs.service_session import EnvSession
from atroposlib.envs.tools import IdempotencyKey, Tool, ToolCall, run_tool_calls
from atroposlib.envs.turn_journal import FORMAT_VERSION, TurnJournal
from atroposlib.errors import ConfigError
from environments.number_guessing import GuessingGame
from environments.word_sums import SumConversation, WordSum
from tests.envs.live_service import LiveService, ScriptedTrainer, until
from tests.fakes import ScriptedEngine

IDENTITY = {"environment": "adding", "max_turns": "a"}
MIB = 2**20
OPENED: list[TurnJournal] = []
"""Journals of the running test, closed after it."""


class Adding(Conversation):
    """Adds the numbers that the policy writes, over four turns; holds the third at a gate."""

    unfinished_reward = -1.0

    def __init__(self, env: AddingEnv, *, has_state: bool = True) -> None:
        self.env = env
        self.total = 0
        self.has_state = has_state

    def opening(self) -> Sequence[ChatMessage]:
        return [{"role": "user", "content": "add"}]

    async def reply(self, turn: Turn) -> Reply:
        self.env.keys.append(turn.key)
        if turn.index == 2:
            self.env.num_held += 1
            await self.env.gate.wait()
        self.total += int(turn.text)
        return Reply(f"={self.total}", reward=float(turn.text), is_done=turn.index == 3)

    def state(self) -> Any:
        return {"total": self.total} if self.has_state else None

    def restore(self, state: Mapping[str, int]) -> None:
        if self.env.breaks_restore:
            raise KeyError("broken")
        self.total = state["total"]


class AddingEnv(MultiTurnEnv):
    name = "adding"
    has_state = True
    breaks_restore = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = asyncio.Event()
        self.keys: list[str] = []
        self.num_held = 0

    async def get_next_item(self) -> int:
        return 1

    def start_conversation(self, item: int) -> Adding:
        return Adding(self, has_state=self.has_state)


@pytest.fixture
async def make_adding(make_env: Callable[..., Any]) -> AsyncIterator[Callable[..., AddingEnv]]:
    make_env()  # puts the character tokenizer in place
    made: list[AddingEnv] = []

    def make(engine: ScriptedEngine, **settings: Any) -> AddingEnv:
        config = MultiTurnEnvConfig(
            use_wandb=False, tokenizer_name="characters", group_size=2, **settings
        )
        server = APIServerConfig(
            model_name="m", base_url=engine.base_url, server_type="vllm", health_check=False
        )
        made.append(AddingEnv(config, server))
        return made[-1]

    yield make
    for env in made:
        await env.server.close()


@pytest.fixture(autouse=True)
async def closed_journals() -> AsyncIterator[None]:
    """Close the journals of a test."""
    OPENED.clear()
    yield
    for journal in OPENED:
        await journal.close()


@pytest.fixture
async def engine() -> Any:
    """Writes the number of characters of the prompt, modulo 7."""
    async with ScriptedEngine(lambda prompt: str(len(prompt) % 7)) as running:
        yield running


async def open_journal(path: Path, *, max_bytes: int = MIB, **identity: str) -> TurnJournal:
    OPENED.append(await TurnJournal.open(path, {**IDENTITY, **identity}, max_bytes=max_bytes))
    return OPENED[-1]


async def roll_out(env: AddingEnv, journal: TurnJournal, item: Any, *, step: int = 0) -> Any:
    async with journal.group(item, step=step, is_dropped=lambda: False):
        rollouts, _ = await env.collect_trajectories(item)
        return await env.postprocess_histories(rollouts)


async def stop_in_third_turn(env: AddingEnv, journal: TurnJournal, item: Any) -> None:
    """End the rollouts as a kill would, while the third turns are answered."""
    rolling = asyncio.create_task(roll_out(env, journal, item))
    await until(lambda: env.num_held == 2)
    rolling.cancel()
    await asyncio.wait({rolling})
    await journal.close()


def num_completions(engine: ScriptedEngine) -> int:
    return sum("return_token_ids" in r.body and "add" in str(r.body) for r in engine.requests)


async def test_group_continues_from_its_last_turns(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    calm = make_adding(engine)
    calm.gate.set()
    rollouts, _ = await calm.collect_trajectories("item")
    wanted = await calm.postprocess_histories(rollouts)
    first, second = make_adding(engine), make_adding(engine)
    path = tmp_path / "turns.sqlite"
    await stop_in_third_turn(first, await open_journal(path), "item")
    num_before = len(engine.requests)
    journal = await open_journal(path)
    second.gate.set()

    group = await roll_out(second, journal, "item")

    assert journal.num_resumed_turns == 6
    assert len(engine.requests) - num_before <= 3  # the last turn of each, and a probe
    assert group == wanted
    assert {key for key in second.keys if key.endswith("-2")} == {
        key for key in first.keys if key.endswith("-2")
    }
    assert not journal.waiting_items()
    assert journal.num_bytes == 0
    await journal.close()


async def test_next_prompt_has_the_ids_of_the_journal(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    first, second = make_adding(engine), make_adding(engine)
    path = tmp_path / "turns.sqlite"
    await stop_in_third_turn(first, await open_journal(path), "item")
    sampled = [r.body["prompt"] for r in engine.requests if isinstance(r.body["prompt"], list)]
    longest = max(sampled, key=len)
    second.gate.set()
    engine.requests.clear()

    await roll_out(second, await open_journal(path), "item")

    [prompt, _] = [
        r.body["prompt"] for r in engine.requests if len(r.body["prompt"]) > len(longest)
    ]
    assert prompt[: len(longest)] == longest


async def test_group_that_was_not_sent_is_kept_with_its_scores(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    first, second = make_adding(engine), make_adding(engine)
    first.gate.set()
    path = tmp_path / "turns.sqlite"
    journal = await open_journal(path)
    with pytest.raises(asyncio.CancelledError):
        await play_and_stop(first, journal)
    await journal.close()
    engine.requests.clear()

    group = await roll_out(second, await open_journal(path), "item")

    assert not [r for r in engine.requests if r.body.get("return_token_ids")]
    assert second.keys == []
    assert group["scores"][0] == group["scores"][1] > 0


async def play_and_stop(env: AddingEnv, journal: TurnJournal) -> None:
    """Play both rollouts of the item, but end before the group is sent."""
    async with journal.group("item", step=0, is_dropped=lambda: False):
        await env.collect_trajectories("item")
        raise asyncio.CancelledError


async def test_conversation_without_state_starts_again(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    first, second = make_adding(engine), make_adding(engine)
    first.has_state = second.has_state = False
    path = tmp_path / "turns.sqlite"
    await stop_in_third_turn(first, await open_journal(path), {"question": "item"})
    journal = await open_journal(path)
    waiting = journal.waiting_items()
    second.gate.set()

    group = await roll_out(second, journal, {"question": "item"})

    assert waiting == [{"question": "item"}]
    assert journal.num_resumed_turns == 0
    assert len(second.keys) == 8
    assert len(group["scores"]) == 2


async def test_attribute_state_of_earlier_conversations_is_not_called(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    env = make_adding(engine)
    env.gate.set()
    conversation = Adding(env, has_state=False)
    vars(conversation)["state"] = 17
    env.start_conversation = lambda item: conversation  # type: ignore[method-assign]
    env.config.group_size = 1

    group = await roll_out(env, await open_journal(tmp_path / "turns.sqlite"), "item")

    assert len(group["scores"]) == 1


@pytest.mark.parametrize("reason", ["restore raises", "earlier step"])
async def test_turns_that_cannot_be_used_are_played_again(
    reason: str, make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    first, second = make_adding(engine), make_adding(engine)
    path = tmp_path / "turns.sqlite"
    journal = await open_journal(path)
    rolling = asyncio.create_task(roll_out(first, journal, "item", step=5))
    await until(lambda: first.num_held == 2)
    rolling.cancel()
    await asyncio.wait({rolling})
    await journal.close()
    second.breaks_restore = reason == "restore raises"
    second.gate.set()

    await roll_out(
        second, await open_journal(path), "item", step=4 if reason == "earlier step" else 5
    )

    assert len(second.keys) == 8
    assert not set(second.keys) & set(first.keys)


async def test_rollout_above_the_limit_is_played_without_the_journal(
    make_adding: Callable[..., AddingEnv],
    engine: ScriptedEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = make_adding(engine)
    env.gate.set()
    journal = await open_journal(tmp_path / "turns.sqlite", max_bytes=600)

    group = await roll_out(env, journal, "item")

    assert len(group["scores"]) == 2
    assert "is full" in caplog.text
    assert journal.num_bytes == 0


async def test_failing_file_ends_the_journal_and_not_the_rollout(
    make_adding: Callable[..., AddingEnv],
    engine: ScriptedEngine,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = make_adding(engine)
    env.gate.set()
    path = tmp_path / "turns.sqlite"
    journal = await open_journal(path)
    journal._connection.execute("DROP TABLE turns")

    group = await roll_out(env, journal, "item")

    assert len(group["scores"]) == 2
    assert not journal.is_usable
    assert "cannot be written" in caplog.text


async def test_siblings_that_run_one_after_the_other_are_all_kept(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    first, second = make_adding(engine), make_adding(engine)
    first.gate.set()
    second.gate.set()
    for env in (first, second):
        journal = await open_journal(tmp_path / "turns.sqlite")
        with pytest.raises(asyncio.CancelledError):
            await play_two_and_stop(env, journal)
        await journal.close()

    assert len(set(first.keys)) == 8
    assert second.keys == []


async def play_two_and_stop(env: AddingEnv, journal: TurnJournal) -> None:
    async with journal.group("item", step=0, is_dropped=lambda: False):
        for _ in range(2):
            await env.collect_trajectory("item")
        raise asyncio.CancelledError


async def test_restarted_straggler_has_other_keys(
    make_adding: Callable[..., AddingEnv], engine: ScriptedEngine, tmp_path: Path
) -> None:
    env = make_adding(engine)
    env.config.group_size = 1
    journal = await open_journal(tmp_path / "turns.sqlite")
    async with journal.group("item", step=0, is_dropped=lambda: False):
        first = asyncio.create_task(env.collect_trajectory("item"))
        await until(lambda: env.num_held == 1)
        first.cancel()
        await asyncio.wait({first})
        env.gate.set()

        await env.collect_trajectory("item")

    assert len(set(env.keys)) == 3 + 4


async def test_time_limit_while_a_turn_is_written_keeps_the_turns_before(
    make_adding: Callable[..., AddingEnv],
    engine: ScriptedEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = make_adding(engine, conversation_timeout_s=2)
    journal = await open_journal(tmp_path / "turns.sqlite")
    write = journal.write

    async def hold_second_turn(*operations: Any) -> None:
        if any("INTO turns" in statement and values[-1] == 1 for statement, values in operations):
            await asyncio.Event().wait()
        await write(*operations)

    monkeypatch.setattr(journal, "write", hold_second_turn)

    group = await roll_out(env, journal, "item")

    assert len(group["scores"]) == 2
    for masks, advantages in zip(group["masks"], group["advantages"], strict=True):
        assert len(masks) == len(advantages)
        assert masks[-1] == -100 or advantages[-1] == 0.0


@pytest.mark.parametrize("is_known", [False, True])
async def test_group_cancelled_while_it_is_taken_is_taken_again(
    tmp_path: Path, is_known: bool
) -> None:
    journal = await open_journal(tmp_path / "turns.sqlite")

    async def enter(*, stops: bool) -> str:
        async with journal.group("item", step=0, is_dropped=lambda: False) as group:
            assert group is not None
            if stops:
                raise asyncio.CancelledError
            return group.group_id

    if is_known:
        with pytest.raises(asyncio.CancelledError):
            await enter(stops=True)
    entering = asyncio.create_task(enter(stops=True))
    await asyncio.sleep(0)
    entering.cancel()
    await asyncio.wait({entering})

    assert journal.waiting_items() == ["item"]
    await enter(stops=False)
    await journal.close()
    assert (await open_journal(tmp_path / "turns.sqlite")).waiting_items() == []


async def test_expired_group_is_deleted(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path / "turns.sqlite")

    with pytest.raises(asyncio.CancelledError):
        async with journal.group("item", step=0, is_dropped=lambda: True):
            raise asyncio.CancelledError

    assert journal.waiting_items() == []
    await journal.close()
    assert (await open_journal(tmp_path / "turns.sqlite")).waiting_items() == []


async def test_delivery_keys_are_the_same_after_a_restart(tmp_path: Path) -> None:
    keys = []

    async def stop_after_two_deliveries(journal: TurnJournal) -> None:
        async with journal.group({"a": 1}, step=0, is_dropped=lambda: False) as group:
            assert group is not None
            keys.append([group.delivery_key(), group.delivery_key()])
            raise asyncio.CancelledError

    for _ in range(2):
        journal = await open_journal(tmp_path / "turns.sqlite")
        with pytest.raises(asyncio.CancelledError):
            await stop_after_two_deliveries(journal)
        await journal.close()

    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 2


async def test_replicas_with_their_own_journals_lose_no_group(
    service: LiveService, tmp_path: Path
) -> None:
    service.start()
    row = {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        for replica in ("a", "b"):
            session = EnvSession(TrajectoryApiClient(service.url), retry_s=0.01)
            known = await session.client.register_env(
                max_token_length=64, desired_name="e", weight=1.0, group_size=4
            )
            session.enter(known["env_id"])
            journal = await open_journal(tmp_path / replica)
            async with journal.group("the same item", step=0, is_dropped=lambda: False) as group:
                assert group is not None
                await session.send(row, key=group.delivery_key())
            await session.leave(timeout_s=5)

        await asyncio.wait_for(trainer.train(2), 60)

        assert len(trainer.groups) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_turns": "b"}, "another max_turns"),
        ({"environment": "other"}, "another environment"),
    ],
)
async def test_journal_of_another_run_is_refused(
    change: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "turns.sqlite"
    await (await open_journal(path)).close()

    with pytest.raises(ConfigError, match=message):
        await open_journal(path, **change)


async def test_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "turns.sqlite"
    await (await open_journal(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    connection.close()

    with pytest.raises(ConfigError, match="has format"):
        await open_journal(path)


async def test_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (balance INTEGER)")
    connection.close()

    with pytest.raises(ConfigError, match="expected a turn journal"):
        await open_journal(path)


async def test_database_of_another_program_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text)")
    connection.close()
    before = path.read_bytes()

    with pytest.raises(ConfigError, match="expected a turn journal"):
        await open_journal(path, **IDENTITY)

    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE turns",
        "UPDATE identity SET content = x'9101'",
        "INSERT INTO groups VALUES (1, 'g', 'text', 0)",
        "INSERT INTO groups VALUES (1, 'g', x'c1', 0)",
        "INSERT INTO groups VALUES (1, 'g', x'01', 'text')",
    ],
)
async def test_journal_with_rows_that_cannot_be_read_is_set_aside(
    tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "turns.sqlite"
    await (await open_journal(path, **IDENTITY)).close()
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()

    journal = await open_journal(path, **IDENTITY)

    assert journal.waiting_items() == []
    assert (tmp_path / "turns.sqlite.damaged").exists()


async def test_open_journal_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.envs.turn_journal.LOCK_S", 0.01)
    journal = await open_journal(tmp_path / "turns.sqlite")

    with pytest.raises(ConfigError, match="no other environment"):
        await open_journal(tmp_path / "turns.sqlite")

    await journal.close()


@pytest.mark.parametrize("damage", ["text", "page"])
async def test_damaged_journal_is_set_aside(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "turns.sqlite"
    await (await open_journal(path)).close()
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xff" * 4096
    path.write_bytes(b"not a database" * 500 if damage == "text" else content)

    with caplog.at_level(logging.WARNING):
        journal = await open_journal(path)

    assert journal.waiting_items() == []
    assert "is damaged" in caplog.text
    assert (tmp_path / "turns.sqlite.damaged").exists()
    await journal.close()


async def test_group_of_an_earlier_registration_is_stored_once(service: LiveService) -> None:
    service.start()
    group = {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        for _ in range(2):
            session = EnvSession(TrajectoryApiClient(service.url), retry_s=0.01)
            known = await session.client.register_env(
                max_token_length=64, desired_name="e", weight=1.0, group_size=4
            )
            session.enter(known["env_id"])

            await session.send(group, key="group-1")

            assert session.num_groups_sent == 1
            await session.leave(timeout_s=5)
        await trainer.train(1)

        assert await trainer.client.batch() is None


async def test_ticket_of_a_group_that_an_earlier_process_sent_is_returned(
    service: LiveService,
) -> None:
    service.start(ApiSettings(ordered_envs=1))
    group = {"tokens": [[1, 2]] * 4, "masks": [[-100, 2]] * 4, "scores": [0.0, 1.0, 0.0, 1.0]}
    async with ScriptedTrainer(service.url) as trainer:
        await trainer.register()
        for keys in (["group-1"], ["group-1", "group-2"]):
            session = EnvSession(TrajectoryApiClient(service.url), retry_s=0.01)
            known = await session.client.register_env(
                max_token_length=64, desired_name="e", weight=1.0, group_size=4
            )
            session.enter(known["env_id"], first_ticket=known["first_ticket"])
            for key in keys:
                with session.numbered_rollout():
                    await session.send(group, key=key)
            if len(keys) == 1:
                await session.leave(timeout_s=5)

        # The second group would wait for the ticket of the first.
        await asyncio.wait_for(trainer.train(2), 60)

        assert len(trainer.groups) == 2
        await session.leave(timeout_s=5)


async def test_key_of_a_call_is_hidden_from_the_model_and_ends_in_its_number() -> None:
    def book(seat: int, key: IdempotencyKey) -> str:
        """Book a seat."""
        return f"{seat} {key}"

    tool = Tool.of(book)

    results = await run_tool_calls(
        [ToolCall(name="book", arguments={"seat": seat}) for seat in (7, 8)],
        [tool],
        timeout_s=5,
        key="rollout-3",
    )

    assert list(tool.definition()["function"]["parameters"]["properties"]) == ["seat"]
    assert [result.content for result in results] == ["7 rollout-3-0", "8 rollout-3-1"]


async def test_shipped_game_continues_as_it_was() -> None:
    game, other = (GuessingGame(42, highest=100, max_turns=10) for _ in range(2))
    await game.reply(Turn("<guess>50</guess>", 0, ()))

    other.restore(game.state())

    turn = Turn("<guess>25</guess>", 1, ())
    assert await other.reply(turn) == await game.reply(turn)
    assert other.unfinished_reward == game.unfinished_reward


async def test_shipped_tools_continue_as_they_were() -> None:
    sums, other = (SumConversation(WordSum(1, 2, 3)) for _ in range(2))
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    await sums.reply(Turn(call, 0, ()))

    other.restore(sums.state())

    assert other.results == sums.results


class KeyedEpisode(ToolEpisode):
    """Returns the key of each call."""

    async def open_session(self) -> ToolQuestion:
        return ToolQuestion([{"role": "user", "content": "ask"}], [ForeignTool("ask", "Ask.")])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolOutcome:
        return ToolOutcome(self.call_key)

    async def finish(self, turn: Turn) -> Reply:
        return Reply(is_done=True)


async def test_calls_of_an_adapter_have_keys() -> None:
    episode = KeyedEpisode()
    await episode.begin()
    call = '<tool_call>{"name": "ask", "arguments": {}}</tool_call>'

    reply = await episode.reply(Turn(call * 2, 3, (), key="rollout-3"))

    assert re.findall(r"rollout-3-\d", str(reply.messages)) == ["rollout-3-0", "rollout-3-1"]
