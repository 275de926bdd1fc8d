"""Measure the scheduler of an environment, and a baseline in the same run.

The baseline is a naive loop; in `bounded`, it is the scheduler as it counts by default.

The inference server is simulated, with fixed slots and heavy-tailed latencies. The trainer takes
batches at a fixed rate. All parts are separate processes that communicate over HTTP.

Takes about eleven minutes, a minute and a half per scenario.

Usage: python benchmarks/scheduler.py [--scenario equal slower ...] [--seconds 15] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from scheduler_parts.inference_server import Load
from scheduler_parts.scenario import Outcome, Scenario, run_scenario
from scheduler_parts.word_tokenizer import write_tokenizer

MIXED = Load(most_tokens=2_400)
MANY = Load(slots=2_000, median_tokens=1_200, spread=0.3, most_tokens=2_000, tokens_per_s=100.0)
FEW = Load(slots=64, spread=0.95)
LONG = Load(slots=64, median_tokens=30_000, spread=0.1, most_tokens=32_768, tokens_per_s=4_096.0)

SCENARIOS = {
    "equal": Scenario(MIXED, trainer_pace=1.0),
    # With small batches, the queue reaches the off-policy bound within the warm-up.
    "slower": Scenario(
        MIXED, trainer_pace=0.5, batch_size=32, max_batches_offpolicy=24, warm_up_s=25.0
    ),
    "ahead": Scenario(
        MIXED, trainer_pace=0.5, batch_size=32, max_batches_offpolicy=1_000, warm_up_s=8.0
    ),
    "bounded": Scenario(
        FEW,
        trainer_pace=1.5,
        batch_size=64,
        max_batches_offpolicy=3,
        straggler_batches=0.75,
        warm_up_s=20.0,
    ),
    "many": Scenario(
        MANY,
        trainer_pace=1.5,
        batch_size=512,
        max_batches_offpolicy=16,
        max_workers=384,
        warm_up_s=15.0,
    ),
    "sending": Scenario(
        LONG,
        trainer_pace=0.5,
        batch_size=16,
        max_workers=8,
        max_batches_offpolicy=12,
        local_length=32_768,
        local_s=8.0,
    ),
    "long": Scenario(
        dataclasses.replace(LONG, tokens_per_s=2_048.0),
        trainer_pace=1.0,
        batch_size=16,
        max_workers=8,
        max_batches_offpolicy=12,
        warm_up_s=18.0,
    ),
}
"""Scenarios by name. In `equal`, the trainer is as fast as the engine. In `slower`, it is slower,
and the off-policy bound limits generation to its rate; in `ahead`, the bound is not reached. In
`bounded`, the trainer waits for the engine, and the bound counts what still runs instead of whole
groups. `many` keeps 3,072 requests in flight. `sending` posts prepared groups of 8 x 32k tokens,
and `long` also receives them from the engine as JSON."""


class Figure(NamedTuple):
    """One row per scenario of the table."""

    name: str
    of: Callable[[Scenario, Outcome], float]
    form: str


def _share_of_allowed(scenario: Scenario, outcome: Outcome) -> float:
    return outcome.utilization / scenario.allowed_utilization


FIGURES = (
    Figure("slots busy", lambda _, o: o.utilization, "{:.1%}"),
    Figure("  of what the trainer's pace allows", _share_of_allowed, "{:.1%}"),
    Figure("generated tokens delivered", lambda _, o: o.delivered_share, "{:.2%}"),
    Figure("sequences trained on per second", lambda _, o: o.taken_per_s, "{:.1f}"),
    Figure("completions in flight, mean", lambda _, o: o.mean_in_flight, "{:,.0f}"),
    Figure("tokens of aborted requests", lambda _, o: o.aborted_tokens, "{:,.0f}"),
    Figure("staleness of groups, mean steps", lambda _, o: o.mean_staleness, "{:.2f}"),
    Figure("  share within the off-policy bound", lambda _, o: o.share_within_bound, "{:.1%}"),
    Figure("loop stall p50", lambda _, o: o.stall_p50_ms, "{:.2f} ms"),
    Figure("loop stall p99", lambda _, o: o.stall_p99_ms, "{:.2f} ms"),
    Figure("loop stall max", lambda _, o: o.stall_max_ms, "{:.1f} ms"),
    Figure("loop stall p99, own processor time only", lambda _, o: o.own_stall_p99_ms, "{:.2f} ms"),
    Figure("loop stall p99 of an idle process", lambda _, o: o.idle_p99_ms, "{:.2f} ms"),
    Figure("environment CPU per delivered token", lambda _, o: o.cpu_us_per_token, "{:.2f} us"),
)
OF_THE_ENGINE = frozenset(figure.name for figure in (*FIGURES[:3], *FIGURES[4:6]))
"""Figures that are undefined without an engine."""

TARGETS: dict[tuple[str, str], tuple[str, Callable[[float], bool]]] = {
    ("equal", "  of what the trainer's pace allows"): (">= 95%", lambda v: v >= 0.95),
    ("slower", "  of what the trainer's pace allows"): (">= 95%", lambda v: v >= 0.95),
    ("ahead", "slots busy"): (">= 95%", lambda v: v >= 0.95),
    ("ahead", "generated tokens delivered"): (">= 99%", lambda v: v >= 0.99),
    ("bounded", "slots busy"): (">= 95%", lambda v: v >= 0.95),
    ("bounded", "tokens of aborted requests"): ("0", lambda v: v == 0),
    ("bounded", "staleness of groups, mean steps"): ("<= 3", lambda v: v <= 3.0),
    ("equal", "generated tokens delivered"): (">= 99%", lambda v: v >= 0.99),
    ("slower", "generated tokens delivered"): (">= 99%", lambda v: v >= 0.99),
    ("many", "completions in flight, mean"): (">= 2,000", lambda v: v >= 2_000),
    ("sending", "loop stall p99"): ("< 5 ms", lambda v: v < 5.0),
    ("long", "loop stall p99"): ("< 5 ms", lambda v: v < 5.0),
}


def rows_of(
    name: str, scenario: Scenario, ours: Outcome, baseline: Outcome | None
) -> list[tuple[str, str, str, str, str, str]]:
    """Return the rows of one scenario: name, value, target, met, value of the baseline, ratio."""
    rows = []
    for figure in FIGURES:
        if scenario.local_length and figure.name in OF_THE_ENGINE:
            continue
        value = figure.of(scenario, ours)
        target, is_met = TARGETS.get((name, figure.name), ("", None))
        met = "" if is_met is None else ("yes" if is_met(value) else "NO")
        other, ratio = "", ""
        if baseline is not None:
            other_value = figure.of(scenario, baseline)
            other = figure.form.format(other_value)
            ratio = f"{value / other_value:.2f}" if other_value else ""
        rows.append((figure.name, figure.form.format(value), target, met, other, ratio))
    failures = dict(ours.failures)
    rows.append(("failures and drops", str(failures or "none"), "", "", "", ""))
    return rows


def main() -> None:
    """Run the selected scenarios and print one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each measurement")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--without-naive", action="store_true", help="measure the scheduler only")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    console = Console(width=150)
    table = Table("scenario", "figure", "scheduler", "target", "met", "baseline", "ratio")
    written: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder))
        for name in arguments.scenario:
            scenario = dataclasses.replace(SCENARIOS[name], window_s=arguments.seconds)
            console.print(f"running {name} ...", style="dim")
            ours = run_scenario(scenario, tokenizer)
            baseline = None
            if not arguments.without_naive:
                baseline = run_scenario(scenario.baseline, tokenizer)
            for number, row in enumerate(rows_of(name, scenario, ours, baseline)):
                table.add_row(name if number == 0 else "", *row)
                console.print("  " + " | ".join(row), style="dim", highlight=False)
            table.add_section()
            written[name] = {
                "scenario": dataclasses.asdict(scenario),
                "scheduler": dataclasses.asdict(ours),
                "baseline": None if baseline is None else dataclasses.asdict(baseline),
            }
    console.print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=2))


if __name__ == "__main__":
    main()
