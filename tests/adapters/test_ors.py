"""`ors`: environments of a real server of openreward's SDK, played with exact tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.adapters.interface import Adapter
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
    spawn_process,
    spawn_rollouts,
    stand_in_tokenizers,
    text_of,
)
from tests.fakes import ScriptedEngine
from tests.templates.make_tokenizers import FOLDER, load_tokenizer

pytest.importorskip("openreward", reason="needs pip install '.[ors]'")
pytestmark = pytest.mark.slow

MODULE = "tests.adapters.serve_ors"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(MODULE, find_free_port()).running() as running:
        yield running


@pytest.fixture(autouse=True)
def _tokenizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in_tokenizers(monkeypatch)
    monkeypatch.chdir(tmp_path)


async def opened(url: str, *, step_timeout_s: float = 30.0, seed: int = 1, **args: Any) -> Adapter:
    adapter = make_adapter(f"ors:{url}", args, seed=seed, step_timeout_s=step_timeout_s)
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


TASK = {"split": "train", "index": 3}
"""The task `3 + 30`."""


async def test_items_cover_each_split_in_an_order_of_the_seed(server: Server) -> None:
    adapters = [await opened(f"{server.url}#sums", seed=seed) for seed in (1, 1, 2)]

    orders: list[Any] = [[] for _ in adapters]
    for order, adapter in zip(orders, adapters, strict=True):
        order += [(await adapter.item(i))["index"] for i in range(10)]
    evaluated = await adapters[0].eval_items(32)
    for adapter in adapters:
        await adapter.close()

    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:5]) == sorted(orders[0][5:]) == [0, 1, 2, 3, 4]
    assert sorted(item["index"] for item in evaluated) == [0, 1]
    assert {item["split"] for item in evaluated} == {"test"}


async def test_episode_scripted_policy_reaches_known_rewards(server: Server) -> None:
    replies = ["ok", call("add", a=3, b=30) + call("add", a=3), "33"]
    async with ScriptedEngine(replies) as engine:
        env = at_engine(f"ors:{server.url}#sums", engine, group_size=1)
        try:
            await env.setup()
            rollouts, _ = await env.collect_trajectories(TASK)
            group = await env.postprocess_histories(rollouts)
        finally:
            await env.close()

    [rollout] = rollouts
    texts = [message["content"] for message in rollout.messages]
    assert '"name": "add"' in texts[0]
    assert '"name": "answer"' not in texts[0]  # the terminal tool is hidden
    assert texts[1] == "What is 3 + 30? (train)"
    assert '{"name": "add", "content": "33"}' in texts[3]
    assert "Field required" in texts[3]
    assert rollout.rewards == [0.125, 1.0]
    assert rollout.metrics == {
        "total": 33.0, "tool_calls": 2, "failed_tool_calls": 1, "failed_answer": 0.0
    }  # fmt: skip
    check_group(group)
    trained = [t for t, m in zip(group["tokens"][0], group["masks"][0], strict=True) if m != -100]
    assert "33" in text_of(trained)
    assert "Field required" not in text_of(trained)
    await server.wait_for_sessions(0)


async def test_group_members_get_the_same_task(server: Server) -> None:
    async with ScriptedEngine(["33"]) as engine:
        env = at_engine(f"ors:{server.url}#sums", engine, group_size=4)
        try:
            await env.setup()
            group = await roll_out(env, TASK)
        finally:
            await env.close()

    assert group["scores"] == [1.0] * 4
    assert len({tuple(tokens) for tokens in group["tokens"]}) == 1


async def test_tool_with_the_finished_flag_ends_the_episode(server: Server) -> None:
    adapter = await opened(f"{server.url}#games", answer_tool="answer")
    episode: Any = adapter.start(TASK)

    opening = await episode.begin()
    reply = await episode.reply(turn(call("answer", answer="x") + call("add", a=1, b=1)))
    await episode.close()
    plain = await begun(adapter, TASK)
    plain_reply = await plain.reply(turn("x"))
    await plain.close()
    await adapter.close()

    assert opening[0]["content"].startswith("You play.\n\n# Tools")
    assert opening[1]["content"] == "look:\n(image not shown)"
    assert (reply.reward, reply.is_done, episode.num_calls) == (0.5, True, 1)
    assert (plain_reply.reward, plain_reply.is_done) == (0.5, True)
    await server.wait_for_sessions(0)


ABSENT = "absent.yaml"


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [("raise", EpisodeFailedError, "unlucky"), ("none", EpisodeRewardError, "without a reward")],
)
async def test_call_broken_environment_is_named(
    server: Server, answer: str, error: type[Exception], text: str
) -> None:
    adapter = await opened(f"{server.url}#games")
    episode = await begun(adapter, TASK)

    with pytest.raises(error, match=text):
        await episode.reply(turn(call("answer", answer=answer)))
    await episode.close()
    await adapter.close()

    await server.wait_for_sessions(0)


async def test_call_that_hangs_times_out_and_others_go_on(server: Server) -> None:
    hanging = ["hang"]

    def policy(prompt: str) -> str:
        return call("answer", answer=hanging.pop() if hanging and "look:" in prompt else "x")

    async with ScriptedEngine(policy) as engine:
        env = at_engine(f"ors:{server.url}#games", engine, step_timeout_s=4.0, episode_retries=3)
        try:
            await env.setup()
            group = await roll_out(env, TASK)
            failures = dict(env.failure_counts)
        finally:
            await env.close()

    assert group["scores"] == [0.5, 0.5]
    assert set(failures) == {"EpisodeTimeoutError"}
    await server.wait_for_sessions(0)


async def test_calls_of_one_turn_may_take_longer_than_a_step(server: Server) -> None:
    async with ScriptedEngine(["ok"]) as engine:
        env = at_engine(f"ors:{server.url}#games", engine, step_timeout_s=5.0)
        try:
            await env.setup()
            episode = env.start_conversation(TASK)
            await episode.begin()
            reply = await episode.reply(turn(3 * call("answer", answer="wait")))
            await episode.close()
        finally:
            await env.close()

    assert reply.chat_messages()[0]["content"].count("waited") == 3


async def test_cancelled_rollouts_leave_no_session(server: Server) -> None:
    adapter = await opened(f"{server.url}#sums")
    episodes = [await begun(adapter, TASK) for _ in range(3)]
    await server.wait_for_sessions(3)

    waiting = asyncio.ensure_future(episodes[0].reply(turn(call("add", a=1, b=1))))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    for episode in episodes:
        await episode.close()
    await adapter.close()

    await server.wait_for_sessions(0)


async def test_session_is_kept_alive_with_pings(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.adapters.ors.PING_S", 0.05)
    adapter = await opened(f"{server.url}#sums")
    episode = await begun(adapter, TASK)

    server.post("/test/later?seconds=500")
    while (await asyncio.to_thread(server.get, "/test/pings"))[0] > 400:  # noqa: ASYNC110 - remote
        await asyncio.sleep(0.02)
    await episode.close()
    await adapter.close()

    assert server.sessions() == 0


async def test_creation_that_is_cancelled_is_deleted_once_it_exists(server: Server) -> None:
    adapter = await opened(f"{server.url}#slow")
    episode: Any = adapter.start(TASK)
    beginning = asyncio.ensure_future(episode.begin())
    while episode._session is None or episode._session.sid is None:  # noqa: ASYNC110 - foreign
        await asyncio.sleep(0.02)

    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    await episode.close()
    await adapter.close()

    assert server.sessions() == 0


async def test_server_restart_fails_the_episode_and_the_next_one_works(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        adapter = await opened(f"{server.url}#sums")
        episode = await begun(adapter, TASK)

        server.kill()
        await asyncio.to_thread(server.start)
        with pytest.raises(EpisodeConnectionError, match="404"):
            await episode.reply(turn(call("add", a=1, b=1)))
        await episode.close()
        again = await begun(adapter, TASK)
        reply = await again.reply(turn("33"))
        await again.close()
        await adapter.close()

        assert reply.reward == 1.0
        assert server.sessions() == 0


async def test_server_restart_repeats_the_rollout(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        restarted: list[bool] = []

        def policy(prompt: str) -> str:
            if "What is" in prompt and not restarted:
                restarted.append(True)
                server.kill()
                server.start()
            return "33"

        async with ScriptedEngine(policy) as engine:
            env = at_engine(f"ors:{server.url}#sums", engine, group_size=1)
            try:
                await env.setup()
                group = await roll_out(env, TASK)
                failures = dict(env.failure_counts)
            finally:
                await env.close()

        assert group["scores"] == [1.0]
        assert failures == {"EpisodeConnectionError": 1}
        await server.wait_for_sessions(0)


async def test_half_open_connection_times_out(free_port: int) -> None:
    with Server(MODULE, free_port).running() as server:
        async with ScriptedEngine([call("add", a=1, b=1)]) as engine:
            env = at_engine(f"ors:{server.url}#sums", engine, step_timeout_s=4.0, max_turns=2)
            try:
                await env.setup()
                episode: Any = env.start_conversation(TASK)
                await episode.begin()
                server.pause()
                with pytest.raises(TimeoutError):
                    await episode.reply(turn(call("add", a=1, b=1)))
                server.resume()
                await episode.close()
            finally:
                await env.close()

        await server.wait_for_sessions(0)


async def test_kill_of_our_process_leaves_no_session(server: Server, tmp_path: Path) -> None:
    process = spawn_rollouts(f"ors:{server.url}#sums", {}, tmp_path)
    try:
        await server.wait_for_sessions(3)
    finally:
        process.kill()
        process.wait()

    await server.wait_for_sessions(0)


async def test_kill_of_the_command_leaves_no_session(server: Server, tmp_path: Path) -> None:
    model = FOLDER / "qwen2_5"
    calls = [call("add", a=1, b=2)]
    engine = ScriptedEngine(
        calls, tokenizer=load_tokenizer("qwen2_5"), model=str(model), delay_s=0.5
    )
    async with engine:
        process = spawn_process(f"ors:{server.url}#sums", {}, engine, model, tmp_path)
        try:
            await server.wait_for_sessions(2, or_more=True)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)

        await server.wait_for_sessions(0)


def _num_begun(server: Server) -> int:
    """Return how many sessions of #slow are being created or were."""
    return int(server.get("/test/created")) + int(server.get("/test/starting"))


async def test_kill_during_a_creation_leaves_no_session(server: Server, tmp_path: Path) -> None:
    """The server can delete a session only once it has created it."""
    before = await asyncio.to_thread(server.get, "/test/created")
    process = spawn_rollouts(f"ors:{server.url}#slow", {}, tmp_path)
    try:
        # Where this process stands still meanwhile, all of them may have been created.
        while await asyncio.to_thread(_num_begun, server) < before + 3:  # noqa: ASYNC110 - remote
            await asyncio.sleep(0.02)
    finally:
        process.kill()
        process.wait()

    while await asyncio.to_thread(server.get, "/test/created") < before + 3:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    await server.wait_for_sessions(0)


async def test_server_without_pings_removes_sessions_itself(server: Server) -> None:
    """The last resort if no guard runs, such as after a loss of power."""
    adapter = await opened(f"{server.url}#sums")
    episode = await begun(adapter, TASK)

    server.post("/test/later?seconds=901")

    await server.wait_for_sessions(0)
    await episode.close()
    await adapter.close()


@pytest.mark.parametrize(
    ("part", "args", "text"),
    [
        ("#sum", {}, "did you mean sums"),
        ("#sums", {"split": "tarin"}, "did you mean train"),
        ("#sums", {"eval_split": "validation"}, "expected one of: train, test"),
        ("/absent", {}, "not a server of the Open Reward Standard"),
        ("#sums", {"api_key_file": ABSENT}, "api_key_file absent.yaml"),
    ],
)
async def test_open_what_cannot_work_is_refused(
    server: Server, part: str, args: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        await opened(server.url + part, **args)


async def test_open_server_of_another_version_is_refused(free_port: int) -> None:
    from aiohttp import web

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"/version": {"version": "1.2.0"}}.get(request.path, ["sums"]))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", free_port).start()
    try:
        with pytest.raises(ConfigError, match=r"runs openreward 1\.2\.0"):
            await opened(f"http://127.0.0.1:{free_port}")
    finally:
        await runner.cleanup()


async def test_open_unreachable_server_is_tried_again_for_a_while(free_port: int) -> None:
    with pytest.raises(EpisodeConnectionError, match=r"no connection in \d+ attempts"):
        await opened(f"http://127.0.0.1:{free_port}", reconnect_s=0.5)


def test_check_passes(server: Server, tmp_path: Path) -> None:
    done = run_command(f"ors:{server.url}#sums", "check", folder=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(1200)
async def test_page_every_command_works(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("qwen2_5")
    model, replies = FOLDER / "qwen2_5", ["7", "8", "9"]
    async with ScriptedEngine(replies, tokenizer=tokenizer, model=str(model)) as engine:
        output = await run_page("docs/adapters/ors.md", tmp_path, engine, model)

    assert "nothing left running" in output
    groups = (tmp_path / "groups.jsonl").read_text().splitlines()
    assert len(groups) >= 2
    for group in groups:
        check_group(json.loads(group))
    assert "eval/mean_return" in output
