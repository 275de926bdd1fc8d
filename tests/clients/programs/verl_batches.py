"""Batches as verl's `DataProto`, and the advantages that verl computes from them.

Arguments: address of the service, batches to take. Prints one JSON object per batch.
"""

import json
import sys

from verl import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from atroposlib.api.client import batches
from atroposlib.api.trainers.verl import data_protos

url, num_batches = sys.argv[1], int(sys.argv[2])
with batches(url, batch_size=4, num_steps=num_batches, max_token_len=64) as stream:
    for data in data_protos(stream, pad_token_id=0, prompt_length=4, temperature=1.0):
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
        made = {**columns, **tensors, "computed": advantages.tolist()}
        print(json.dumps(made), flush=True)
