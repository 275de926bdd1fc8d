"""Conversations against a scripted engine: the exact tokens, the limits, the endings."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Any

import pytest

from atroposlib.envs.conversation import Reply, Turn, visible_text
from atroposlib.envs.multi_turn_env import REPLY_MARK, ChatPolicy, Limits, group_of_rollouts, play
from atroposlib.errors import ConfigError
from atroposlib.scored_data import check_group
from tests.envs.conversations import ScriptedConversation, play_on, text_of
from tests.fakes import CharTokenizer, Fault, ScriptedEngine

PROBED = "ok"
"""First reply of a list: it answers the client's look for a route that gives token ids."""


class TrimmingTokenizer(CharTokenizer):
    """Its template trims replies, as those of the Llama models do."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        trimmed = [{**message, "content": message["content"].strip()} for message in conversation]
        return super().apply_chat_template(trimmed, **options)


async def test_two_turns_are_one_sequence_of_sampled_and_masked_tokens() -> None:
    conversation = ScriptedConversation([Reply("go on"), Reply(reward=2.0, is_done=True)])
    async with ScriptedEngine([PROBED, "one", "two"]) as engine:
        rollout = await play_on(engine, conversation)

    [sequence] = rollout.sequences
    text = "<s>[user]begin</s>\n[assistant]one</s>\n[user]go on</s>\n[assistant]two</s>"
    assert text_of(sequence.tokens) == text
    sampled = [text_of(sequence.tokens[start:end]) for _, start, end in sequence.spans]
    assert sampled == ["one</s>", "two</s>"]
    assert [span.turn for span in sequence.spans] == [0, 1]
    positions = {p for _, start, end in sequence.spans for p in range(start, end)}
    assert {p for p, mask in enumerate(sequence.masks) if mask != -100} == positions
    assert {p for p, value in enumerate(sequence.inference_logprobs) if value != 1.0} == positions
    assert (rollout.rewards, rollout.outcome) == ([0.0, 2.0], "done")
    assert conversation.num_closed == 1


async def test_conversation_is_handed_each_turn_with_the_chat() -> None:
    conversation = ScriptedConversation([Reply("go on"), Reply(is_done=True)])
    async with ScriptedEngine([PROBED, "<think>hm</think> one", "two"]) as engine:
        await play_on(engine, conversation)

    first, second = conversation.turns
    assert (first.text, first.answer, first.index) == ("<think>hm</think> one", "one", 0)
    assert [message["role"] for message in second.messages] == ["user", "assistant"] * 2
    assert second.messages[1]["content"] == first.text


@pytest.mark.parametrize(
    ("tokenizer", "reply"),
    [
        (CharTokenizer(strips_thinking=True), "<think>long</think>one"),
        (TrimmingTokenizer(), "  one \n"),
    ],
)
async def test_template_that_rewrites_history_does_not_break_the_sequence(
    tokenizer: CharTokenizer, reply: str
) -> None:
    conversation = ScriptedConversation([Reply("go on"), Reply(is_done=True)])
    async with ScriptedEngine([PROBED, reply, "two"]) as engine:
        rollout = await play_on(engine, conversation, tokenizer=tokenizer)

    [sequence] = rollout.sequences
    [first, second] = sequence.spans
    assert text_of(sequence.tokens[first.start : first.end]) == f"{reply}</s>"
    assert text_of(sequence.tokens[second.start : second.end]) == "two</s>"
    assert text_of(sequence.tokens[first.end : second.start]) == "\n[user]go on</s>\n[assistant]"


async def test_reply_with_the_mark_of_a_reply_does_not_break_the_sequence() -> None:
    said = f"{REPLY_MARK}one"
    conversation = ScriptedConversation([Reply("on"), Reply("on"), Reply(is_done=True)])
    async with ScriptedEngine([PROBED, said, "two", "three"]) as engine:
        rollout = await play_on(engine, conversation)

    [sequence] = rollout.sequences
    turns = "".join(f"\n[user]on</s>\n[assistant]{text}</s>" for text in ("two", "three"))
    assert text_of(sequence.tokens) == f"<s>[user]begin</s>\n[assistant]{said}</s>{turns}"


async def test_new_history_starts_a_sequence_and_keeps_the_old_one() -> None:
    summary = [{"role": "user", "content": "so far: one"}]
    conversation = ScriptedConversation(
        [Reply(reward=1.0, history=summary), Reply(reward=2.0, is_done=True)]
    )
    async with ScriptedEngine([PROBED, "one", "two"]) as engine:
        rollout = await play_on(engine, conversation)

    old, new = rollout.sequences
    assert text_of(old.tokens) == "<s>[user]begin</s>\n[assistant]one</s>"
    assert text_of(new.tokens) == "<s>[user]so far: one</s>\n[assistant]two</s>"
    assert [span.turn for s in (old, new) for span in s.spans] == [0, 1]
    group = group_of_rollouts([rollout], normalization="none")
    check_group(group)
    assert group["group_overrides"] == {"group_size": 2}
    assert group["scores"] == [3.0, 3.0]
    assert set(group["advantages"][0]) == {0.0, 3.0}
    assert set(group["advantages"][1]) == {0.0, 2.0}


async def test_turn_cut_by_its_limit_ends_unanswered() -> None:
    conversation = ScriptedConversation([Reply("go on"), Reply(is_done=True)])
    async with ScriptedEngine([PROBED, "one", "a long second turn"]) as engine:
        rollout = await play_on(engine, conversation, max_turn_tokens=6)

    assert rollout.outcome == "truncated"
    assert len(conversation.turns) == 1
    assert rollout.rewards == [0.0, -5.0]
    [sequence] = rollout.sequences
    assert text_of(sequence.tokens).endswith("[assistant]a long")
    assert group_of_rollouts([rollout])["finish_reasons"] == ["length"]


async def test_sequence_stays_below_its_limit() -> None:
    conversation = ScriptedConversation([Reply("x" * 100)] * 9)
    async with ScriptedEngine([PROBED, "one"]) as engine:
        rollout = await play_on(engine, conversation, max_tokens=200, max_turns=9)

    assert rollout.outcome == "truncated"
    assert len(rollout.rewards) == 2
    assert len(rollout.sequences[0].tokens) < 200


async def test_opening_without_room_gives_no_sequence() -> None:
    async with ScriptedEngine([PROBED]) as engine:
        rollout = await play_on(engine, ScriptedConversation([]), max_tokens=20)

    assert (rollout.outcome, rollout.sequences, rollout.rewards) == ("truncated", [], [])


async def test_context_of_the_engine_truncates_a_later_turn() -> None:
    conversation = ScriptedConversation([Reply("y" * 100), Reply(is_done=True)])
    async with ScriptedEngine([PROBED, "one"], max_model_len=120) as engine:
        rollout = await play_on(engine, conversation, max_turn_tokens=50)

    assert (rollout.outcome, rollout.rewards) == ("truncated", [-5.0])


async def test_turns_run_out() -> None:
    conversation = ScriptedConversation([Reply("more", reward=1.0)] * 2)
    async with ScriptedEngine([PROBED, "one"]) as engine:
        rollout = await play_on(engine, conversation, max_turns=2)

    assert (rollout.outcome, rollout.rewards) == ("out_of_turns", [1.0, -4.0])


async def test_time_out_keeps_what_was_written() -> None:
    conversation = ScriptedConversation([Reply("never read")], delay_s=30.0)
    async with ScriptedEngine([PROBED, "one"]) as engine:
        # Long enough for the first turn on a busy machine.
        rollout = await play_on(engine, conversation, timeout_s=4.0)

    assert (rollout.outcome, rollout.rewards) == ("timed_out", [-5.0])
    assert len(rollout.sequences) == 1
    assert conversation.num_closed == 1


async def test_time_out_before_the_first_turn_raises_and_closes() -> None:
    conversation = ScriptedConversation([])
    async with ScriptedEngine([PROBED]) as engine:
        engine.fail_next(Fault("hang"), Fault("hang"))
        with pytest.raises(TimeoutError, match=r"no turn was written within 0\.05 s"):
            await play_on(engine, conversation, timeout_s=0.05)

    assert conversation.num_closed == 1


async def test_cancelled_play_closes_the_conversation_and_leaves_no_task() -> None:
    conversation = ScriptedConversation([Reply("never read")], delay_s=30.0)
    async with ScriptedEngine([PROBED, "one"]) as engine:
        playing = asyncio.create_task(play_on(engine, conversation))
        await conversation.was_asked.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    assert conversation.num_closed == 1
    assert not [task for task in asyncio.all_tasks() if "_play_turns" in repr(task)]


async def test_cancelled_play_of_a_failed_conversation_logs_no_lost_exception() -> None:
    lost: list[str] = []

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # Collected clients of earlier tests report errors of their own.
        lost.append(str(context.get("exception")))

    asyncio.get_running_loop().set_exception_handler(note)

    class Failing(ScriptedConversation):
        async def reply(self, turn: Turn) -> Reply:
            playing.cancel()  # as when another rollout of the run fails at the same moment
            raise ValueError("no reply")

    async with ScriptedEngine([PROBED, "one"]) as engine:
        playing = asyncio.create_task(play_on(engine, Failing([])))
        with pytest.raises(asyncio.CancelledError):
            await playing
        gc.collect()  # asyncio reports a lost exception when the task is collected

    assert "no reply" not in lost


async def test_what_a_reply_raises_is_raised_after_closing() -> None:
    conversation = ScriptedConversation([])  # no reply for the first turn
    async with ScriptedEngine([PROBED, "one"]) as engine:
        with pytest.raises(IndexError):
            await play_on(engine, conversation)

    assert conversation.num_closed == 1


async def test_reply_that_neither_speaks_nor_ends_is_refused() -> None:
    async with ScriptedEngine([PROBED, "one"]) as engine:
        with pytest.raises(ConfigError, match=r"ScriptedConversation\.reply gave neither"):
            await play_on(engine, ScriptedConversation([Reply(reward=1.0)]))


async def test_chat_policy_plays_the_same_conversation_without_tokens() -> None:
    from atroposlib.envs.server_handling.config import APIServerConfig
    from atroposlib.envs.server_handling.vllm_server import VLLMServer

    conversation = ScriptedConversation([Reply("go on"), Reply(reward=2.0, is_done=True)])
    async with ScriptedEngine(["one", "two"]) as engine:
        server = VLLMServer(
            APIServerConfig(model_name="m", base_url=engine.base_url, health_check=False)
        )
        policy = ChatPolicy(server, CharTokenizer(), temperature=0.0)
        rollout = await play(conversation, policy, limits=Limits())
        await server.close()

    assert rollout.sequences == []
    assert [turn.text for turn in conversation.turns] == ["one", "two"]
    assert {request.body["temperature"] for request in engine.requests} == {0.0}


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        ("plain", "plain"),
        ("<think>a</think>b", "b"),
        ("a</think> b", "b"),
        ("before <think>never closed", "before"),
        ("<think>never closed", ""),
        ("<think>a</think>b<think>c", "b"),
        ("", ""),
    ],
)
def test_visible_text_leaves_thinking_out(text: str, visible: str) -> None:
    assert visible_text(text) == visible
    assert Turn(text, 0, ()).answer == visible


async def test_reply_that_is_none_and_conversation_that_is_none_are_named() -> None:
    wrong: Any = 1.0
    conversation = ScriptedConversation([wrong])
    async with ScriptedEngine([PROBED, "one"]) as engine:
        with pytest.raises(TypeError, match=r"ScriptedConversation\.reply returned 1\.0; expected"):
            await play_on(engine, conversation)

    nothing: Any = None
    with pytest.raises(TypeError, match="start_conversation returned None; expected a"):
        await play(nothing, nothing, limits=Limits())
    assert conversation.num_closed == 1


@pytest.mark.parametrize("reward", ["right", "1.0", None, [1.0]])
async def test_reward_that_is_no_number_is_refused_by_name(reward: Any) -> None:
    conversation = ScriptedConversation([Reply(reward=reward, is_done=True)])
    message = rf"ScriptedConversation\.reply gave the reward {re.escape(repr(reward))}; expected a"

    async with ScriptedEngine([PROBED, "one"]) as engine:
        with pytest.raises(TypeError, match=message):
            await play_on(engine, conversation)
