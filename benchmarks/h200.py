"""Measure the trainer on a GPU: speed, MFU, memory, weight changes, agreement with the engine.

Models have random weights in the shapes of Qwen3-0.6B and Qwen2.5-1.5B and are made on the machine,
as are the tokenizers: nothing is downloaded. Each part is a process of its own with at most nine
minutes; a part that fails is reported with its reason, and the others still run.

| part | measures |
|---|---|
| `device` | versions, rate of matrix products and copies |
| `step_0.6b`, `step_1.5b` | optimizer steps of TRL's GRPOTrainer and of our layouts on the same data, whose first gradients must be equal: tokens/s, MFU, peak memory |
| `weights` | share of bfloat16 weights that AdamW changes per step, and its compressed size |
| `gap` | difference of the logprobs of the engine and of the trainer |
| `demo` | the demo on the torch engine |

Both models train on heavy-tailed lengths and on shared prefixes, 0.6B also on rows of 16k tokens and
1.5B on rows of 2k to 4k. Layouts: `flat` pads, `packed` joins sequences in a row, `tree` also computes equal prefixes once,
`compiled` is `packed` with `torch_compile`, which the trainer uses on a GPU by default.
Speed counts the tokens of prompts and completions, the same for all contenders. MFU counts the FLOPs
of whole sequences without recomputation (`ModelShape.step_flops`), so that a tree may exceed 1.

Goals are evaluated on a GPU only. A rehearsal with `--device cpu --tiny` takes a minute or two and
shows that every part works. Exits with 1 if a part failed; a missed goal is not a failure.

Usage: python benchmarks/h200.py [--part step_0.6b] [--workload "16k rows"] [--contender compiled]
       [--json FILE] [--device cpu --tiny]
"""  # noqa: E501

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from h200_parts.records import PartTask

_HERE = Path(__file__).resolve().parent
_LIMIT_S = 540.0
_GRACE_S = 30.0
_MODULES = {
    "device": "device",
    "step_0.6b": "step",
    "step_1.5b": "step",
    "weights": "weights",
    "gap": "gap",
    "demo": "demo",
}


class Goal(NamedTuple):
    """A figure that the trainer should reach on a GPU."""

    name: str
    target: float
    value: float | None
    """None: not measured."""
    is_limit: bool = False
    """Whether the value should be at most the target."""

    def state(self, *, counts: bool) -> str:
        """Return `met` or `missed`, or `not evaluated` on a CPU or without a value."""
        if not counts or self.value is None:
            return "not evaluated"
        is_met = self.value <= self.target if self.is_limit else self.value >= self.target
        return "met" if is_met else "missed"


def run_part(
    name: str,
    *,
    folder: Path,
    device: str,
    is_tiny: bool,
    workloads: Sequence[str] = (),
    contenders: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run a part in a process of its own; return its records, the last of which is its outcome."""
    work = folder / name
    work.mkdir()
    results = work / "results.jsonl"
    task = PartTask(
        part=name,
        module=_MODULES[name],
        device=device,
        is_tiny=is_tiny,
        folder=str(work),
        results=str(results),
        limit_s=_LIMIT_S - _GRACE_S,
        workloads=list(workloads),
        contenders=list(contenders),
    )
    command = [sys.executable, "-m", "h200_parts", json.dumps(task._asdict())]
    started = time.monotonic()
    reason = ""
    try:
        done = subprocess.run(
            command, cwd=_HERE, env=_environment(device), timeout=_LIMIT_S, check=False
        )
        reason = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        reason = f"took more than {_LIMIT_S:g} s"
    records = []
    if results.exists():
        records = [json.loads(line) for line in results.read_text().splitlines()]
    seconds = round(time.monotonic() - started, 1)
    return [*records, {"part": name, "outcome": reason or "completed", "seconds": seconds}]


def _environment(device: str) -> dict[str, str]:
    """Return the variables of a part: our packages, no network, one GPU."""
    paths = [str(_HERE.parent), str(_HERE), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if device == "cpu":
        return {**variables, "CUDA_VISIBLE_DEVICES": ""}
    # TRL would use all visible GPUs.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    memory = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {**memory, **variables, "CUDA_VISIBLE_DEVICES": gpu}


def figure_of(records: Iterable[dict[str, Any]], part: str, name: str, case: str) -> float | None:
    """Return a measured figure, or None."""
    return next(
        (
            record["value"]
            for record in records
            if (record["part"], record.get("figure"), record.get("case")) == (part, name, case)
        ),
        None,
    )


def goals_of(records: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals with their measured values, each of the best of our layouts."""

    def best(
        part: str,
        name: str,
        workload: str,
        layouts: Sequence[str],
        choose: Callable[[list[float]], float] = max,
    ) -> float | None:
        values = [figure_of(records, part, name, f"{workload} / {layout}") for layout in layouts]
        measured = [value for value in values if value is not None]
        return choose(measured) if measured else None

    goals = [
        Goal(
            "tokens/s of 0.6B with rows of 16k tokens",
            30_000,
            best("step_0.6b", "speed", "16k rows", ("packed", "tree", "compiled")),
        ),
        Goal(
            "MFU of 1.5B with rows of 2k to 4k tokens",
            0.4,
            best("step_1.5b", "MFU", "plain 2k to 4k rows", ("packed", "compiled")),
        ),
    ]
    cases = {
        (record["part"], record["case"].rpartition(" / ")[0])
        for record in records
        if record.get("figure") == "peak memory"
    }
    for part, workload in sorted(cases):
        theirs = figure_of(records, part, "peak memory", f"{workload} / TRL")
        ours = best(part, "peak memory", workload, ("packed", "tree", "compiled"), choose=min)
        ratio = ours / theirs if ours is not None and theirs else None
        goals.append(
            Goal(f"peak memory of {part}, {workload}, to TRL's", 0.7, ratio, is_limit=True)
        )
    return goals


def report_of(records: Sequence[dict[str, Any]], *, device: str, is_tiny: bool) -> dict[str, Any]:
    """Return everything that was measured, and the state of each goal."""
    counts = device.startswith("cuda") and not is_tiny
    goals = [goal._asdict() | {"state": goal.state(counts=counts)} for goal in goals_of(records)]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": figure_of(records, "device", "device", "") or device,
        "is_tiny": is_tiny,
        "goals": goals,
        "failures": failures_of(records),
        "records": list(records),
    }


def failures_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """Return one line per check that does not hold and per part that did not complete."""
    found = []
    for record in records:
        case = f" ({record['case']})" if record.get("case") else ""
        if record.get("holds") is False:
            found.append(f"{record['part']}: {record['check']}{case}: no: {record['detail']}")
        elif record.get("outcome", "completed") != "completed":
            found.append(f"{record['part']}: {record['outcome']}")
    return found


def show(report: dict[str, Any]) -> None:
    """Print the figures of each part, the goals and the failures."""
    console = Console(width=120)
    by_table: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in report["records"]:
        if "figure" not in record:
            continue
        if " / " in record["case"]:
            by_table.setdefault((record["part"], _table(record)), []).append(record)
            continue
        case = record["case"] and f" ({record['case']})"
        line = f"{record['part']}{case}: {record['figure']} {_shown(record)} {record['unit']}"
        console.print(line.rstrip(), markup=False, highlight=False)
    for (part, group), records in by_table.items():
        console.print(_table_of(f"{part}, {group}", records))
    goals = Table("goal", "target", "value", "state", title="goals, on a GPU")
    for goal in report["goals"]:
        sign = "at most" if goal["is_limit"] else "at least"
        value = "not measured" if goal["value"] is None else f"{goal['value']:,.3g}"
        goals.add_row(goal["name"], f"{sign} {goal['target']:,g}", value, goal["state"])
    console.print(goals)
    for failure in report["failures"]:
        console.print(failure, style="red", markup=False)
    console.print(f"{len(report['failures'])} failures")


def _table(record: dict[str, Any]) -> str:
    return str(record["case"]).rpartition(" / ")[0]


def _table_of(title: str, records: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per figure and one column per contender or step."""
    columns = list(dict.fromkeys(record["case"] for record in records))
    names = [case.rpartition(" / ")[2] for case in columns]
    table = Table("figure", *names, "unit", title=title)
    for name, unit in dict.fromkeys((record["figure"], record["unit"]) for record in records):
        cells = {r["case"]: _shown(r) for r in records if r["figure"] == name}
        table.add_row(name, *(cells.get(case, "") for case in columns), unit)
    return table


def _shown(record: dict[str, Any]) -> str:
    value = record["value"]
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def main() -> None:
    """Run the parts and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--part", action="append", choices=list(_MODULES), help="only this part; may be repeated"
    )
    parser.add_argument(
        "--workload", action="append", default=[], help="only these batches of steps, by name"
    )
    parser.add_argument(
        "--contender", action="append", default=[], help="only these trainers and layouts, by name"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="models and batches of a rehearsal, without a goal"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.tiny:
        parser.error("the models are too large for --device cpu; add --tiny")
    if arguments.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            parser.error("torch sees no GPU here; rehearse with --device cpu --tiny")
    records: list[dict[str, Any]] = []
    # Durations of a rehearsal do not matter, so that two parts may run at the same time.
    executor = ThreadPoolExecutor(max_workers=2 if arguments.tiny else 1)
    with tempfile.TemporaryDirectory() as folder, executor:
        run = functools.partial(
            run_part,
            folder=Path(folder),
            device=arguments.device,
            is_tiny=arguments.tiny,
            workloads=arguments.workload,
            contenders=arguments.contender,
        )
        for found in executor.map(run, arguments.part or _MODULES):
            records += found
            report = report_of(records, device=arguments.device, is_tiny=arguments.tiny)
            if arguments.json:
                arguments.json.write_text(json.dumps(report, indent=1))
    show(report)
    sys.exit(bool(report["failures"]))


if __name__ == "__main__":
    main()
