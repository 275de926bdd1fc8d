"""TRL's trainer with the arguments of a program, as `docs/other_trainers.md` prints them.

Arguments: the program's file, folder of the model, folder for the output.
"""

import runpy
import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

program, model, output = sys.argv[1:]
arguments = runpy.run_path(program)["arguments"]
trainer = GRPOTrainer(
    model=model,
    train_dataset=Dataset.from_dict({"prompt": ["any"] * 32}),
    args=GRPOConfig(
        max_steps=20,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        num_generations=8,
        max_completion_length=2048,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to=[],
        output_dir=output,
    ),
    **arguments,
)
trainer.train()
