"""Optimizer steps of TRL's GRPOTrainer: `python -m trainer_parts.trl_steps TASK`."""

from __future__ import annotations

import sys
import time
from typing import Any

# TRL imports vLLM where it is installed, which takes half a minute; nothing is sampled here.
sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import is_flash_attn_2_available
from trl import GRPOConfig, GRPOTrainer

from trainer_parts.step_log import StepLog
from trainer_parts.tasks import Measured, StepTask, main_of
from trainer_parts.workload import sequences


class TimedTrainer(GRPOTrainer):
    """Measures the time for preparing batches, which does not count."""

    preparing_s = 0.0
    preparing_cpu_s = 0.0

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            return super()._prepare_inputs(generation_batch)
        finally:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.preparing_s += time.perf_counter() - started
            self.preparing_cpu_s += time.process_time() - cpu_started


class StepTimer(TrainerCallback):
    """Times from the first micro-batch of a step to the end of its optimizer step."""

    def __init__(self, device: str) -> None:
        self.log: StepLog | None = None
        self.trainer: TimedTrainer | None = None
        self._device = device

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        if self.log is None:
            self.log = StepLog(self._device)
        self.trainer.preparing_s = self.trainer.preparing_cpu_s = 0.0
        self.log.start()

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        assert self.log is not None
        self.log.keep_first_gradient(model)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        assert self.log is not None
        self.log.stop(
            excluded_s=self.trainer.preparing_s, excluded_cpu_s=self.trainer.preparing_cpu_s
        )


def config_of(task: StepTask) -> GRPOConfig:
    """Return settings with which both trainers compute the same gradient."""
    workload = task.workload
    on_gpu = task.device.startswith("cuda")
    return GRPOConfig(
        output_dir=task.folder,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1e9,
        per_device_train_batch_size=workload.pass_sequences,
        gradient_accumulation_steps=workload.num_sequences // workload.pass_sequences,
        num_generations=workload.group_size,
        max_completion_length=workload.most_tokens,
        max_steps=workload.steps + 1,
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=task.checkpointing,
        logging_steps=1000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def _attention(device: str) -> str:
    has_flash = device.startswith("cuda") and is_flash_attn_2_available()
    return "flash_attention_2" if has_flash else "sdpa"


def measure(task: StepTask) -> Measured:
    """Take the steps of a task."""
    workload = task.workload
    flat = sequences(workload)

    def rollout(prompts: list[str], _: Any) -> dict[str, Any]:
        # Prompts are `p<group>`, once per member of the group, in any order of groups.
        seen: dict[str, int] = {}
        chosen = []
        for prompt in prompts:
            member = seen.get(prompt, 0)
            seen[prompt] = member + 1
            chosen.append(int(prompt[1:]) * workload.group_size + member)
        return {
            "prompt_ids": [flat[i].prompt for i in chosen],
            "completion_ids": [flat[i].completion for i in chosen],
            "logprobs": [[0.0] * len(flat[i].completion) for i in chosen],
            "number": chosen,
        }

    def reward(number: list[int], **_: Any) -> list[float]:
        return [flat[i].score for i in number]

    timer = StepTimer(task.device)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.float32, attn_implementation=_attention(task.device)
    )
    trainer = TimedTrainer(
        model=model,
        args=config_of(task),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [f"p{i}" for i in range(workload.num_groups)]}),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        rollout_func=rollout,
        callbacks=[timer],
    )
    timer.trainer = trainer
    trainer.train()
    assert timer.log is not None
    found = timer.log.results(num_tokens=workload.num_tokens)
    return Measured(
        found | {"passes": trainer.args.gradient_accumulation_steps}, timer.log.gradient
    )


if __name__ == "__main__":
    main_of(measure)
