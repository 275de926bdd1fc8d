"""A loop on verl's `DataProto`, and the advantages that verl computes from it.

Argument: file of the loop, as `docs/other_trainers.md` prints it. Prints a JSON object per batch.
"""

import json
import runpy
import sys
from typing import Any

import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.reward import extract_reward

from atroposlib.api.client import LeasedBatch
from atroposlib.api.trainers.verl import data_proto
from atroposlib.errors import ConfigError, GroupError


def step(data: Any) -> None:
    assert isinstance(data, DataProto)
    data.check_consistency()
    merged = DataProto.concat(data.chunk(2))  # what verl does with a batch
    advantages, _ = compute_grpo_outcome_advantage(
        merged.batch["token_level_rewards"],
        merged.batch["response_mask"],
        merged.non_tensor_batch["uid"],
    )
    rewards, parts = extract_reward(merged)  # as verl's trainer reads them
    assert torch.equal(rewards, merged.batch["token_level_scores"])
    assert {key: list(value) for key, value in parts.items()} == {
        "exact": merged.non_tensor_batch["exact"].tolist()
    }
    columns = {key: value.tolist() for key, value in merged.non_tensor_batch.items()}
    tensors = {key: value.tolist() for key, value in merged.batch.items()}
    print(json.dumps({**columns, **tensors, "computed": advantages.tolist()}), flush=True)


def refusal(*groups: dict[str, Any], **options: Any) -> str:
    """Return the error with which a batch is rejected."""
    try:
        data_proto(LeasedBatch(list(groups), "1"), pad_token_id=0, **options)
    except (ConfigError, GroupError) as error:
        return str(error)
    raise AssertionError("the batch was accepted")


def check_advantages_and_refusals() -> None:
    group = {
        "tokens": [[1, 2, 7], [1, 2, 6, 5]],
        "masks": [[-100, -100, 7], [-100, -100, 6, 5]],
        "scores": [1.0, 0.0],
    }
    advantages = [[9.0, 9.0, 0.5], [9.0, 9.0, -0.5, -1.5]]
    zeroed = [{"set_advantage_to_zero": True}, {}]
    data = data_proto(
        LeasedBatch([{**group, "advantages": advantages, "overrides": zeroed}], "1"),
        pad_token_id=0,
        response_length=3,
        takes_advantages=True,
    )
    assert data.batch["advantages"].tolist() == [[0.0, 0.0, 0.0], [-0.5, -1.5, 0.0]]
    assert data.batch["returns"].tolist() == data.batch["advantages"].tolist()
    assert "rollout_log_probs" not in data.batch
    assert "advantages: verl computes its own" in refusal({**group, "advantages": advantages})
    assert "needs response_length 2, and 1 is given" in refusal(group, response_length=1)
    assert "send advantages with it" in refusal(
        {**group, "overrides": zeroed}, takes_advantages=True
    )
    sampled = {**group, "inference_logprobs": [[1.0, 1.0, -1.0], [-1.0] * 4]}
    assert "2 of 4 trajectories" in refusal(group, sampled)


check_advantages_and_refusals()
runpy.run_path(sys.argv[1])["train"](step, pad_token_id=0)
