"""Optimizer steps of TRL and of our layouts on the same data, with equal first gradients."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from example_trainer.metrics import ModelShape, peak_flops_of
from h200_parts.device import matmul_tflops
from h200_parts.records import PartTask, Records
from trainer_parts import our_steps, trl_steps
from trainer_parts.models import MODEL_SIZES, write_model
from trainer_parts.step_log import gradient_gap
from trainer_parts.tasks import Measured, StepTask
from trainer_parts.workload import Workload, sequences

WORKLOADS = (
    Workload("16k rows", 1, prompt_tokens=512, median_tokens=15872, spread=0.0, most_tokens=15872,
        group_size=4, pass_tokens=16384, pass_sequences=1, steps=2),
    Workload("plain 2k to 4k rows", 4, prompt_tokens=512, median_tokens=2560, spread=0.25,
        most_tokens=3584, least_tokens=1536, pass_tokens=16384, pass_sequences=4, steps=2),
    Workload("heavy-tailed", 4, prompt_tokens=256, median_tokens=1024, spread=1.0,
        most_tokens=8192, pass_tokens=16384, pass_sequences=2, steps=2),
    Workload("shared prefix", 4, prompt_tokens=3072, median_tokens=1024, spread=0.2,
        most_tokens=1536, pass_tokens=16384, pass_sequences=4, steps=2),
)  # fmt: skip
_ONLY = {"16k rows": "step_0.6b", "plain 2k to 4k rows": "step_1.5b"}
"""Part of a workload that not both models train on."""
_TINY_SCALE = 128
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest relative difference of first gradients that counts as equal, by type of the passes."""
_LONGEST_CASE_S = 60.0

_OURS = (
    ("computed", "computed_tokens", "tokens"),
    ("padding", "padding", "of the tokens"),
    ("forward", "forward_time", "s"),
    ("backward", "backward_time", "s"),
    ("optimizer", "optimizer_time", "s"),
    ("trainer's MFU", "mfu", "of the peak"),
)
"""Further figures of our trainer: name, key and unit. Its MFU leaves out what a tree shares."""


class Layout(NamedTuple):
    """A contender: a trainer, its layout, and whether it recomputes activations."""

    name: str
    layout: str | None
    """Layout of our trainer; None: TRL."""
    checkpointing: bool = False


LAYOUTS = (
    Layout("TRL", None),
    Layout("packed", "packed"),
    Layout("tree", "shared"),
    Layout("flat", "padded"),
    Layout("TRL, checkpointing", None, True),
    Layout("packed, checkpointing", "packed", True),
    Layout("compiled", "compiled"),
    Layout("compiled, checkpointing", "compiled", True),
)
_WITH_CHECKPOINTING = ("plain 2k to 4k rows",)


def part(task: PartTask, records: Records) -> None:
    """Measure the chosen workloads with the chosen contenders.

    Raises:
        ValueError: a name is not one of theirs.
    """
    _require_known(task.workloads, [workload.name for workload in WORKLOADS])
    _require_known(task.contenders, [layout.name for layout in LAYOUTS])
    size = MODEL_SIZES[("tiny " if task.is_tiny else "") + task.part.removeprefix("step_")]
    model = write_model(
        Path(task.folder) / "model",
        size,
        device=task.device,
        dtype="bfloat16" if task.on_gpu else "float32",
    )
    rate = matmul_tflops(task)
    for workload in WORKLOADS:
        if _ONLY.get(workload.name, task.part) != task.part:
            continue
        if not _is_chosen(workload.name, task.workloads):
            continue
        chosen = (_tiny(workload) if task.is_tiny else workload)._replace(
            vocabulary=size.vocabulary
        )
        records.figure("batch", chosen.describe(), "", case=workload.name)
        flops = step_flops(model, chosen)
        reference: tuple[str, Mapping[str, Any]] | None = None
        for layout in _layouts_of(workload, task):
            case = f"{workload.name} / {layout.name}"
            with records.case(case):
                found = _measure(task, records, model, chosen, layout, case)
                # TRL's, unless it could not take its steps.
                reference = reference or (layout.name, found.gradient)
                _record(task, records, found, case, flops, rate)
                _compare(task, records, found, *reference, case)
            _free_memory()


def _layouts_of(workload: Workload, task: PartTask) -> list[Layout]:
    """Return the contenders of a workload; the gradient of the first one is the reference."""
    checkpoints = workload.name in _WITH_CHECKPOINTING and not task.is_tiny
    return [
        layout
        for layout in LAYOUTS
        if _is_chosen(layout.name, task.contenders)
        and (checkpoints or not layout.checkpointing)
        # Without a GPU, compiling takes longer than the rest of the rehearsal.
        and (task.on_gpu or layout.layout != "compiled")
    ]


def _require_known(chosen: Sequence[str], names: Sequence[str]) -> None:
    for name in chosen:
        if name not in names:
            raise ValueError(f"expected one of {', '.join(map(repr, names))}, got {name!r}")


def _is_chosen(name: str, chosen: Sequence[str]) -> bool:
    return not chosen or name in chosen


def _tiny(workload: Workload) -> Workload:
    """Return the workload with short sequences, for a rehearsal."""
    scaled = {
        name: max(2, getattr(workload, name) // _TINY_SCALE)
        for name in ("prompt_tokens", "median_tokens", "most_tokens", "least_tokens")
    }
    return workload._replace(**scaled, num_groups=1, pass_tokens=128, steps=1)


def _measure(
    task: PartTask, records: Records, model: Path, workload: Workload, layout: Layout, case: str
) -> Measured:
    if records.seconds_left < _LONGEST_CASE_S and not task.is_tiny:
        raise TimeoutError("no time was left in the part")
    if task.on_gpu:
        held = torch.cuda.memory_allocated(task.device) / 2**30
        records.figure("held before", held, "GiB", case=case)
    work = Path(task.folder) / "work"
    work.mkdir(exist_ok=True)
    step_task = StepTask(
        model=str(model),
        folder=str(work),
        workload=workload,
        layout=layout.layout or "default",
        checkpointing=layout.checkpointing,
        device=task.device,
    )
    contender = trl_steps if layout.layout is None else our_steps
    return contender.measure(step_task)


def _record(
    task: PartTask, records: Records, found: Measured, case: str, flops: float | None, rate: float
) -> None:
    figures = found.figures
    records.figure("speed", figures["tokens_per_s"], "tokens/s", case=case)
    records.figure("step", figures["step_s"], "s", case=case)
    records.figure("forward passes", figures["passes"], "passes", case=case)
    records.figure("peak memory", figures["peak_mib"] / 1024, "GiB", case=case)
    records.figure("above the model", figures["peak_above_model_mib"] / 1024, "GiB", case=case)
    for name, figure, unit in _OURS:
        if figure in figures:
            records.figure(name, figures[figure], unit, case=case)
    if "layout" in figures:
        records.figure("setup", figures["layout"], "", case=case)
    if "planned_mib" in figures:
        records.figure("planned memory", figures["planned_mib"] / 1024, "GiB", case=case)
    if flops is None:
        return
    # FLOPs of whole sequences: a tree computes fewer, so that its value may exceed 1.
    tflops = flops / figures["step_s"] / 1e12
    peak = peak_flops_of(torch.cuda.get_device_name(task.device)) if task.on_gpu else None
    records.figure("model FLOPs", tflops, "TFLOP/s", case=case)
    records.figure("MFU", tflops * 1e12 / peak if peak else None, "of the peak", case=case)
    records.figure("of the matrix product", tflops / rate, "of its rate", case=case)


def _compare(
    task: PartTask,
    records: Records,
    found: Measured,
    name: str,
    reference: Mapping[str, Any],
    case: str,
) -> None:
    gap = gradient_gap(found.gradient, reference)
    tolerance = _TOLERANCE["bfloat16" if task.on_gpu else "float32"]
    records.figure("gradient gap, max", gap.max_abs, "", case=case)
    records.figure("gradient gap, relative", gap.relative, "of its norm", case=case)
    records.check(
        f"first gradient equals that of {name}",
        holds=gap.relative <= tolerance,
        detail=f"{gap.relative:.2g} of the norm over {gap.num_entries:,} entries, at most "
        f"{tolerance:g}",
        case=case,
    )


def step_flops(model: Path, workload: Workload) -> float | None:
    """Return the FLOPs of a step of whole sequences, without recomputation; None if unknown."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        shape = ModelShape.of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)))
    if shape is None:
        return None
    flat = sequences(workload)
    return shape.step_flops(
        [len(s.prompt) + len(s.completion) - 1 for s in flat],
        num_trained_tokens=sum(len(s.completion) for s in flat),
    )


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
