"""The operators' page says what the service does."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from atroposlib.api import stalls
from atroposlib.api.auth import Role, read_token_file, rule_for
from atroposlib.api.metrics import ServiceMetrics
from tests.api.fake_run import FakeRun

PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text(encoding="utf-8")


def metrics_table() -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    metrics = ServiceMetrics(FakeRun())
    metrics.requests.series("GET", "/status").durations.observe(0)
    metrics.requests.count("GET", "/status", 200)
    for metric in metrics.registry.collect():
        if metric.name.startswith("process_"):
            continue
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        labels |= set(getattr(metric, "_labelnames", ()))
        shown = ", ".join(sorted(labels))
        lines.append(f"| `{name}` | {metric.type} | {shown} | {metric.documentation} |")
    lines.append("| `process_*` | | | memory, CPU, open files and start of the process |")
    return "\n".join(lines)


def test_page_lists_every_metric() -> None:
    _, _, rest = PAGE.partition("<!-- metrics: begin")
    listed = rest.partition("-->")[2].partition("<!-- metrics: end -->")[0].strip()

    assert listed == metrics_table(), f"put this between the marks:\n{metrics_table()}"


def test_page_explains_every_stall() -> None:
    source = Path(stalls.__file__).read_text(encoding="utf-8")
    reasons = set(re.findall(r'Stall\("([a-z]+/[a-z]+)"', source))

    explained = set(re.findall(r"^\| `([a-z]+/[a-z]+)` \|", PAGE, re.MULTILINE))
    assert reasons
    assert explained == reasons


def test_page_lists_what_each_role_may() -> None:
    rows = dict(re.findall(r"^\| (any token|environment|trainer) \| (.*) \|$", PAGE, re.MULTILINE))
    for who, routes in rows.items():
        for route in re.findall(r"`(/[^`]*)`", routes):
            path = route if rule_for(route).route != "unknown" else f"/batch/1-1{route}"
            roles = rule_for(path.replace("ID", "1")).roles
            assert roles == set(Role) if who == "any token" else Role(who) in roles, route


def test_token_lines_of_the_page_are_a_token_file(tmp_path: Path) -> None:
    lines = re.findall(r'^echo "(.*)" >> tokens$', PAGE, re.MULTILINE)
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(
        "\n".join(
            line.replace("$(openssl rand -hex 32)", f"{number:064x}")
            for number, line in enumerate(lines)
        )
    )

    assert len(read_token_file(path)) == 3


def commands() -> list[str]:
    """Return the arguments of every `run-api` of the page's code blocks."""
    blocks = "".join(re.findall(r"```(?:bash|ini)\n(.*?)```", PAGE, re.DOTALL))
    lines = blocks.replace("\\\n", " ")
    return re.findall(r"^(?:exec |ExecStart=\S*/)?run-api (.*?)(?: &)?$", lines, re.MULTILINE)


def test_page_shows_a_command_for_each_way_to_run() -> None:
    shown = " ".join(commands())

    assert len(commands()) == 6
    for flag in ("--run", "--data-dir", "--store", "--token-file", "--host", "--log-format"):
        assert f"{flag} " in shown


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_page_are_understood(command: str) -> None:
    from atroposlib.cli.run_api import _parser

    _parser().parse_args(shlex.split(command))


def test_flags_of_the_page_exist() -> None:
    from atroposlib.cli.run_api import _parser

    known = set(re.findall(r"--[a-z][a-z-]+", _parser().format_help()))
    named = set(re.findall(r"`(--[a-z][a-z-]+)", PAGE))

    assert named <= known


def test_page_is_short() -> None:
    assert len(PAGE.splitlines()) < 225
