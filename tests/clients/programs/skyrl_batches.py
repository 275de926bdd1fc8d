"""Batches through a generator for SkyRL's trainer, checked by SkyRL itself.

Arguments: address of the service, batches to take. Prints one JSON object per batch.
"""

import asyncio
import json
import sys
import typing

import typing_extensions

if sys.version_info < (3, 12):
    # SkyRL asks for Python 3.12, where pydantic accepts this class.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc]

from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.generators.utils import prepare_generator_input
from skyrl.train.utils.trainer_utils import validate_generator_output

from atroposlib.api.client import batches
from atroposlib.api.trainers.skyrl import service_generator

url, num_batches = sys.argv[1], int(sys.argv[2])
NAMES = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask", "logprobs")


async def main() -> None:
    stream = batches(url, batch_size=4, num_steps=num_batches, max_token_len=64)
    generator = service_generator(stream, temperature=1.0)
    assert isinstance(generator, GeneratorInterface)
    for step in range(num_batches):
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
    await generator.close()


asyncio.run(main())
