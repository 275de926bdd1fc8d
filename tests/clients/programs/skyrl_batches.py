"""Batches through a generator for SkyRL's trainer, checked by SkyRL itself.

Argument: file of the generator, as `docs/other_trainers.md` prints it; it takes two batches.
Prints one JSON object per batch.
"""

import asyncio
import json
import runpy
import sys
import typing

import pytest
import typing_extensions

if sys.version_info < (3, 12):
    # SkyRL asks for Python 3.12, where pydantic accepts this class.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]

from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import BatchMetadata, GeneratorInterface
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.trainer_utils import validate_generator_output

from atroposlib.errors import ConfigError

NAMES = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")


async def main() -> None:
    generator = runpy.run_path(sys.argv[1])["generator"]()
    assert isinstance(generator, GeneratorInterface)
    for step in range(2):
        prompts = [
            {"prompt": [], "env_class": None, "env_extras": {}, "uid": f"prompt {i}"}
            for i in range(2)
        ]
        request, uids = prepare_generator_input(prompts, 2, {}, "service", "train", step)
        output = await generator.generate(request)
        validate_generator_output(len(request["prompts"]), output)
        ids = [one.instance_id for one in output["trajectory_ids"]]
        assert ids == uids
        rewards = [
            [0.0] * (len(response) - 1) + [reward]
            for response, reward in zip(output["response_ids"], output["rewards"], strict=True)
        ]
        tensors = convert_prompts_responses_to_batch_tensors(
            0,
            output["prompt_token_ids"],
            output["response_ids"],
            rewards,
            output["loss_masks"],
            output["rollout_logprobs"],
        )
        made = {key: output[key] for key in ("stop_reasons", "rollout_metrics", "env_metrics")}
        made |= {n: t.tolist() for n, t in zip(NAMES, tensors, strict=False)}
        print(json.dumps(made), flush=True)
    request["batch_metadata"] = BatchMetadata(global_step=3, training_phase="eval")
    with pytest.raises(ConfigError, match=r"trainer\.eval_interval=-1"):
        await generator.generate(request)
    await generator.close()


asyncio.run(main())
