"""Episodes of remote clients: items, rewards, limits and failures, without a protocol."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from atroposlib.cli.serve_env import find_environment
from atroposlib.envs.multi_turn_env import Limits, Rollout, play
from atroposlib.errors import ConfigError
from atroposlib.serving.sessions import (
    RefusedRequestError,
    ServingSettings,
    difference_from_training,
    protect,
)
from tests.adapters.fake_kind import add_fake_kind
from tests.serving.own_environments import Echo
from tests.serving.served import OWN, WORD_SUMS, opened

pytestmark = pytest.mark.slow


class ScriptedPolicy:
    """Writes given texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = iter(texts)

    def budget(self, chat: Any, *, max_tokens: int) -> int:
        return max_tokens

    async def write(self, chat: Any, *, max_tokens: int) -> Any:
        text = next(self._texts)
        return type("Written", (), {"text": text, "is_cut": False})()

    def sequences(self) -> list[Any]:
        return []


async def played_by_us(conversation: Any, texts: list[str], max_turns: int) -> Rollout:
    limits = Limits(max_turns=max_turns)
    return await play(
        conversation, ScriptedPolicy(texts), limits=limits, reward_weights={"neat": 2.0}
    )


async def test_item_of_an_index_and_of_a_seed_is_always_the_same() -> None:
    async with opened(f"{OWN}:EchoEnv", num_tasks=50) as host:
        first = await host.start(index=7)
        again = await host.start(index=7)
        seeded = [await host.start(seed=3) for _ in range(2)]

        assert first.messages == again.messages == [{"role": "user", "content": "item 7"}]
        assert seeded[0].index == seeded[1].index < 50
        assert (await host.start()).index == 0
        assert (await host.start()).index == 1


@pytest.mark.parametrize("index", [-1, 50])
async def test_index_out_of_range_is_refused(index: int) -> None:
    async with opened(f"{OWN}:EchoEnv", num_tasks=50) as host:
        with pytest.raises(RefusedRequestError, match="expected 0 to 49") as refusal:
            await host.start(index=index)

        assert refusal.value.status == 400
        with pytest.raises(RefusedRequestError, match="no split 'dev'; there are train"):
            await host.start(split="dev")


async def test_conversation_of_a_client_that_leaves_while_it_starts_is_closed() -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        num_open = Echo.opened - Echo.closed
        starting = asyncio.create_task(host.start(index=1))
        while Echo.opened - Echo.closed == num_open:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait({starting})

        assert starting.cancelled()
        assert Echo.opened - Echo.closed == num_open
        assert host.num_open == 0


async def test_finite_environment_repeats_its_items() -> None:
    async with opened(f"{OWN}:QuestionEnv", num_tasks=100) as host:
        episode = await host.start(index=4)

        assert episode.messages[1]["content"] == "1 + 1?"
        assert host.num_tasks("train") == 3
        assert host.splits() == ["train", "test"]
        assert host.num_tasks("test") == 2


async def test_item_of_an_index_and_of_a_seed_stays_the_same_when_all_items_are_known() -> None:
    async with opened(f"{OWN}:QuestionEnv", num_tasks=100) as host:
        seeded = [await host.start(seed=5) for _ in range(2)]
        indexed = [await host.start(index=70) for _ in range(2)]

        assert host.num_tasks("train") == 3
        assert seeded[0].messages == seeded[1].messages
        assert seeded[0].index == seeded[1].index
        assert indexed[0].messages == indexed[1].messages


@pytest.mark.parametrize(
    ("text", "is_truncated", "parts"),
    [
        ("<think>0 + 0</think>0", False, {"right": 1.0, "short": 1.0}),
        ("five", False, {"right": 0.0, "short": 0.0}),
        ("0", True, {"right": 0.0, "short": 0.0}),
    ],
)
async def test_answer_is_scored_once(
    text: str, is_truncated: bool, parts: dict[str, float]
) -> None:
    async with opened(f"{OWN}:QuestionEnv") as host:
        episode = await host.start(index=0)

        played = await episode.write(text, is_truncated=is_truncated)

        assert episode.messages[0] == {"role": "system", "content": "Be short."}
        assert played.reward_parts == parts
        assert played.reward == sum(parts.values())
        assert played.is_done
        assert played.outcome == ("truncated" if is_truncated else "done")
        with pytest.raises(RefusedRequestError, match="the episode is over"):
            await episode.write(text)
        assert host.num_open == 0


@pytest.mark.parametrize("texts", [["a", "end"], ["a", "b", "c"], ["summary", "end"]])
async def test_rewards_are_those_of_our_own_rollouts(texts: list[str]) -> None:
    ours = await played_by_us(Echo(1), texts, max_turns=3)

    async with opened(f"{OWN}:EchoEnv") as host:
        episode = await host.start(index=1)
        played = [await episode.write(text) for text in texts]

    assert [turn.reward for turn in played] == ours.rewards == episode.rewards
    assert played[-1].is_done
    assert played[-1].outcome == ours.outcome
    assert played[-1].reward_parts == ours.reward_parts[-1]


async def test_history_that_an_environment_replaces_is_part_of_the_answer() -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        episode = await host.start()

        played = await episode.write("summary")

        assert played.history == [{"role": "user", "content": "short"}]
        assert played.messages == [{"role": "user", "content": "go on"}]


async def test_truncated_turn_ends_the_episode_with_its_unfinished_reward() -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        episode = await host.start()
        await episode.write("a")

        played = await episode.write("hal", is_truncated=True)

        assert (played.reward, played.outcome, played.is_done) == (-2.0, "truncated", True)
        assert episode.rewards == [0.25, -2.0]
        assert host.num_open == 0


async def test_calls_of_tools_have_the_results_and_rewards_of_calls_in_texts() -> None:
    async with opened(WORD_SUMS) as host:
        by_name, in_text = await host.start(index=0), await host.start(index=0)

        call = await by_name.call("multiply", {"a": 6, "b": 7})
        text = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
        written = await in_text.write(text)
        faulty = await by_name.call("multiply", {"a": "</tool_call>", "b": 7})

        assert [tool.name for tool in host.tools] == ["add", "multiply"]
        assert "<tools>" not in by_name.messages[0]["content"]
        assert call.tool_result is not None
        assert (call.tool_result.content, call.reward) == ("42", written.reward)
        assert "<tool_response>" in written.messages[0]["content"]
        assert faulty.tool_result is not None
        assert faulty.tool_result.is_error
        assert faulty.reward == -0.1
        numbers = map(int, re.findall(r"\d+", by_name.messages[0]["content"]))
        boxes, parts, loose = numbers
        answer = await by_name.write(f"<answer>{boxes * parts + loose}</answer>")
        assert (answer.reward, answer.is_done) == (1.0, True)


async def test_unknown_tool_is_a_result() -> None:
    async with opened(WORD_SUMS) as host:
        played = await (await host.start()).call("divide", {})

        assert played.tool_result is not None
        assert played.tool_result.content == "there is no tool 'divide'; there are add, multiply"


async def test_tools_remain_texts_without_tools_of_the_protocol() -> None:
    async with opened(WORD_SUMS, offers_tools=False) as host:
        episode = await host.start()

        assert "<tools>" in episode.messages[0]["content"]
        with pytest.raises(RefusedRequestError, match="no tools to call"):
            await episode.call("add", {"a": 1, "b": 2})


async def test_tools_with_a_format_of_their_own_remain_texts() -> None:
    async with opened(f"{OWN}:OwnCallsEnv") as host:
        played = await (await host.start()).write("DOUBLE 4")

        assert host.tools == []
        assert '"content": "8"' in played.messages[0]["content"]


async def test_item_with_other_tools_is_refused() -> None:
    async with opened(f"{OWN}:ToolsByItemEnv") as host:
        await host.start(index=0)

        with pytest.raises(RefusedRequestError, match="ConfigError"):
            await host.start(index=1)
        assert host.num_open == 1


@pytest.mark.parametrize("word", ["raise", "nothing", "nan"])
async def test_failed_episode_ends_alone_and_names_the_kind_only(word: str) -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        failing, other = await host.start(), await host.start()
        num_closed = Echo.closed

        with pytest.raises(RefusedRequestError, match="failed \\(") as refusal:
            await failing.write(word)

        assert refusal.value.status == 500
        assert "secret" not in str(refusal.value)
        assert Echo.closed == num_closed + 1
        assert host.num_open == 1
        assert (await other.write("a")).reward == 0.25


async def test_slow_turn_ends_its_episode_and_delays_no_other() -> None:
    async with opened(f"{OWN}:EchoEnv", step_timeout_s=0.3) as host:
        slow, other = await host.start(), await host.start()
        hanging = asyncio.create_task(slow.write("hang"))

        assert (await other.write("a")).reward == 0.25
        with pytest.raises(RefusedRequestError, match=r"more than 0\.3 s") as refusal:
            await hanging

        assert refusal.value.status == 504
        assert host.num_open == 1


async def test_failed_start_leaves_no_episode() -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        opened_before, closed_before = Echo.opened, Echo.closed

        with pytest.raises(RefusedRequestError, match="the start of the environment failed"):
            await host.start(index=13)

        assert host.num_open == 0
        assert Echo.opened - opened_before == Echo.closed - closed_before == 1


async def test_number_of_episodes_is_limited() -> None:
    async with opened(f"{OWN}:EchoEnv", max_sessions=2) as host:
        first, _ = await host.start(), await host.start()

        with pytest.raises(RefusedRequestError, match="2 episodes are open") as refusal:
            await host.start()
        assert refusal.value.status == 503

        await first.close()
        assert await host.start()


async def test_idle_episode_is_closed_and_a_used_one_is_not() -> None:
    now = [0.0]
    async with opened(f"{OWN}:EchoEnv", idle_timeout_s=10, clock=lambda: now[0]) as host:
        idle, used = await host.start(), await host.start()
        now[0] = 8.0
        await used.write("a")
        now[0] = 11.0

        assert await host.close_idle() == 1

        assert host.num_open == 1
        with pytest.raises(RefusedRequestError, match="the episode is over"):
            await idle.write("a")


async def test_cancelled_turn_closes_its_episode() -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        episode = await host.start()
        turn = asyncio.create_task(episode.write("hang"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn

        assert host.num_open == 0


async def test_closed_host_has_closed_every_conversation() -> None:
    async with opened(f"{OWN}:EchoEnv") as host:
        opened_before, closed_before = Echo.opened, Echo.closed
        for _ in range(3):
            await host.start()

    assert Echo.opened - opened_before == Echo.closed - closed_before == 3
    assert host.num_open == 0


async def test_too_long_turn_is_refused_and_can_be_repeated() -> None:
    async with opened(f"{OWN}:EchoEnv", max_text_chars=10) as host:
        episode = await host.start()

        with pytest.raises(RefusedRequestError, match="at most 10") as refusal:
            await episode.write("x" * 11)

        assert refusal.value.status == 413
        assert (await episode.write("short")).reward == 0.25


async def test_environment_of_another_library_is_served() -> None:
    pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    async with opened(
        "gymnasium:FrozenLake-v1", "--args", "env_kwargs={is_slippery: false}"
    ) as host:
        episode = await host.start(seed=1)
        rewards = []
        for action in ("down", "down", "right", "right", "down", "right"):
            played = await episode.write(f"<action>{action}</action>")
            rewards.append(played.reward)

        assert "<action>" in episode.messages[0]["content"]
        assert (rewards[-1], sum(rewards), played.is_done) == (1.0, 1.0, True)


async def test_setup_that_fails_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="no data"):
        async with opened(f"{OWN}:StubbornEnv"):
            pass


async def test_environment_that_collects_itself_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="CollectingEnv cannot be served: it collects"):
        async with opened(f"{OWN}:CollectingEnv"):
            pass


async def test_adapter_with_a_loop_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    add_fake_kind(monkeypatch)

    with pytest.raises(ConfigError, match="FakeAgent runs a loop of its own"):
        async with opened("fake:any", "--args", "is_agent=true"):
            pass

    async with opened("fake:any") as host:
        assert (await host.start()).messages == [{"role": "user", "content": "begin"}]


async def test_environment_that_changes_finished_rollouts_is_refused() -> None:
    with pytest.raises(ConfigError, match="RescoringEnv cannot be served: its collect_trajectory"):
        async with opened(f"{OWN}:RescoringEnv"):
            pass


@pytest.mark.parametrize(
    ("target", "difference"),
    [
        ("EchoEnv", None),
        ("QuestionEnv", None),
        ("RankingEnv", "group_scores of RankingEnv applies to groups of our own training only"),
    ],
)
def test_rules_of_groups_are_named(target: str, difference: str | None) -> None:
    assert difference_from_training(find_environment(f"{OWN}:{target}")) == difference


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the number of bytes of the body."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def client_of(settings: ServingSettings) -> httpx.AsyncClient:
    app = protect(echo, settings, address="127.0.0.1")
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_token_of_a_trainer_is_required(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"trainer {'t' * 16}\nenvironment {'e' * 16}\n")
    tokens.chmod(0o600)

    async with client_of(ServingSettings(token_file=tokens)) as client:
        statuses = [
            (await client.get("/", headers={"Authorization": value})).status_code
            for value in ("", "Bearer wrong", f"Bearer {'e' * 16}", f"Bearer {'t' * 16}")
        ]

    assert statuses == [401, 401, 401, 200]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_body_over_the_limit_is_not_read(is_chunked: bool) -> None:
    body = b"x" * (1024 * 1024 + 41)

    async def chunks() -> Any:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    async with client_of(ServingSettings(max_text_chars=10)) as client:
        headers = {"Content-Type": "application/json"}
        answer = await client.post("/", content=chunks() if is_chunked else body, headers=headers)

    assert answer.status_code == 413
    assert "at most" in answer.json()["detail"]


async def test_page_of_another_site_is_refused() -> None:
    async with client_of(ServingSettings()) as client:
        answer = await client.post(
            "/", json={}, headers={"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
        )

    assert answer.status_code == 403
