"""How fast groups become training data, from a JSONL to each kind of record."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atroposlib.exporting.formats import DPO_FORMATS, SFT_FORMATS, DpoRecipe, SftRecipe
from atroposlib.exporting.groups import ExportGroup, read_jsonl
from atroposlib.exporting.output import open_output
from atroposlib.exporting.report import ExportReport
from atroposlib.exporting.run import export_groups, read_groups
from atroposlib.exporting.selection import PairRule, SelectionRule
from atroposlib.exporting.texts import Decoder, decoder_of

__all__ = ["ExportFigure", "make_tokenizer", "measure_export", "write_groups"]

GROUP_SIZE = 4
PROMPT_TOKENS, COMPLETION_TOKENS = 32, 64


class ExportFigure(NamedTuple):
    """One line of the table."""

    what: str
    num_sequences: int
    """Trajectories read; two per pair written in DPO formats."""
    num_records: int
    seconds: float
    """By the clock."""
    cpu_seconds: float
    """Of all threads."""

    @property
    def sequences_per_s(self) -> float:
        """Trajectories handled a second, by the clock."""
        return self.num_sequences / self.seconds

    @property
    def sequences_per_cpu_s(self) -> float:
        """Trajectories handled in a second of one core."""
        return self.num_sequences / self.cpu_seconds


def make_tokenizer() -> Any:
    """A byte-level tokenizer of a few hundred tokens, with whole words among them."""
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
    """Write groups of four trajectories of 96 tokens, all different, with chats."""
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
    """Export the same groups in several formats; yields a figure for each.

    Args:
        folder: for groups and outputs.
        num_groups: to make and export.
    """
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
    """The floor: msgspec decodes every line, and nothing else happens."""
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
