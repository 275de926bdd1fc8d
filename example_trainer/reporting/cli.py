"""Entry point of `atropos-report`: the report of a run as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import CommandParser, end_command
from example_trainer.reporting.writing import REPORT_NAME, write_report

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report; exits 0 when done, 2 on wrong flags or when a file cannot be used."""
    parser = CommandParser(
        prog="atropos-report",
        description="Write the report of a training run: one HTML file with its curves.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "metrics", type=Path, metavar="METRICS.jsonl", help="metrics of the trainer, or its folder"
    )
    parser.add_argument(
        "--output", type=Path, help=f"the HTML file; default: {REPORT_NAME} beside the metrics"
    )
    parser.add_argument(
        "--environment", type=Path, help="metrics of an environment, for its accuracy"
    )
    arguments = parser.parse_args(argv)
    metrics = arguments.metrics
    if metrics.is_dir():
        metrics = metrics / "metrics.jsonl"
    report = arguments.output or metrics.with_name(REPORT_NAME)
    try:
        num_steps = write_report(
            metrics, report, environment_path=arguments.environment, needs_steps=True
        )
    except (ConfigError, OSError) as error:
        end_command("atropos-report", f"error: {error}", code=2)
    print(f"{report}: {num_steps} steps")


if __name__ == "__main__":
    main()
