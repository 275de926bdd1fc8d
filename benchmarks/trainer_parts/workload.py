"""Batch and model of all contenders, and the measurements of their steps."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["StepLog", "Workload", "sequences", "write_model"]

_FIRST_WORD = 3  # 0 pads, 1 ends


class Workload(NamedTuple):
    """Sizes of the batch and of the model."""

    num_groups: int = 4
    group_size: int = 8
    microbatch: int = 8
    """Sequences per forward pass."""
    prompt_tokens: int = 32
    median_tokens: int = 48
    spread: float = 1.0
    """Standard deviation of the logarithm of a completion's length."""
    most_tokens: int = 512
    vocabulary: int = 8192
    hidden: int = 192
    layers: int = 4
    steps: int = 3
    """Timed steps; one more step warms up."""
    seed: int = 0

    @property
    def num_sequences(self) -> int:
        """Sequences per optimizer step."""
        return self.num_groups * self.group_size

    def describe(self) -> str:
        """Return a description of the batch."""
        lengths = [len(s["completion"]) for s in sequences(self)]
        return (
            f"{self.num_sequences} sequences per step, {self.microbatch} per forward pass, prompts "
            f"of {self.prompt_tokens} tokens, completions of {statistics.median(lengths):.0f} "
            f"(median), {statistics.fmean(lengths):.0f} (mean), {max(lengths)} (maximum); "
            f"{self.layers} layers of {self.hidden}, {self.vocabulary} words"
        )


def sequences(workload: Workload) -> list[dict[str, Any]]:
    """Return prompt, completion and score of every sequence, in the order of groups."""
    rng = random.Random(workload.seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(_FIRST_WORD, workload.vocabulary) for _ in range(count)]

    result = []
    for _ in range(workload.num_groups):
        prompt = words(workload.prompt_tokens)
        for _ in range(workload.group_size):
            length = rng.lognormvariate(0, workload.spread) * workload.median_tokens
            length = min(workload.most_tokens, max(1, round(length)))
            result.append(
                {"prompt": prompt, "completion": words(length), "score": float(rng.random() < 0.5)}
            )
    return result


def write_model(directory: Path, workload: Workload) -> None:
    """Save a model with random weights and a tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(workload.seed)
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=workload.vocabulary,
            hidden_size=workload.hidden,
            intermediate_size=3 * workload.hidden,
            num_hidden_layers=workload.layers,
            num_attention_heads=workload.hidden // 64,
            num_key_value_heads=max(1, workload.hidden // 128),
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            use_cache=False,
        )
    ).save_pretrained(directory)
    words = Tokenizer(
        models.WordLevel({f"w{i}": i for i in range(workload.vocabulary)}, unk_token="w2")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(
        directory
    )


class StepLog:
    """Durations of steps and gradient norms; memory is measured from its creation.

    The fastest step after the first one counts.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        self.norms: list[float] = []
        self._before_mib = current_mib()
        reset_peak()

    def write(self, path: str, workload: Workload) -> None:
        """Write the results as JSON."""
        step_s = min(self.times[1:])
        num_tokens = sum(len(s["prompt"]) + len(s["completion"]) for s in sequences(workload))
        results = {
            "tokens_per_s": num_tokens / step_s,
            "step_s": step_s,
            "step_cpu_s": min(self.cpu_times[1:]),
            "peak_mib": peak_mib(),
            "peak_above_model_mib": peak_mib() - self._before_mib,
            "first_grad_norm": self.norms[0],
        }
        Path(path).write_text(json.dumps(results))


def reset_peak() -> None:
    """Reset the peak memory of this process in the kernel."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float:
    """Return the peak resident memory since `reset_peak`, in MiB."""
    return _status_mib("VmHWM")


def current_mib() -> float:
    """Return the resident memory, in MiB."""
    return _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
