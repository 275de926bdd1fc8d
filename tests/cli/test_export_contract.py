"""The public functions of the export commands, and their flags with defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from atroposlib.cli import dpo, sft
from atroposlib.errors import ConfigError

X = -100


class Letters:
    """One token per character."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def group_of(*texts: str, scores: list[float], **fields: Any) -> dict[str, Any]:
    return {"tokens": [[ord(c) for c in text] for text in texts], "scores": scores, **fields}


GROUP = group_of("P:a", "P:b", "P:c", "P:d", scores=[1, -1, 0, 2])


def test_sft_group_is_that_of_the_contract() -> None:
    assert sft.grab_group_data(Letters(), GROUP, False, 3) == [
        {"prefix": "P:", "completion": "d", "score": 2.0},
        {"prefix": "P:", "completion": "a", "score": 1.0},
    ]


def test_sft_messages_with_negatives_and_a_difference() -> None:
    group = {**GROUP, "messages": ["a", "b", "c", "d"]}

    records = sft.grab_group_data(Letters(), group, True, 3, True, 0.5)

    assert records == [
        {"messages": "d", "score": 2.0},
        {"messages": "a", "score": 1.0},
        {"messages": "c", "score": 0.0},
    ]


def test_dpo_group_pairs_positives_with_low_ones() -> None:
    seen = set()
    for _ in range(50):
        records = dpo.grab_group_data(Letters(), GROUP, False, 2, False, 0.5)
        assert [(r["prefix"], r["pos"], r["score"]) for r in records] == [
            ("P:", "d", 2.0),
            ("P:", "a", 1.0),
        ]
        assert list(records[0]) == ["prefix", "pos", "score", "neg"]
        seen.add(tuple(record["neg"] for record in records))

    assert seen == {("b", "c"), ("c", "b")}


def test_dpo_messages() -> None:
    group = {**GROUP, "messages": ["a", "b", "c", "d"]}

    [record] = dpo.grab_group_data(Letters(), group, True, 1, False, 0.5)

    assert record == {"pos": "d", "score": 2.0, "neg": "b"}


@pytest.mark.parametrize("module", [sft, dpo])
def test_groups_without_messages_are_said_clearly(module: Any) -> None:
    with pytest.raises(ConfigError, match="include_messages"):
        module.grab_group_data(Letters(), GROUP, True, 3)


@pytest.mark.parametrize("module", [sft, dpo])
def test_find_common_prefix(module: Any) -> None:
    assert module.find_common_prefix([]) == ""
    assert module.find_common_prefix(["P:a", "P:b"]) == "P:"
    assert module.find_common_prefix(["a", "b"]) == ""


def test_signatures() -> None:
    def names(function: Any) -> str:
        return " ".join(inspect.signature(function).parameters)

    shared = "filepath api_url group_size max_token_len tokenizer save_messages"
    rest = "num_seqs_to_save allow_negative_scores minimum_score_diff_max_min append_to_previous"
    assert names(sft.sft_data_grabber) == f"{shared} save_top_n_per_group {rest} tasks_per_step"
    assert names(dpo.dpo_data_grabber) == f"{shared} save_n_pairs_per_group {rest}"
    assert names(sft.register_to_api) == (
        "group_size max_token_len api_url num_steps tasks_per_step"
    )
    assert names(dpo.register_to_api) == "group_size max_token_len api_url num_steps"
    for module in (sft, dpo):
        assert names(module.check_for_batch) == "api_url"
        assert inspect.iscoroutinefunction(module.check_for_batch)
        assert not inspect.signature(module.main).parameters


@pytest.mark.parametrize(
    ("module", "defaults"),
    [
        (sft, {"minimum_score_diff_max_min": 0.0, "save_top_n_per_group": 3, "tasks_per_step": 64}),
        (dpo, {"minimum_score_diff_max_min": 0.5, "save_n_pairs_per_group": 3}),
    ],
)
def test_flags_have_the_defaults_of_the_contract(module: Any, defaults: dict[str, Any]) -> None:
    args = vars(module._parser().parse_args(["out.jsonl"]))

    expected = {
        "filepath": "out.jsonl",
        "api_url": "http://localhost:8000",
        "group_size": 2,
        "max_token_len": 2048,
        "tokenizer": "NousResearch/DeepHermes-3-Llama-3-8B-Preview",
        "save_messages": False,
        "num_seqs_to_save": 100,
        "allow_negative_scores": False,
        "append_to_previous": False,
        **defaults,
    }
    assert {name: args[name] for name in expected} == expected


@pytest.mark.parametrize("module", [sft, dpo])
@pytest.mark.parametrize("count", ["-3", "0", "x"])
def test_no_records_cannot_be_asked_for(
    module: Any, count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        module._parser().parse_args(["out.jsonl", "--num-seqs-to-save", count])

    assert refused.value.code == 2
    assert f"expected an integer of 1 or more, got '{count}'; --all" in capsys.readouterr().err
