"""A loop on verl's `DataProto`, and the advantages that verl computes from it.

Argument: file of the loop, as `docs/other_trainers.md` prints it. Prints a JSON object per batch.
"""

import json
import runpy
import sys
from typing import Any

from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage


def step(data: Any) -> None:
    assert isinstance(data, DataProto)
    data.check_consistency()
    merged = DataProto.concat(data.chunk(2))  # what verl does with a batch
    advantages, _ = compute_grpo_outcome_advantage(
        merged.batch["token_level_rewards"],
        merged.batch["response_mask"],
        merged.non_tensor_batch["uid"],
    )
    columns = {key: value.tolist() for key, value in merged.non_tensor_batch.items()}
    tensors = {key: value.tolist() for key, value in merged.batch.items()}
    print(json.dumps({**columns, **tensors, "computed": advantages.tolist()}), flush=True)


runpy.run_path(sys.argv[1])["train"](step, pad_token_id=0)
