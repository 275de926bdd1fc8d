"""TRL's asynchronous trainer on a CPU, without an engine.

Arguments: address of the service, folder of the model, folder for the output.
"""

import sys

from trl.experimental.async_grpo import AsyncGRPOConfig

from atroposlib.api.trainers.trl import NoWeightTransfer, cpu_trainer_class, from_service

url, model, output = sys.argv[1:]
args = AsyncGRPOConfig(
    output,
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    token_budget=0,
    use_cpu=True,
    bf16=False,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
arguments = from_service(url, args, weight_transfer=NoWeightTransfer(), max_token_len=64)
cpu_trainer_class()(model=model, args=args, **arguments).train()
