"""`openenv`: environments of a real OpenEnv server, played with exact tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web

from atroposlib.adapters.interface import Adapter
from atroposlib.adapters.openenv import Progress, _tool_result, _value_schema
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
    ROOT,
    Server,
    at_engine,
    roll_out,
    run_command,
    run_page,
    spawn_rollouts,
    stand_in_tokenizers,
    text_of,
)
from tests.fakes import ScriptedEngine
from tests.first_hour.blocks import blocks_of
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

pytest.importorskip("openenv", reason="needs pip install '.[openenv]'")
pytestmark = pytest.mark.slow

MODULE = "tests.adapters.serve_openenv"
ANSWER = "<action>{}</action>"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODULE, find_free_port()).running() as running:
        yield running


@pytest.fixture(autouse=True)
def _tokenizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_tokenizers(monkeypatch)
    monkeypatch.chdir(tmp_path)


async def opened(url: str, *, step_timeout_s: float = 30.0, seed: int = 1, **args: Any) -> Adapter:
    adapter = make_adapter(
        f"openenv:{url}", {"max_concurrent": 2, **args}, seed=seed, step_timeout_s=step_timeout_s
    )
    await adapter.open()
    return adapter


def turn(text: str) -> Turn:
    return Turn(text, 0, [])


async def begun(adapter: Adapter, item: dict[str, Any]) -> Any:
    episode: Any = adapter.start(item)
    await episode.begin()
    return episode


async def test_items_same_seed_are_equal(server: Server) -> None:
    adapters = [await opened(f"{server.url}/guess", seed=seed) for seed in (1, 1, 2)]

    items: list[Any] = [[] for _ in adapters]
    for drawn, adapter in zip(items, adapters, strict=True):
        drawn += [await adapter.item(i) for i in range(5)]

    assert items[0] == items[1]
    assert items[0] != items[2]
    assert all(set(item) == {"seed", "reset"} for item in items[0])


async def test_items_of_tasks_cover_the_split_and_evaluate_the_other(server: Server) -> None:
    adapter = await opened(f"{server.url}/tasks")

    items = [await adapter.item(i) for i in range(10)]
    evaluated = await adapter.eval_items(32)
    first = await adapter.start(items[0]).begin()  # type: ignore[union-attr]

    assert sorted(item["reset"]["index"] for item in items) == sorted(2 * [0, 1, 2, 3, 4])
    assert sorted(item["reset"]["index"] for item in evaluated) == [0, 1]
    assert {item["reset"]["split"] for item in evaluated} == {"test"}
    assert f"task train {items[0]['reset']['index']}" in first[0]["content"]


async def test_episode_scripted_policy_reaches_known_rewards(server: Server) -> None:
    async with ScriptedEngine(["ok", ANSWER.format(0), "none", ANSWER.format(4)]) as engine:
        env = at_engine(f"openenv:{server.url}/guess", engine, group_size=1)
        try:
            await env.setup()
            rollouts, _ = await env.collect_trajectories({"seed": 14, "reset": {}})
            group = await env.postprocess_histories(rollouts)
        finally:
            await env.close()

    [rollout] = rollouts
    assert rollout.rewards == [-0.25, -0.1, 1.0]
    assert rollout.outcome == "done"
    assert rollout.metrics == {
        "steps": 2.0, "invalid_answers": 1, "distance": 0.0, "truncated": 0.0
    }  # fmt: skip
    assert "guess a number, seed 14" in rollout.messages[0]["content"]
    check_group(group)
    trained = [t for t, m in zip(group["tokens"][0], group["masks"][0], strict=True) if m != -100]
    assert text_of(trained).count("<action>") == 2


async def test_group_members_get_the_same_seed_and_capacity_is_respected(server: Server) -> None:
    async with ScriptedEngine([ANSWER.format(5)]) as engine:
        env = at_engine(f"openenv:{server.url}/lonely", engine, group_size=4)
        try:
            await env.setup()
            limit = env.adapter.max_concurrent
            group = await roll_out(env, {"seed": 5, "reset": {}})
        finally:
            await env.close()

    assert limit == 1
    assert len(group["scores"]) == 4
    prompts = {text_of(tokens).split("<action>5")[0] for tokens in group["tokens"]}
    assert len(prompts) == 1
    await server.wait_for_sessions(0)


async def test_open_finds_the_number_of_sessions_of_the_server(server: Server) -> None:
    adapter = make_adapter(f"openenv:{server.url}/guess", {}, seed=1)

    await adapter.open()

    assert adapter.max_concurrent == 4
    await server.wait_for_sessions(0)


async def test_tools_calls_are_steps_with_rewards(server: Server) -> None:
    def call(name: str, **arguments: Any) -> str:
        text = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{text}\n</tool_call>"

    replies = ["ok", call("add", a=4, b=2) + call("fail", text="broken"), call("submit", answer=6)]
    async with ScriptedEngine([*replies, call("submit", answer="6")]) as engine:
        env = at_engine(f"openenv:{server.url}/sums", engine, group_size=1)
        try:
            await env.setup()
            rollouts, _ = await env.collect_trajectories({"seed": 24, "reset": {}})
        finally:
            await env.close()

    [rollout] = rollouts
    texts = [message["content"] for message in rollout.messages]
    assert '"name": "submit"' in texts[0]
    assert "What is 4 + 2?" in texts[1]
    assert '{"name": "add", "content": "6"}' in texts[3]
    assert '"error"' in texts[3]
    assert rollout.rewards[0] == pytest.approx(0.2)
    assert rollout.rewards[-1] == 1.0
    assert rollout.outcome == "done"


async def test_tools_calls_of_one_turn_may_take_longer_than_a_step(server: Server) -> None:
    wait = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    async with ScriptedEngine(["ok"]) as engine:
        env = at_engine(f"openenv:{server.url}/sums", engine, step_timeout_s=5.0)
        try:
            await env.setup()
            episode = env.start_conversation({"seed": 24, "reset": {}})
            await episode.begin()
            reply = await episode.reply(turn(3 * wait))
            await episode.close()
        finally:
            await env.close()

    assert reply.chat_messages()[0]["content"].count("waited") == 3


async def test_tools_arguments_that_cannot_be_sent_get_an_error(server: Server) -> None:
    adapter = await opened(f"{server.url}/sums")
    episode = await begun(adapter, {"seed": 24, "reset": {}})
    text = r'{"name": "fail", "arguments": {"text": "\ud800"}}'

    reply = await episode.reply(turn(f"<tool_call>{text}</tool_call>"))
    await episode.close()
    await adapter.close()

    assert "half of a surrogate pair" in reply.chat_messages()[0]["content"]
    assert not reply.is_done


async def test_tools_plain_answer_goes_to_the_answer_tool(server: Server) -> None:
    adapter = await opened(f"{server.url}/sums", answer_tool="submit")
    episode = await begun(adapter, {"seed": 24, "reset": {}})

    reply = await episode.reply(turn("6"))
    await episode.close()

    assert (reply.reward, reply.is_done) == (1.0, True)


@pytest.mark.parametrize(
    ("guess", "error", "text"),
    [
        (13, EpisodeFailedError, "unlucky"),
        (77, EpisodeRewardError, "without a reward"),
    ],
)
async def test_step_broken_environment_is_named(
    server: Server, guess: int, error: type[Exception], text: str
) -> None:
    adapter = await opened(f"{server.url}/guess")
    episode = await begun(adapter, {"seed": 1, "reset": {}})

    with pytest.raises(error, match=text):
        await episode.reply(turn(ANSWER.format(guess)))
    await episode.close()

    await server.wait_for_sessions(0)


async def test_step_that_hangs_times_out_and_others_go_on(server: Server) -> None:
    hanging = [99]

    def policy(prompt: str) -> str:
        guess = hanging.pop() if hanging and "guess a number" in prompt else 4
        return ANSWER.format(guess)

    async with ScriptedEngine(policy) as engine:
        env = at_engine(
            f"openenv:{server.url}/guess",
            engine,
            {"max_concurrent": 1},
            step_timeout_s=4.0,
            episode_retries=3,  # other steps are late too where the machine stands still
        )
        try:
            await env.setup()
            group = await roll_out(env, {"seed": 4, "reset": {}})
            failures = dict(env.failure_counts)
        finally:
            await env.close()

    assert group["scores"] == [1.0, 1.0]
    assert set(failures) == {"EpisodeTimeoutError"}
    await server.wait_for_sessions(0)


async def test_cancelled_rollouts_leave_no_session(server: Server) -> None:
    adapter = await opened(f"{server.url}/guess", max_concurrent=4)
    episodes = [await begun(adapter, {"seed": 1, "reset": {}}) for _ in range(3)]
    await server.wait_for_sessions(3)

    waiting = asyncio.ensure_future(episodes[0].reply(turn(ANSWER.format(99))))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for episode in episodes:
        await episode.close()

    await server.wait_for_sessions(0)


async def test_connection_closed_between_steps_is_not_opened_again(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        adapter = await opened(f"{server.url}/guess")
        episode = await begun(adapter, {"seed": 1, "reset": {}})

        server.kill()
        await asyncio.to_thread(server.start)
        with pytest.raises(EpisodeConnectionError):
            await episode.reply(turn(ANSWER.format(2)))
        await episode.close()
        again = await begun(adapter, {"seed": 1, "reset": {}})
        reply = await again.reply(turn(ANSWER.format(1)))
        await again.close()

        assert reply.reward == 1.0
        await server.wait_for_sessions(0)


async def test_server_restart_repeats_the_rollout(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        restarted: list[bool] = []

        def policy(prompt: str) -> str:
            if "guess a number" in prompt and not restarted:
                restarted.append(True)
                server.kill()
                server.start()
            return ANSWER.format(3)

        async with ScriptedEngine(policy) as engine:
            env = at_engine(
                f"openenv:{server.url}/guess", engine, {"max_concurrent": 1}, group_size=1
            )
            try:
                await env.setup()
                group = await roll_out(env, {"seed": 3, "reset": {}})
                failures = dict(env.failure_counts)
            finally:
                await env.close()

        assert group["scores"] == [1.0]
        assert failures == {"EpisodeConnectionError": 1}
        await server.wait_for_sessions(0)


async def test_half_open_connection_fails_the_step(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.openenv.PING_S", 0.3)
    monkeypatch.setattr("atroposlib.adapters.openenv.PONG_S", 4.0)
    with Server(MODULE, free_port).running() as server:
        adapter = await opened(f"{server.url}/guess")
        episode = await begun(adapter, {"seed": 1, "reset": {}})

        server.pause()
        with pytest.raises(EpisodeConnectionError, match="keepalive ping timeout"):
            await episode.reply(turn(ANSWER.format(2)))
        await episode.close()
        server.resume()

        await server.wait_for_sessions(0)


async def test_kill_of_our_process_leaves_no_session(server: Server, tmp_path: Path) -> None:
    process = spawn_rollouts(f"openenv:{server.url}/guess", {"max_concurrent": 3}, tmp_path)
    try:
        await server.wait_for_sessions(3)
    finally:
        process.kill()
        process.wait()

    await server.wait_for_sessions(0)


@pytest.mark.parametrize(
    ("path", "args", "text"),
    [
        ("/newer", {}, "version 2.0.0"),
        ("/absent", {}, "not an OpenEnv server"),
        ("/blank", {}, "no fields"),
        ("/guess", {"action_field": "gues"}, "did you mean guess"),
        ("/guess", {"observation_field": "messages"}, "did you mean message"),
        ("/guess", {"interface": "tools"}, "lists no MCP tools"),
        ("/guess", {"split": "train"}, "has no tasks"),
        ("/tasks", {"split": "trains"}, "did you mean train"),
        ("/sums", {"answer_tool": "add"}, "one required argument"),
        (
            "/moves",
            {"action_field": "direction"},
            "action_constants: an action of .* requires speed",
        ),
    ],
)
async def test_open_what_cannot_work_is_refused(
    server: Server, path: str, args: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await opened(server.url + path, **args)


async def test_open_unreachable_server_is_tried_again_for_a_while(free_port: int) -> None:
    with pytest.raises(EpisodeConnectionError, match=r"no connection in \d+ attempts"):
        await opened(f"http://127.0.0.1:{free_port}", reconnect_s=0.5)


@pytest.mark.parametrize(
    "name",
    [
        "ftp://host",
        "http://user:secret@host",  # pragma: allowlist secret
        "http://host?key=secret",
        "host",
        "http://h:x",
    ],
)
def test_address_what_is_no_url_of_a_server_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_adapter(f"openenv:{name}", {}, seed=0)

    assert "secret" not in str(refused.value)


def test_check_passes(server: Server, tmp_path: Path) -> None:
    for path in ("guess", "sums"):
        done = run_command(f"openenv:{server.url}/{path}", "check", folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


async def test_page_mapping_is_taken(server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs/adapters/openenv.md").read_text(encoding="utf-8")
    [block] = [b for b in blocks_of("openenv.md", page) if b.language == "yaml"]
    mapping = {**yaml.safe_load(block.text), "action_field": "guess"}

    adapter: Any = await opened(
        f"{server.url}/guess", **{**mapping, "observation_field": "message"}
    )

    assert adapter.action_of("I say <action>two</action>") == {"guess": 2}
    assert adapter.action_of("three") is None
    assert "Guess my number. Write one action" in adapter.prompt


@pytest.mark.parametrize("kind", ["string", "integer", "boolean"])
async def test_action_field_that_may_be_null_takes_values_of_its_kind(
    server: Server, kind: str
) -> None:
    adapter: Any = await opened(f"{server.url}/guess")
    adapter._fields = {"guess": {"anyOf": [{"type": kind}, {"type": "null"}]}}
    taken = {"string": ["42", "true", "no"], "integer": [42, None, None]}
    taken["boolean"] = [None, True, None]

    actions = [adapter.action_of(f"<action>{text}</action>") for text in ("42", "true", "no")]

    assert actions == [None if v is None else {"guess": v} for v in taken[kind]]
    assert f"({kind})" in adapter._form_of_actions()


async def test_members_of_an_enum_are_names_of_actions(server: Server) -> None:
    args = {"action_field": "direction", "action_constants": {"speed": 3}}
    adapter: Any = await opened(f"{server.url}/moves", max_concurrent=1, **args)
    episode = await begun(adapter, await adapter.item(0))

    reply = await episode.reply(turn("I go <action>Left</action>"))
    await episode.close()

    assert "<action>DIRECTION</action>, one of: left, right." in adapter.prompt
    assert (reply.messages, reply.reward) == ("moved left", 1.0)
    assert adapter.action_of("<action>up</action>") is None


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Side"}, {"type": "null"}]}, ["left", "right"]),
        ({"$ref": "#/$defs/Other", "description": "d"}, ["left", "right"]),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/$defs/Absent"}, None),
        ({"anyOf": [{"$ref": "#/$defs/Side"}, {"type": "integer"}]}, None),
    ],
)
def test_references_of_a_field_lead_to_its_values(field: Any, expected: Any) -> None:
    side = {"enum": ["left", "right"], "type": "string"}
    other, loop = {"$ref": "#/$defs/Side"}, {"$ref": "#/$defs/Loop"}

    schema = _value_schema(field, {"$defs": {"Side": side, "Other": other, "Loop": loop}})

    assert schema.get("enum") == expected
    assert schema.get("description") == field.get("description")


def test_result_of_a_tool_that_is_not_text_is_named() -> None:
    image = {"type": "image", "data": "AA"}

    results = [
        _tool_result({"result": {"content": content, "data": data}}, "x")
        for content, data in (([image], None), ([{"text": "a"}, image], "a"), ([], {"b": 1}))
    ]

    assert results == [("[image]", False), ("a\n[image]", False), ('{"b": 1}', False)]


@pytest.mark.parametrize("metadata", [[1], "text", None, {"distance": 2}])
def test_metadata_of_another_form_are_no_metrics(metadata: Any) -> None:
    metrics: dict[str, float] = {}
    observation = {"text": "x", "metadata": metadata}
    result = SimpleNamespace(observation=observation, metadata=None, reward=1.0, done=True)

    reward = Progress("x", metrics).reward_of(result)

    assert reward == 1.0
    assert metrics.get("distance") == (2.0 if isinstance(metadata, dict) else None)


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        (503, EpisodeConnectionError, "no connection in"),
        (429, EpisodeConnectionError, "no connection in"),
        (401, ConfigError, "refuses its connections .*401.*headers_file"),
        (404, ConfigError, "no WebSocket route /ws"),
    ],
)
async def test_refused_websocket_is_tried_again_only_if_the_server_is_busy(
    status: int, error: type[Exception], text: str
) -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/ws":
            return web.Response(status=status)
        fields = {"properties": {"guess": {"type": "integer"}}}
        content: Any = {"action": fields, "observation": fields}
        if request.path == "/list_environments":
            content = []
        return web.json_response(content)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]

    with pytest.raises(error, match=text):
        await opened(f"http://127.0.0.1:{port}", reconnect_s=0.5)
    await runner.cleanup()


@pytest.mark.timeout(1200)
async def test_page_every_command_works(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("qwen2_5")
    model, replies = FOLDER / "qwen2_5", [ANSWER.format(n) for n in range(10)]
    async with ScriptedEngine(replies, tokenizer=tokenizer, model=str(model)) as engine:
        output = await run_page("docs/adapters/openenv.md", tmp_path, engine, model)

    assert "nothing left running" in output
    groups = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert len(groups) >= 2
    for group in groups:
        check_group(json.loads(group))
    assert "eval/mean_return" in output
