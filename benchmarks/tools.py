"""Measure the tools around a run: exports of training data, and the viewer.

Usage: python benchmarks/tools.py [--groups 100000] [--part export|viewer] [--json FILE]

Exports read groups of four trajectories of 97 tokens from a JSONL file and write records of several
formats. The baseline is msgspec decoding the same file; the last column is the processor time
relative to it. `per CPU s` is per second of processor time, `per s` per elapsed second.

The viewer shows the same groups in a browser; times are from a click to the requested page. The
baseline is an empty Gradio event. The last row is the HTML page of the first thousand groups.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from atroposlib.exporting.formats import DPO_FORMATS, SFT_FORMATS, DpoRecipe, SftRecipe
from atroposlib.exporting.groups import ExportGroup, read_jsonl
from atroposlib.exporting.output import open_output
from atroposlib.exporting.report import ExportReport
from atroposlib.exporting.run import export_groups, read_groups
from atroposlib.exporting.selection import PairRule, SelectionRule
from atroposlib.exporting.texts import Decoder, decoder_of
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.viewer.app import build_app, launch_app
from atroposlib.viewer.index import RowFilter
from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer

GROUP_SIZE = 4
PROMPT_TOKENS, COMPLETION_TOKENS = 32, 64
REPEATS = 20
REPORT_GROUPS = 1000
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
_CHANGED = "([selector, before]) => document.querySelector(selector).innerText !== before"


class ExportFigure(NamedTuple):
    """One row of the table of exports."""

    name: str
    num_sequences: int
    """Trajectories read; in DPO formats, two per pair."""
    num_records: int
    seconds: float
    cpu_seconds: float
    """Processor time of all threads."""

    @property
    def sequences_per_s(self) -> float:
        """Trajectories per elapsed second."""
        return self.num_sequences / self.seconds

    @property
    def sequences_per_cpu_s(self) -> float:
        """Trajectories per second of processor time."""
        return self.num_sequences / self.cpu_seconds


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer with a few hundred tokens, some of them whole words."""
    from example_trainer.demo.settings import train_tokenizer

    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmno", k=draw.randint(2, 9))) for _ in range(400)]
    chats = [
        [
            {"role": role, "content": " ".join(draw.choices(words, k=30))}
            for role in ("user", "assistant")
        ]
        for _ in range(200)
    ]
    return train_tokenizer(chats, max_length=1024)


def write_groups(path: Path, tokenizer: Any, *, num_groups: int) -> None:
    """Write groups of four different trajectories of 97 tokens, with messages."""
    draw = random.Random(1)
    pool = draw.choices(range(3, len(tokenizer)), k=100_000)
    masked = [-100] * PROMPT_TOKENS
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for number in range(num_groups):
            start = draw.randrange(len(pool) - 1000)
            prompt = pool[start : start + PROMPT_TOKENS]
            rows = []
            for _ in range(GROUP_SIZE):
                start = draw.randrange(len(pool) - 1000)
                rows.append([*pool[start : start + COMPLETION_TOKENS], tokenizer.eos_token_id])
            group = {
                "tokens": [prompt + row for row in rows],
                "masks": [masked + row for row in rows],
                "scores": [draw.uniform(-1, 1) for _ in rows],
                "messages": [
                    [
                        {"role": "user", "content": f"question {number}"},
                        {"role": "assistant", "content": f"answer {number} {i} " * 10},
                    ]
                    for i in range(GROUP_SIZE)
                ],
            }
            file.write(encode(group) + b"\n")


def measure_export(folder: Path, *, num_groups: int) -> Iterator[ExportFigure]:
    """Export the same groups in several formats; yields a result for each."""
    tokenizer = make_tokenizer()
    source = folder / "groups.jsonl"
    write_groups(source, tokenizer, num_groups=num_groups)
    decode = decoder_of(tokenizer)
    yield _measure_reading(source)
    everything = SelectionRule(GROUP_SIZE, allow_negative=True)
    pairs = PairRule("best-random", 2, allow_negative=True, min_score_diff=0.0)
    recipes: dict[str, tuple[bool, Callable[[Decoder], Any]]] = {
        "sft atropos": (True, lambda d: SftRecipe(SFT_FORMATS["atropos"], everything, d)),
        "sft tokens": (False, lambda d: SftRecipe(SFT_FORMATS["tokens"], everything, d)),
        "sft trl-messages": (
            False,
            lambda d: SftRecipe(SFT_FORMATS["trl-messages"], everything, d),
        ),
        "dpo trl": (False, lambda d: DpoRecipe(DPO_FORMATS["trl"], pairs, d)),
    }
    for name, (has_score, recipe) in recipes.items():
        path = folder / f"{name.replace(' ', '-')}.jsonl"
        yield _measure(name, source, path, recipe(decode), has_score=has_score)
        path.unlink()


def _measure(name: str, source: Path, path: Path, recipe: Any, *, has_score: bool) -> ExportFigure:
    report = ExportReport()
    started, cpu_started = time.perf_counter(), time.process_time()
    output = open_output(path, "jsonl", "new")
    groups = read_groups(read_jsonl(source), report, print)
    export_groups(groups, recipe, output, report, has_score=has_score, max_records=None)
    output.close()
    return ExportFigure(
        name,
        report.num_sequences,
        report.num_records,
        time.perf_counter() - started,
        time.process_time() - cpu_started,
    )


def _measure_reading(source: Path) -> ExportFigure:
    """Measure the baseline: msgspec decodes every line."""
    decoder = msgspec.json.Decoder(ExportGroup)
    started, cpu_started = time.perf_counter(), time.process_time()
    num_sequences = 0
    with source.open("rb") as file:
        for line in file:
            num_sequences += len(decoder.decode(line).tokens)
    return ExportFigure(
        "decoding alone",
        num_sequences,
        0,
        time.perf_counter() - started,
        time.process_time() - cpu_started,
    )


class BrowserFigure(NamedTuple):
    """One row of the table of the viewer, in milliseconds."""

    name: str
    median_ms: float
    slowest_ms: float


def measure_browser(source: Path, tokenizer: Any) -> Iterator[BrowserFigure]:
    """Open a file of groups in the viewer and use it; yields nothing without a browser."""
    path = shutil.which("chromium")
    if path is None:
        return
    from playwright.sync_api import sync_playwright

    started = time.perf_counter()
    viewer = Viewer(JsonlSource(source), TokenReader("benchmark", lambda _: tokenizer))
    while viewer.is_reading or not viewer.reader.wait(1):
        time.sleep(0.01)
    taken_ms = 1000 * (time.perf_counter() - started)
    yield BrowserFigure(f"reading {len(viewer.index):,} groups", taken_ms, taken_ms)
    yield from _searches(viewer)
    app = build_app(viewer)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=list(QUIET))
        page = browser.new_page(viewport={"width": 1366, "height": 768})
        page.goto(_empty_event_url())
        yield _clicks(page, "empty Gradio event", "#empty-button", "#empty-text")
        page.goto(launch_app(app))
        yield from _pages(page)
        browser.close()
    viewer.close()


def measure_report(source: Path) -> Iterator[BrowserFigure]:
    """Write the HTML page of the first thousand groups of a file."""
    part = source.with_name("part.jsonl")
    with source.open("rb") as lines:
        part.write_bytes(b"".join(islice(lines, REPORT_GROUPS)))
    times = [_timed_ms(lambda: _write_report(part)) for _ in range(3)]
    yield _figure(f"page of a file, {REPORT_GROUPS:,} groups", times)


def _write_report(source: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        generate_html(source)


def _pages(page: Any) -> Iterator[BrowserFigure]:
    page.click("#v-tab-groups-button")
    page.wait_for_selector(".v-groups tbody tr")
    yield _clicks(page, "next page of the list", "#v-next-rows", "#v-groups")
    page.click(".v-groups tbody tr")
    page.wait_for_selector("#v-rollouts .v-card")
    yield _clicks(page, "next group, side by side", "#v-next-group", "#v-rollouts")
    page.click("#v-tab-tokens-button")
    page.wait_for_selector("#v-tokens .v-tokens")
    yield _clicks(page, "next group, tokens", "#v-next-group", "#v-tokens")
    page.click("#v-tab-conversation-button")
    page.wait_for_selector("#v-conversation .v-message")
    yield _clicks(page, "next rollout, conversation", "#v-next-rollout", "#v-conversation")


def _clicks(page: Any, name: str, button: str, content: str) -> BrowserFigure:
    """Measure the time from a click until the content changes, several times."""
    times = []
    for _ in range(REPEATS + 1):
        before = page.inner_text(content)
        times.append(
            _timed_ms(lambda before=before: _click(page, button, content, before))  # type: ignore[misc]
        )
    return _figure(name, times[1:])  # the first click warms up


def _click(page: Any, button: str, content: str, before: str) -> None:
    page.click(button)
    page.wait_for_function(_CHANGED, arg=[content, before])


def _searches(viewer: Viewer) -> Iterator[BrowserFigure]:
    """Search for words that occur once and words that occur in all groups."""
    times = []
    for number in range(10):
        wanted = RowFilter(text=f"answer {number}" if number % 2 else f"question {number * 997}")
        times.append(_timed_ms(lambda wanted=wanted: _search(viewer, wanted)))  # type: ignore[misc]
    yield _figure("text search of all groups", times)
    ordered = [_timed_ms(lambda: viewer.index.match(RowFilter(min_score=0.5), "spread"))
               for _ in range(10)]  # fmt: skip
    yield _figure("filter and order of all groups", ordered)


def _search(viewer: Viewer, wanted: RowFilter) -> None:
    while not viewer.match(wanted, "oldest").is_complete:
        pass


def _timed_ms(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - started)


def _figure(name: str, times: list[float]) -> BrowserFigure:
    return BrowserFigure(name, statistics.median(times), max(times))


def _empty_event_url() -> str:
    """Serve the baseline: a page on which a click changes a word."""
    import gradio as gr

    with gr.Blocks(analytics_enabled=False) as blocks:
        button = gr.Button("again", elem_id="empty-button")
        text = gr.HTML("0", elem_id="empty-text")
        options: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
        button.click(lambda: str(time.time()), None, text, **options)
    return launch_app(blocks)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--groups", type=int, default=100_000, help="number of groups to export (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--part", choices=("export", "viewer"), help="measure only this part")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.part != "viewer":
        found["export"] = _export(args.groups)
    if args.part != "export":
        found["viewer"] = _view(args.groups)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")


def _export(num_groups: int) -> list[dict[str, Any]]:
    figures = []
    print(f"{'export':18}{'records':>10}{'sequences per s':>17}{'per CPU s':>11}{'x base':>9}")
    with TemporaryDirectory() as folder:
        for figure in measure_export(Path(folder), num_groups=num_groups):
            figures.append(figure)
            ratio = figure.cpu_seconds / figures[0].cpu_seconds
            print(
                f"{figure.name:18}{figure.num_records:10,}{figure.sequences_per_s:17,.0f}"
                f"{figure.sequences_per_cpu_s:11,.0f}{ratio:9.1f}",
                flush=True,
            )
    return [{**f._asdict(), "sequences_per_cpu_s": f.sequences_per_cpu_s} for f in figures]


def _view(num_groups: int) -> list[dict[str, Any]]:
    figures = []
    tokenizer = make_tokenizer()
    print(f"{'viewer':32}{'median ms':>12}{'slowest ms':>12}")
    with TemporaryDirectory() as folder:
        source = Path(folder) / "groups.jsonl"
        write_groups(source, tokenizer, num_groups=num_groups)
        for figure in chain(measure_browser(source, tokenizer), measure_report(source)):
            figures.append(figure._asdict())
            print(
                f"{figure.name:32}{figure.median_ms:12,.0f}{figure.slowest_ms:12,.0f}", flush=True
            )
    return figures


if __name__ == "__main__":
    main()
