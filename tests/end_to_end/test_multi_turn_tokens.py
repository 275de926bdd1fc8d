"""Conversations on a real engine: one sequence whose logprobs a forward pass confirms."""

from __future__ import annotations

import pytest

from atroposlib.envs.conversation import Reply
from atroposlib.envs.multi_turn_env import Limits, TokenPolicy, group_of_rollouts, play
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.scored_data import IGNORE_INDEX, check_group
from tests.end_to_end.conftest import MAX_MODEL_LEN, EngineWithModel
from tests.end_to_end.test_vllm_exact_tokens import TOLERANCE, assert_aligned, worst_difference
from tests.envs.conversations import ScriptedConversation

pytestmark = pytest.mark.slow


async def test_turns_are_one_sequence_with_the_logprobs_of_the_model(
    vllm_engine: EngineWithModel,
) -> None:
    config = APIServerConfig(
        base_url=vllm_engine.base_url,
        server_type="vllm",
        model_name=vllm_engine.model_name,
        tokenizer_name=str(vllm_engine.folder),
    )
    replies = [Reply("higher", reward=0.5), Reply("lower"), Reply(reward=1.0, is_done=True)]
    manager = ServerManager([config])
    try:
        async with manager.managed_server(tokenizer=vllm_engine.tokenizer) as session:
            # An untrained model seldom ends a turn by itself; the raw logprobs show no bias.
            bias = {str(vllm_engine.tokenizer.eos_token_id): 8.0}
            policy = TokenPolicy(session, vllm_engine.tokenizer, temperature=1.0, logit_bias=bias)
            rollout = await play(
                ScriptedConversation(replies), policy, limits=Limits(max_tokens=MAX_MODEL_LEN)
            )
    finally:
        await manager.close()

    assert rollout.outcome == "done"
    [sequence] = rollout.sequences
    assert [span.turn for span in sequence.spans] == [0, 1, 2]
    trained = {p for _, start, end in sequence.spans for p in range(start, end)}
    assert trained == {p for p, mask in enumerate(sequence.masks) if mask != IGNORE_INDEX}
    node = SequenceNode(
        full_text="",
        tokens=sequence.tokens,
        masked_tokens=sequence.masks,
        logprobs=sequence.inference_logprobs,
    )
    assert_aligned(node)
    assert worst_difference(vllm_engine.model, node) < TOLERANCE
    group = group_of_rollouts([rollout], normalization="none")
    check_group(group)
    # returns 1.5, 1.0 and 1.0
    assert group["advantages"] is not None
    first, second, third = sequence.spans
    values = group["advantages"][0]
    assert set(values[first.start : first.end]) == {1.5}
    assert set(values[second.start : second.end] + values[third.start : third.end]) == {1.0}
    assert sum(value != 0.0 for value in values) == len(trained)
