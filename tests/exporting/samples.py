"""Groups as an environment makes them, and requests for exports of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atroposlib.exporting.formats import DPO_FORMATS, SFT_FORMATS, DpoRecipe, SftRecipe
from atroposlib.exporting.output import kind_of
from atroposlib.exporting.run import ExportRequest, SourceRequest
from atroposlib.exporting.selection import PairRule, SelectionRule

SCORES = (1.0, -1.0, 0.0, 2.0)


def make_group(
    tokenizer: Any,
    question: str,
    answers: Sequence[str],
    scores: Sequence[float] = SCORES,
    *,
    cut: Sequence[int] = (),
) -> dict[str, Any]:
    """A group of one prompt; answers at positions `cut` end without the token that ends a turn."""
    asked = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    group: dict[str, Any] = {
        "tokens": [],
        "masks": [],
        "scores": list(scores),
        "messages": [],
        "inference_logprobs": [],
    }
    for i, answer in enumerate(answers):
        ids = tokenizer.encode(answer, add_special_tokens=False)
        ids = ids if i in cut else [*ids, tokenizer.eos_token_id]
        group["tokens"].append(prompt + ids)
        group["masks"].append([-100] * len(prompt) + ids)
        group["inference_logprobs"].append([1.0] * len(prompt) + [-0.5] * len(ids))
        group["messages"].append([*asked, {"role": "assistant", "content": answer}])
    return group


def make_groups(tokenizer: Any, number: int) -> list[dict[str, Any]]:
    return [
        make_group(
            tokenizer,
            f"What is {i} + {i}?",
            [f"The answer is {i + i + k}" for k in range(len(SCORES))],
        )
        for i in range(number)
    ]


def write_groups(path: Path, groups: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def sft_request(path: Path, source: SourceRequest | Path, **changes: Any) -> ExportRequest:
    """An export of examples; `format` and `rule` as the command has them."""
    form = SFT_FORMATS[changes.pop("format", "atropos")]
    rule = changes.pop("rule", SelectionRule())
    recipe = lambda decode, truncation: SftRecipe(form, rule, decode, truncation)  # noqa: E731
    return _request(path, source, form, recipe, changes)


def dpo_request(path: Path, source: SourceRequest | Path, **changes: Any) -> ExportRequest:
    """An export of pairs."""
    form = DPO_FORMATS[changes.pop("format", "atropos")]
    rule = changes.pop("rule", PairRule())
    recipe = lambda decode, truncation: DpoRecipe(form, rule, decode, truncation)  # noqa: E731
    return _request(path, source, form, recipe, changes)


def _request(
    path: Path,
    source: SourceRequest | Path,
    form: Any,
    recipe: Callable[..., Any],
    changes: dict[str, Any],
) -> ExportRequest:
    if isinstance(source, Path):
        source = SourceRequest("file", file=source)
    settings: dict[str, Any] = {
        "path": path,
        "kind": kind_of(path, changes.pop("output", "auto")),
        "mode": "new",
        "source": source,
        "recipe": recipe,
        "has_score": form.has_score,
        "needs_tokenizer": form.needs_tokenizer,
        "tokenizer": "",
        "max_records": None,
    }
    return ExportRequest(**{**settings, **changes})
