"""Optimizer steps of TRL's GRPOTrainer: `python -m trainer_parts.trl_steps TASK`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainer_parts.workload import StepLog, Workload, sequences


class TimedTrainer(GRPOTrainer):
    """Measures the time for preparing batches, which does not count."""

    preparing_s = 0.0
    preparing_cpu_s = 0.0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            return super()._prepare_inputs(generation_batch)
        finally:
            self.preparing_s += time.perf_counter() - started
            self.preparing_cpu_s += time.process_time() - cpu_started


class StepTimer(TrainerCallback):
    """Times from the first micro-batch of a step to the end of its optimizer step."""

    def __init__(self) -> None:
        self.log: StepLog | None = None
        self.trainer: TimedTrainer | None = None
        self._started = self._cpu_started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        if self.log is None:
            self.log = StepLog()
        self.trainer.preparing_s = self.trainer.preparing_cpu_s = 0.0
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        assert self.log is not None
        self.log.times.append(time.perf_counter() - self._started - self.trainer.preparing_s)
        cpu_s = time.process_time() - self._cpu_started
        self.log.cpu_times.append(cpu_s - self.trainer.preparing_cpu_s)


def config_of(task: dict[str, Any], workload: Workload) -> GRPOConfig:
    """Return settings with which both trainers compute the same gradient."""
    return GRPOConfig(
        output_dir=task["folder"],
        use_cpu=True,
        bf16=False,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        per_device_train_batch_size=workload.microbatch,
        gradient_accumulation_steps=workload.num_sequences // workload.microbatch,
        num_generations=workload.group_size,
        max_completion_length=workload.most_tokens,
        max_steps=workload.steps + 1,
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=task["gradient_checkpointing"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Run the steps and write the results."""
    task = json.loads(sys.argv[1])
    workload = Workload(**task["workload"])
    flat = sequences(workload)
    scores = [s["score"] for s in flat]

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        # Prompts are `p<group>`, once per member of the group, in any order of groups.
        seen: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            member = seen.get(prompt, 0)
            seen[prompt] = member + 1
            chosen.append(int(prompt[1:]) * workload.group_size + member)
        return {
            "prompt_ids": [flat[i]["prompt"] for i in chosen],
            "completion_ids": [flat[i]["completion"] for i in chosen],
            "logprobs": [[0.0] * len(flat[i]["completion"]) for i in chosen],
            "number": chosen,
        }

    def reward(number: list[int], **_: Any) -> list[float]:
        return [scores[i] for i in number]

    timer = StepTimer()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(task["model"], attn_implementation="sdpa"),
        args=config_of(task, workload),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [f"p{i}" for i in range(workload.num_groups)]}),
        processing_class=AutoTokenizer.from_pretrained(task["model"]),
        rollout_func=rollout,
        callbacks=[timer],
    )
    timer.trainer = trainer
    trainer.train()
    assert timer.log is not None
    timer.log.norms = [
        line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line
    ]
    timer.log.write(task["result"], workload)


if __name__ == "__main__":
    main()
