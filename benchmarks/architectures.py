"""Try the makes of models in transformers: packed rows, prefix trees and the torch engine.

Each make has a small model with random weights, whose attention has windows of 32 tokens where the
make has any. Sequences are longer than a window. What the trainer and the engine compute is
compared with the forward pass of the model as transformers loads it:

    attention      the attention of the trainer: ours (atropos_packed) or that of transformers
    rows           packed, or padded with the reason
    equal prefixes computed once, or the reason
    torch engine   served, with prompts that continue finished ones computed from there on or as a
                   whole, or the reason why it is refused at the start
    difference     the largest one of a logprob, over all that is used; above 1e-3 it is an error

Makes that the installed transformers does not have are left out, unless they are named. Takes a
minute and a half.

Usage: python benchmarks/architectures.py [MAKE ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from atroposlib.errors import ConfigError
from example_trainer.batch import make_packed_microbatch
from example_trainer.demo.settings import train_tokenizer
from example_trainer.model import use_packed_attention
from example_trainer.policy import obstacle_to_sharing, probe
from example_trainer.prefix_tree import build_prefix_tree
from example_trainer.rows import Row
from example_trainer.scoring import PolicyScorer
from example_trainer.torch_engine.generation import TorchEngine
from example_trainer.torch_engine.jobs import Job, PromptRequest
from example_trainer.torch_engine.loading import TorchEngineOptions, load_engine

MAKES = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gpt_oss"),
    *("mistral", "ministral3", "mixtral", "gemma", "gemma2", "gemma3_text", "phi3", "phimoe"),
    *("llama4_text", "deepseek_v2", "glm4", "glm4_moe", "olmo2", "olmo3", "olmoe", "smollm3"),
    *("granite", "granitemoe", "granitemoehybrid", "cohere2", "exaone4", "ernie4_5", "lfm2"),
    *("seed_oss", "apertus", "minimax_m2", "stablelm", "starcoder2", "gpt2", "gpt_neox"),
    *("falcon_h1", "jamba", "mamba", "recurrent_gemma", "gemma3n_text", "gemma4_text", "gpt_neo"),
    *("deepseek_v3", "glm4_moe_lite", "qwen3_5_moe_text", "hunyuan_v1_dense", "nemotron_h"),
)
WINDOW = 32
MAX_DIFFERENCE = 1e-3
SETTINGS = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "use_cache": False,
    "sliding_window": WINDOW, "attention_chunk_size": WINDOW, "attention_window_size": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "state_size": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_d_ssm": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings of all makes, each of which has some; other ones are ignored by transformers."""
BOTH_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
COMPRESSED_KEYS = {"num_key_value_heads": 4, "head_dim": 4}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {
        **BOTH_WINDOWS,
        **{"num_kv_shared_layers": 2, "laurel_rank": 4, "hidden_size_per_layer_input": 8},
    },
    "gemma4_text": {
        **BOTH_WINDOWS,
        **{"num_kv_shared_layers": 2, "global_head_dim": 16, "hidden_size_per_layer_input": 8},
        "attention_chunk_size": None,
    },
    "deepseek_v3": COMPRESSED_KEYS,
    "glm4_moe_lite": COMPRESSED_KEYS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
}


@dataclass
class Trial:
    """The outcome for one make."""

    make: str
    attention: str
    rows: str
    trees: str
    engine: str
    difference: float


def build(make: str, vocabulary: int) -> Any:
    """Return a small model of a make whose logits are of the size of trained ones."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[make](
        vocab_size=vocabulary, **{**SETTINGS, **OWN_SETTINGS.get(make, {})}
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(std=0.15)
    return model


def sequences(vocabulary: int) -> list[list[int]]:
    """Return three sequences, two of which begin alike and are longer than a window."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocabulary, (120,), generator=generator).tolist()
    return [ids[:71], [*ids[:40], *ids[71:100]], ids[100:109]]


def try_make(make: str, tokenizer: Any) -> Trial:
    """Compare what the trainer and the engine compute for a make with transformers' own."""
    vocabulary = len(tokenizer)
    model, rows = build(make, vocabulary), sequences(vocabulary)
    expected = [logprobs_of(model, row) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        served, gaps = try_engine(folder, model, rows)
    longest = max(map(len, rows))
    if model.config._attn_implementation in ("sdpa", "eager"):
        use_packed_attention(model, longest=longest)
    can = probe(model, packing="auto")
    scorer = PolicyScorer(
        model,
        distill_temperature=1.0,
        whole_logits=can.whole_logits,
        chunk_tokens=64,
        needs_entropy=False,
    )
    obstacle: str | None = can.obstacle
    if can.packs:
        obstacle = "its head is not a linear layer" if can.whole_logits else None
        gaps += differences(scorer, rows, expected, shares_prefixes=False)
    if can.packs and not can.whole_logits:
        obstacle = obstacle_to_sharing(scorer, longest=longest)
    if obstacle is None:
        gaps += differences(scorer, rows, expected, shares_prefixes=True)
    gaps += [
        float((logprobs_of(model, row) - own).abs().max())
        for row, own in zip(rows, expected, strict=True)
    ]
    return Trial(
        make,
        attention=model.config._attn_implementation,
        rows="packed" if can.packs else f"padded: {can.obstacle}",
        trees=obstacle or "computed once",
        engine=served,
        difference=max(gaps),
    )


def logprobs_of(model: Any, row: Sequence[int]) -> torch.Tensor:
    """Return (L - 1,) logprobs of the tokens after the first."""
    ids = torch.tensor([row])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def differences(
    scorer: PolicyScorer,
    rows: Sequence[list[int]],
    expected: Sequence[torch.Tensor],
    *,
    shares_prefixes: bool,
) -> Iterator[float]:
    """Yield the largest difference of each sequence, packed or as branches of a tree."""
    microbatch = make_packed_microbatch(
        [Row(ids, ids, [1.0] * len(ids), inference_logprobs=None, temperature=1.0) for ids in rows]
    )
    if shares_prefixes:
        tree = build_prefix_tree([ids[:-1] for ids in rows], min_shared=1)
        microbatch = replace(microbatch, tree=replace(tree, longest=max(map(len, rows))))
    scorer.shares_prefixes = shares_prefixes
    with torch.no_grad():
        found = scorer(microbatch).logprobs_BT[0].split([len(row) - 1 for row in rows])
    for ours, own in zip(found, expected, strict=True):
        yield float((ours - own).abs().max())


def try_engine(folder: str, model: Any, rows: Sequence[list[int]]) -> tuple[str, list[float]]:
    """Generate after several prompts at once, then after what continues each.

    Returns the outcome and the largest differences.
    """
    try:
        engine = load_engine(TorchEngineOptions(model=folder, device="cpu")).engine
    except ConfigError as error:
        return f"refused: {str(error).partition(': ')[2].removesuffix('; use vLLM')}", []
    at_start = engine.counts().cached_tokens
    try:
        jobs = generate(engine, rows)
        tokens = [list(job.completions[0].tokens) for job in jobs]
        longer = [row + new + row[:7] for row, new in zip(rows, tokens, strict=True)]
        jobs += generate(engine, longer)
        continues = engine.counts().cached_tokens > at_start
    finally:
        engine.close()
    gaps = []
    for row, job in zip([*rows, *longer], jobs, strict=True):
        [completion] = job.completions
        own = logprobs_of(model, [*row, *completion.tokens])[len(row) - 1 :]
        gaps.append(float((own - torch.tensor(completion.logprobs)).abs().max()))
    return "served" if continues else "served, prompts as a whole", gaps


def generate(engine: TorchEngine, rows: Sequence[list[int]]) -> list[Job]:
    """Return the finished jobs of prompts that run together."""
    num_done = threading.Semaphore(0)
    jobs = [
        Job(PromptRequest(tuple(row), max_tokens=50), on_done=lambda _: num_done.release())
        for row in rows
    ]
    for job in jobs:
        engine.submit(job)
    for _ in jobs:
        num_done.acquire()
    return jobs


def main() -> None:
    """Print the table; exit with 1 if a difference is an error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("makes", nargs="*", default=MAKES, metavar="MAKE")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    import transformers

    unknown = [make for make in args.makes if make not in transformers.CONFIG_MAPPING]
    if unknown and args.makes != MAKES:
        parser.error(f"transformers {transformers.__version__} has no make {', '.join(unknown)}")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    tokenizer = train_tokenizer([[{"role": "user", "content": "abc"}]], max_length=256)
    console, trials = Console(), []
    with console.status("") as status:
        for make in args.makes:
            status.update(make)
            if make in transformers.CONFIG_MAPPING:
                trials.append(try_make(make, tokenizer))
    table = Table("make", "attention", "rows", "equal prefixes", "torch engine", "difference")
    for trial in trials:
        mark = "" if trial.difference < MAX_DIFFERENCE else "[red]WRONG [/red]"
        shown = f"{mark}{trial.difference:.1e}"
        table.add_row(trial.make, trial.attention, trial.rows, trial.trees, trial.engine, shown)
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps([asdict(trial) for trial in trials], indent=1))
    raise SystemExit(any(trial.difference >= MAX_DIFFERENCE for trial in trials))


if __name__ == "__main__":
    main()
