"""`nemo-gym`: resource servers that come with NeMo Gym, played with exact tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.adapters.interface import Adapter
from atroposlib.adapters.nemo_gym import opening_messages
from atroposlib.adapters.registry import make_adapter
from atroposlib.envs.conversation import Turn
from atroposlib.errors import (
    ConfigError,
    EpisodeConnectionError,
    EpisodeFailedError,
    EpisodeRewardError,
)
from atroposlib.scored_data import check_group
from example_trainer.processes import find_free_port
from tests.adapters.remote_servers import (
    Server,
    at_engine,
    roll_out,
    run_command,
    run_page,
    stand_in_tokenizers,
    text_of,
)
from tests.fakes import ScriptedEngine
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

pytest.importorskip("nemo_gym", reason="needs nemo-gym==0.4.0 and Python 3.12")
pytestmark = pytest.mark.slow

MODULE = "tests.adapters.serve_nemo"
USER = {"input": [{"role": "user", "content": "go"}]}


def function(name: str, *arguments: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": "",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {argument: {"type": "integer"} for argument in arguments},
            "required": list(arguments),
            "additionalProperties": False,
        },
    }


COUNTER_TOOLS = [function("increment_counter", "count"), function("get_counter_value")]
COUNTER = {
    "responses_create_params": {**USER, "tools": COUNTER_TOOLS},
    "initial_count": 3,
    "expected_count": 6,
}
FOLLOW = {
    "responses_create_params": USER,
    "follow_ups": ["second question", "third question"],
    "expected_answer": "Eiffel",
}
WEATHER = {
    "responses_create_params": {**USER, "tools": []},
    "verifier_metadata": {"expected_city": "Paris"},
}
CALLS = {
    "responses_create_params": {**USER, "tools": [function("look_up", "number")]},
    "expected_call": {"name": "look_up", "arguments": {"number": 7}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODULE, find_free_port()).running() as running:
        yield running


@pytest.fixture(autouse=True)
def _tokenizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_tokenizers(monkeypatch)
    monkeypatch.chdir(tmp_path)


def write_tasks(*rows: Any) -> str:
    """Write `tasks.jsonl` to the current folder and return its name."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path("tasks.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "tasks.jsonl"


async def opened(
    url: str, *rows: Any, step_timeout_s: float = 30.0, seed: int = 1, **args: Any
) -> Adapter:
    settings = {"tasks": write_tasks(*rows), **args}
    adapter = make_adapter(f"nemo-gym:{url}", settings, seed=seed, step_timeout_s=step_timeout_s)
    await adapter.open()
    return adapter


def turn(text: str) -> Turn:
    return Turn(text, 0, [])


def call(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


async def begun(adapter: Adapter, item: dict[str, Any]) -> Any:
    episode: Any = adapter.start(item)
    await episode.begin()
    return episode


async def test_items_are_rows_in_an_order_of_the_seed(server: Server) -> None:
    rows = [{**COUNTER, "expected_count": count} for count in range(4)]
    adapters = [await opened(f"{server.url}/counter", *rows, seed=seed) for seed in (1, 1, 2)]

    orders: list[Any] = [[] for _ in adapters]
    for order, adapter in zip(orders, adapters, strict=True):
        order += [(await adapter.item(i))["expected_count"] for i in range(8)]
    evaluated = await adapters[0].eval_items(2)
    for adapter in adapters:
        await adapter.close()

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:4]) == sorted(orders[0][4:]) == [0, 1, 2, 3]
    assert evaluated == rows[:2]


async def test_episode_scripted_policy_reaches_a_known_reward(server: Server) -> None:
    replies = [
        "ok",
        "I add. " + call("increment_counter", count=3),
        call("increment_counter", count="many") + "<tool_call>{</tool_call>",
        call("get_counter_value"),
        "done",
    ]
    async with ScriptedEngine(replies) as engine:
        args = {"tasks": write_tasks(COUNTER)}
        env = at_engine(f"nemo-gym:{server.url}/counter", engine, args, group_size=1)
        try:
            await env.setup()
            rollouts, _ = await env.collect_trajectories(COUNTER)
            group = await env.postprocess_histories(rollouts)
        finally:
            await env.close()

    [rollout] = rollouts
    texts = [message["content"] for message in rollout.messages]
    assert '"name": "increment_counter"' in texts[0]
    assert r'"content": "{\"success\":true}"' in texts[3]
    assert "valid integer" in texts[5]
    assert "must be a JSON object" in texts[5]
    assert r'"content": "{\"count\":6}"' in texts[7]
    assert rollout.rewards == [0.0, 0.0, 0.0, 1.0]
    assert rollout.metrics == {"tool_calls": 4, "failed_tool_calls": 2}
    check_group(group)
    trained = [t for t, m in zip(group["tokens"][0], group["masks"][0], strict=True) if m != -100]
    assert "I add." in text_of(trained)
    assert "success" not in text_of(trained)


async def test_group_members_have_sessions_of_their_own(server: Server) -> None:
    replies = [call("increment_counter", count=3)]

    def policy(prompt: str) -> str:
        return "done" if "success" in prompt else replies[0]

    async with ScriptedEngine(policy) as engine:
        args = {"tasks": write_tasks(COUNTER)}
        env = at_engine(f"nemo-gym:{server.url}/counter", engine, args, group_size=4)
        try:
            await env.setup()
            group = await roll_out(env, COUNTER)
        finally:
            await env.close()

    assert group["scores"] == [1.0] * 4  # a shared counter would be at 15


async def test_reward_components_become_named_parts(server: Server) -> None:
    adapter = await opened(f"{server.url}/calls", CALLS)
    right, wrong = await begun(adapter, CALLS), await begun(adapter, CALLS)

    first = await right.reply(turn(call("look_up", number=7)))
    reward = await right.truncated()
    wrong_reply = await wrong.reply(turn("7"))
    for episode in (right, wrong):
        await episode.close()
    await adapter.close()

    assert not first.is_done
    assert '"error"' in first.messages  # the server has no such route
    assert reward == {"correctness": 1.0, "schema_valid": 1.0, "format": 1.0}
    assert wrong_reply.reward == {"correctness": 0.0, "schema_valid": 0.0, "format": 0.0}


async def test_tools_over_mcp_belong_to_the_session(server: Server) -> None:
    adapter = await opened(f"{server.url}/weather", WEATHER)
    episode: Any = adapter.start(WEATHER)

    opening = await episode.begin()
    first = await episode.reply(turn(call("get_weather", city="Paris")))
    last = await episode.reply(turn("The weather in Paris is sunny and 72 F."))
    await episode.close()
    await adapter.close()

    assert '"name": "get_weather"' in opening[0]["content"]
    assert "session_id" not in opening[0]["content"]
    assert "sunny and 72 F" in first.messages
    assert (last.reward, last.is_done) == (1.0, True)
    assert episode.metrics["tool_call_seen"] == 1.0


async def test_gymnasium_style_is_played_with_steps(server: Server) -> None:
    async with ScriptedEngine(["ok", "Paris", "2 million", "the Eiffel tower"]) as engine:
        args = {"tasks": write_tasks(FOLLOW)}
        env = at_engine(f"nemo-gym:{server.url}/follow", engine, args, group_size=1)
        try:
            await env.setup()
            rollouts, _ = await env.collect_trajectories(FOLLOW)
        finally:
            await env.close()

    [rollout] = rollouts
    texts = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert texts == ["go", "second question", "third question"]
    assert rollout.rewards == [0.0, 0.0, 1.0]
    assert rollout.metrics == {"truncated": 0.0, "steps": 3.0}


async def test_gymnasium_style_observation_of_reset_is_shown_and_session_ends(
    server: Server,
) -> None:
    row = {"responses_create_params": USER}
    adapter = await opened(f"{server.url}/cards", row)
    before = server.sessions()
    episode: Any = adapter.start(row)

    opening = await episode.begin()
    during = server.sessions()
    reply = await episode.reply(turn("<think>stand?</think><action>stand</action>"))
    await episode.close()
    await adapter.close()

    assert opening[-1]["content"].startswith("Your hand:")
    assert reply.is_done
    assert reply.reward in (-1.0, 0.0, 1.0)
    assert during == (before or 0) + 1
    assert server.sessions() == before


async def test_thinking_is_a_reasoning_item_and_not_part_of_the_text(server: Server) -> None:
    adapter = await opened(f"{server.url}/follow", FOLLOW)
    episode = await begun(adapter, {**FOLLOW, "follow_ups": []})

    reply = await episode.reply(turn("<think>Eiffel?</think>no idea"))
    kinds = [item["type"] for item in episode._session.output]
    await episode.close()
    await adapter.close()

    assert reply.reward == 0.0
    assert kinds == ["reasoning", "message"]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("raise", EpisodeFailedError, "unlucky"),
        ("none", EpisodeRewardError, "no reward"),
        ("nan", EpisodeRewardError, "nan"),
        ("text", EpisodeFailedError, "expected JSON"),
    ],
)
async def test_verify_broken_server_is_named(
    server: Server, how: str, error: type[Exception], text: str
) -> None:
    row = {"responses_create_params": USER, "how": how}
    adapter = await opened(f"{server.url}/broken", row)
    episode = await begun(adapter, row)

    with pytest.raises(error, match=text):
        await episode.reply(turn("x"))
    await episode.close()
    await adapter.close()


async def test_verify_that_hangs_times_out_and_others_go_on(server: Server) -> None:
    row = {"responses_create_params": USER, "how": "hang"}
    async with ScriptedEngine(["x"]) as engine:
        args = {"tasks": write_tasks(row)}
        env = at_engine(
            f"nemo-gym:{server.url}/broken", engine, args, step_timeout_s=4.0, episode_retries=0
        )
        try:
            await env.setup()
            with pytest.raises(TimeoutError):
                await env.collect_trajectories(row)
            group = await roll_out(env, {**row, "how": "right"})
        finally:
            await env.close()

    assert group["scores"] == [1.0, 1.0]


async def test_server_restart_fails_the_episode_and_the_next_one_works(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        adapter = await opened(f"{server.url}/counter", COUNTER)
        episode = await begun(adapter, COUNTER)
        await episode.reply(turn(call("increment_counter", count=3)))

        server.kill()
        await asyncio.to_thread(server.start)
        # The restarted server takes the old cookie and counts from 0.
        with pytest.raises(EpisodeConnectionError, match="was away during the episode"):
            await episode.reply(turn("done"))
        await episode.close()
        again = await begun(adapter, COUNTER)
        await again.reply(turn(call("increment_counter", count=3)))
        reply = await again.reply(turn("done"))
        await again.close()
        await adapter.close()

        assert reply.reward == 1.0


async def test_server_restart_repeats_the_rollout(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        restarted: list[bool] = []

        def policy(prompt: str) -> str:
            if "success" not in prompt:
                return call("increment_counter", count=3)
            if not restarted:
                restarted.append(True)
                server.kill()
            return "done"

        async def start_again() -> None:
            while not restarted:  # noqa: ASYNC110 - set by the engine
                await asyncio.sleep(0.05)
            await asyncio.to_thread(server.start)

        async with ScriptedEngine(policy) as engine:
            args = {"tasks": write_tasks(COUNTER), "reconnect_s": 300}
            env = at_engine(
                f"nemo-gym:{server.url}/counter", engine, args, group_size=1, step_timeout_s=300
            )
            try:
                await env.setup()
                starting = asyncio.ensure_future(start_again())
                group = await roll_out(env, COUNTER)
                await starting
                failures = dict(env.failure_counts)
            finally:
                await env.close()

        assert group["scores"] == [1.0]
        assert failures == {"EpisodeConnectionError": 1}


async def test_half_open_connection_times_out(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        adapter = await opened(f"{server.url}/counter", COUNTER, step_timeout_s=4.0)
        episode = await begun(adapter, COUNTER)

        server.pause()
        with pytest.raises(TimeoutError):
            await episode.reply(turn("done"))
        server.resume()
        await episode.close()
        await adapter.close()


@pytest.mark.parametrize(
    ("path", "rows", "text"),
    [
        ("/absent", [COUNTER], "not a resource server"),
        ("/counter", [FOLLOW], "no field 'initial_count'"),
        ("/counter", [], "has no rows"),
        ("/counter", ["{"], "row 1: not JSON"),
        ("/counter", ["[" * 100_000], "row 1: not JSON"),
        ("/counter", [{"expected_count": 1}], "expected a JSON object with responses_create_p"),
        ("/counter", [{"responses_create_params": {"input": []}}], "expected a text or a list"),
        (
            "/counter",
            [{"responses_create_params": {**USER, "tools": [function("verify")]}}],
            "names are not",
        ),
        (
            "/counter",
            [{"responses_create_params": {"input": [{"role": "user", "content": [{}]}]}}],
            "content other than text",
        ),
    ],
)
async def test_open_what_cannot_work_is_refused(
    server: Server, path: str, rows: list[Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await opened(server.url + path, *rows)


async def test_open_unreachable_server_is_tried_again_for_a_while(free_port: int) -> None:
    with pytest.raises(EpisodeConnectionError, match=r"no connection in \d+ attempts"):
        await opened(f"http://127.0.0.1:{free_port}", COUNTER, reconnect_s=0.5)


def test_arguments_without_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="tasks"):
        make_adapter("nemo-gym:http://127.0.0.1:1", {}, seed=0)


def test_opening_messages_of_earlier_calls_and_parts() -> None:
    params = {
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "No jokes."},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"text": "b"}]},
            {"type": "function_call", "name": "look", "arguments": '{"x": 1}', "call_id": "1"},
            {"type": "function_call_output", "output": "seen", "call_id": "1"},
        ],
    }

    messages = opening_messages(params, "row 1")

    assert messages == [
        {"role": "system", "content": "Be brief.\n\nNo jokes."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\nseen\n</tool_response>"},
    ]


def test_nested_arguments_of_an_earlier_call_are_text() -> None:
    call = {"type": "function_call", "name": "look", "arguments": "[" * 100_000}

    [message] = opening_messages({"input": [call]}, "row 1")

    assert call["arguments"] in message["content"]


def test_check_passes(server: Server, tmp_path: Path) -> None:
    for path, row in (("counter", COUNTER), ("follow", FOLLOW)):
        flags = ["--args", f"tasks={write_tasks(row)}"]
        done = run_command(f"nemo-gym:{server.url}/{path}", "check", *flags, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1200)
async def test_page_every_command_works(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("qwen2_5")
    model, replies = FOLDER / "qwen2_5", [call("increment_counter", count=3), "done"]
    async with ScriptedEngine(replies, tokenizer=tokenizer, model=str(model)) as engine:
        output = await run_page("docs/adapters/nemo_gym.md", tmp_path, engine, model)

    assert "nothing left running" in output
    groups = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert len(groups) >= 2
    for group in groups:
        check_group(json.loads(group))
    assert "eval/mean_return" in output
