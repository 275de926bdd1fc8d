"""Records of every format, by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from atroposlib.exporting.formats import (
    DPO_FORMATS,
    SFT_FORMATS,
    ChatError,
    DpoRecipe,
    SftRecipe,
    openai_chat,
    split_chats,
)
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.output import content_key, encode_line
from atroposlib.exporting.report import ExportReport, report_text
from atroposlib.exporting.selection import PairRule, SelectionRule, TruncationRule
from atroposlib.exporting.texts import decoder_of, split_texts

X = -100
ASK = {"role": "user", "content": "P:"}


class Letters:
    """One token per character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def ids(text: str) -> list[int]:
    return [ord(character) for character in text]


def group_of(*completions: str, scores: list[float], prompt: str = "P:") -> ExportGroup:
    return ExportGroup(
        tokens=[ids(prompt + text) for text in completions],
        masks=[[X] * len(prompt) + ids(text) for text in completions],
        scores=scores,
        messages=[[ASK, {"role": "assistant", "content": text}] for text in completions],
    )


class SpacedLetters(Letters):
    """Leaves out the first space, as tokenizers of SentencePiece do."""

    def decode(self, ids: list[int]) -> str:
        return super().decode(ids).removeprefix(" ")


def sft_records(
    group: ExportGroup, form: str, tokenizer: Letters | None = None, **rule: Any
) -> list[Any]:
    decode = decoder_of(tokenizer or Letters())
    recipe = SftRecipe(SFT_FORMATS[form], SelectionRule(**rule), decode)
    return [built.record for built in recipe.build(recipe.pick(group, "line 1").picks)]


def dpo_records(group: ExportGroup, form: str) -> list[Any]:
    recipe = DpoRecipe(DPO_FORMATS[form], PairRule("one-per-group"), decoder_of(Letters()))
    return [built.record for built in recipe.build(recipe.pick(group, "line 1").picks)]


GROUP = group_of("good", "bad", scores=[1.0, -1.0])
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))


@pytest.mark.parametrize(
    ("form", "record"),
    [
        ("atropos", {"prefix": "P:", "completion": "good"}),
        ("atropos-messages", {"messages": [ASK, GOOD]}),
        ("trl", {"prompt": "P:", "completion": "good"}),
        ("trl-messages", {"messages": [ASK, GOOD]}),
        ("trl-chat", {"prompt": [ASK], "completion": [GOOD]}),
        (
            "axolotl",
            {"segments": [{"label": False, "text": "P:"}, {"label": True, "text": "good"}]},
        ),
        ("axolotl-chat", {"messages": [ASK, GOOD]}),
        ("openai", {"messages": [ASK, GOOD]}),
        (
            "tokens",
            {
                "input_ids": ids("P:good"),
                "attention_mask": [1] * 6,
                "labels": [X, X, *ids("good")],
            },
        ),
    ],
)
def test_sft_record(form: str, record: dict[str, Any]) -> None:
    assert sft_records(GROUP, form) == [record]


@pytest.mark.parametrize(
    ("form", "record"),
    [
        ("atropos", {"prefix": "P:", "pos": "good", "neg": "bad"}),
        ("atropos-messages", {"pos": [ASK, GOOD], "neg": [ASK, BAD]}),
        ("trl", {"prompt": "P:", "chosen": "good", "rejected": "bad"}),
        ("trl-implicit", {"chosen": "P:good", "rejected": "P:bad"}),
        ("trl-chat", {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}),
        ("trl-chat-implicit", {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}),
        ("axolotl", {"prompt": "P:", "chosen": "good", "rejected": "bad"}),
        ("axolotl-chat", {"messages": [ASK], "chosen": GOOD, "rejected": BAD}),
        (
            "openai",
            {
                "input": {"messages": [ASK]},
                "preferred_output": [GOOD],
                "non_preferred_output": [BAD],
            },
        ),
    ],
)
def test_dpo_record(form: str, record: dict[str, Any]) -> None:
    assert dpo_records(GROUP, form) == [record]


def test_every_format_is_tried_above() -> None:
    tried_sft, tried_dpo = (
        {case[0] for case in test.pytestmark[0].args[1]}
        for test in (test_sft_record, test_dpo_record)
    )

    assert (tried_sft, tried_dpo) == (set(SFT_FORMATS), set(DPO_FORMATS))


def test_answers_that_begin_alike_are_cut_where_the_mask_says() -> None:
    group = group_of("The answer is 1", "The answer is 2", scores=[1.0, 0.5])

    records = sft_records(group, "atropos")

    assert [record["completion"] for record in records] == ["The answer is 1", "The answer is 2"]


def test_prefix_that_comes_again_in_the_completion_is_kept_there() -> None:
    group = group_of("a", "aPa", scores=[1.0, 2.0], prompt="P")

    assert sft_records(group, "atropos") == [
        {"prefix": "P", "completion": "aPa"},
        {"prefix": "P", "completion": "a"},
    ]


def test_group_without_a_common_prefix_gives_empty_prefixes() -> None:
    group = ExportGroup(tokens=[ids("ab"), ids("cd")], scores=[1.0, 2.0])

    assert sft_records(group, "atropos") == [
        {"prefix": "", "completion": "cd"},
        {"prefix": "", "completion": "ab"},
    ]


def test_lone_trajectory_has_its_prompt_from_its_mask() -> None:
    assert sft_records(group_of("x", scores=[1.0]), "atropos") == [
        {"prefix": "P:", "completion": "x"}
    ]


def test_pair_of_different_prompts_shares_what_both_begin_with() -> None:
    group = ExportGroup(
        tokens=[ids("Pab"), ids("Pcd")], masks=[[X, X, 98], [X, X, 100]], scores=[1.0, -1.0]
    )

    assert dpo_records(group, "trl") == [{"prompt": "P", "chosen": "ab", "rejected": "cd"}]


def test_segments_of_several_turns_keep_what_is_not_trained_on_apart() -> None:
    group = ExportGroup(tokens=[ids("qaQb")], masks=[[X, ord("a"), X, ord("b")]], scores=[1.0])

    [record] = sft_records(group, "axolotl")

    assert [(s["label"], s["text"]) for s in record["segments"]] == [
        (False, "q"),
        (True, "a"),
        (False, "Q"),
        (True, "b"),
    ]


def test_segments_keep_the_space_that_a_tokenizer_leaves_out_at_the_start() -> None:
    masks = [[X, *ids(" a"), X, X, *ids(" b")]]
    group = ExportGroup(tokens=[ids("q a Q b")], masks=masks, scores=[1.0])

    [record] = sft_records(group, "axolotl", SpacedLetters())

    assert [segment["text"] for segment in record["segments"]] == ["q", " a", " Q", " b"]


def test_boundary_inside_a_character_keeps_all_bytes(tokenizer: Any) -> None:
    row = tokenizer.encode("x\N{SNOWMAN}y", add_special_tokens=False)
    cut = 2  # after x and the first of three bytes

    [pair] = split_texts([(row, cut)], decoder_of(tokenizer))

    assert pair.prompt == tokenizer.decode(row[:cut])
    assert pair.completion == tokenizer.decode(row[cut:])


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no messages"),
        ([ASK], "the last message is not the assistant's"),
        ([ASK, {"content": "x"}], "a message without a role"),
        (
            [{"role": "moderator", "content": "x"}, GOOD],
            "a role that OpenAI's format does not support",
        ),
        ([{"role": "tool", "content": "x"}, GOOD], "a tool message without tool_call_id"),
        ([ASK, {"role": "assistant", "tool_calls": ["x"]}], "a tool call without a function"),
    ],
)
def test_chat_that_openai_would_refuse_is_left_out_with_the_reason(
    messages: Any, reason: str
) -> None:
    group = ExportGroup(tokens=[[1, 2]], scores=[1.0], messages=[messages])
    recipe = SftRecipe(SFT_FORMATS["openai"], SelectionRule(), None)

    picked = recipe.pick(group, "line 1")
    built = recipe.build(picked.picks)

    assert [*picked.dropped, *(entry.reason for entry in built)] == [reason]


def test_openai_chat_has_tool_arguments_as_text_and_no_other_keys() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "agent", "content": "2"},
    ]
    group = ExportGroup(tokens=[[1, 2]], scores=[1.0], messages=[chat])

    [record] = sft_records(group, "openai")

    assert record["messages"][1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        ],
    }
    assert record["messages"][3] == {"role": "assistant", "content": "2"}


def test_equal_chats_make_no_pair() -> None:
    group = group_of("same", "same", scores=[1.0, -1.0])

    assert dpo_records(group, "trl-chat") == [None]
    with pytest.raises(ChatError, match="starts with the other"):
        split_chats([ASK], [ASK])


def test_truncated_trajectories_are_seen_by_their_last_trained_token() -> None:
    end = ord("E")
    group = ExportGroup(
        tokens=[ids("PaE\n"), ids("Pa"), ids("PbE")],
        masks=[[X, 97, end, X], [X, 97], [X, 98, end]],
        scores=[1.0, 3.0, 2.0],
    )

    def whole(*, drops: bool) -> list[bool]:
        rule = TruncationRule({end}, drops)
        recipe = SftRecipe(SFT_FORMATS["tokens"], SelectionRule(), None, rule)
        return [built.is_truncated for built in recipe.build(recipe.pick(group, "g").picks)]

    assert whole(drops=False) == [True, False, False]
    assert whole(drops=True) == [False, False]


@pytest.mark.parametrize(
    ("text", "is_truncated"),
    [("aE", False), ("aE\n", False), ("aE\n\n", False), ("a\n", True), ("\n", True), ("aEb", True)],
)
def test_line_break_that_a_template_trains_after_the_end_is_not_a_truncation(
    text: str, is_truncated: bool
) -> None:
    group = ExportGroup(tokens=[ids("P" + text)], masks=[[X, *ids(text)]], scores=[1.0])
    rule = TruncationRule({ord("E")}, False, {ord("\n")})
    recipe = SftRecipe(SFT_FORMATS["tokens"], SelectionRule(), None, rule)

    (built,) = recipe.build(recipe.pick(group, "g").picks)

    assert built.is_truncated is is_truncated


def test_report_of_dropped_truncated_trajectories_does_not_deny_them() -> None:
    report = ExportReport(dropped=Counter(truncated=2), knows_truncation=True)

    assert "truncated: none" not in report_text(report, unit="examples")

    report.add_record(where="line 1", score=1.0, length=3, is_truncated=False)
    assert "truncated: none of the examples" in report_text(report, unit="examples")


def test_content_key_is_that_of_the_record_without_its_score() -> None:
    record = {"prefix": "P", "completion": "a"}

    one, other = encode_line(record, score=1.0), encode_line(record, score=2.0)

    assert one.key == other.key == content_key({"completion": "a", "prefix": "P", "score": 3})
    assert one.key != content_key({"prefix": "P", "completion": "b"})
    assert one.content == b'{"prefix":"P","completion":"a","score":1.0}'


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    line = encode_line(
        {"text": "a\ud800b\ud83d\ude00", "messages": [{"content": "\udfff"}]}, score=None
    )

    assert line.is_repaired
    assert (
        line.content.decode() == '{"text":"a\ufffdb\U0001f600","messages":[{"content":"\ufffd"}]}'
    )


@pytest.mark.parametrize("calls", [True, 3, {"function": {"name": "f"}}])
def test_tool_calls_that_are_not_a_list_are_a_reason_for_the_report(calls: Any) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]

    with pytest.raises(ChatError, match="tool calls that are not a list"):
        openai_chat(chat)
