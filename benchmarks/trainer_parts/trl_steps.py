"""Optimiser steps of TRL's GRPOTrainer: `python -m trainer_parts.trl_steps TASK`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainer_parts.workload import Workload, current_mib, peak_mib, reset_peak, sequences


class TimedTrainer(GRPOTrainer):
    """Leaves out of its time what it does to make a batch."""

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
    """Times from the first micro-batch of a step to the end of its optimiser step."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.before_mib = 0.0
        self.trainer: TimedTrainer | None = None
        self._started = self._cpu_started = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks; before the first step, look at what is held already."""
        assert self.trainer is not None
        if not self.times:
            self.before_mib = current_mib()
            reset_peak()
        self.trainer.preparing_s = self.trainer.preparing_cpu_s = 0.0
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clocks."""
        assert self.trainer is not None
        self.times.append(time.perf_counter() - self._started - self.trainer.preparing_s)
        cpu_s = time.process_time() - self._cpu_started
        self.cpu_times.append(cpu_s - self.trainer.preparing_cpu_s)


def config_of(task: dict[str, Any], workload: Workload) -> GRPOConfig:
    """Return the settings under which both trainers compute the same gradient."""
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
    """Make the steps and write what they took."""
    task = json.loads(sys.argv[1])
    workload = Workload(**task["workload"])
    flat = sequences(workload)
    scores = [s["score"] for s in flat]

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        # Prompts come as `p<group>`, each so often as a group has members, in any order of groups.
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
    step_s = min(timer.times[1:])
    tokens = sum(len(s["prompt"]) + len(s["completion"]) for s in flat)
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    found = {
        "tokens_per_s": tokens / step_s,
        "step_s": step_s,
        "step_cpu_s": min(timer.cpu_times[1:]),
        "peak_mib": peak_mib(),
        "peak_above_model_mib": peak_mib() - timer.before_mib,
        "first_grad_norm": norms[0],
    }
    Path(task["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
