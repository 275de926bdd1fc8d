"""Every verifiable instruction: texts that follow it, and texts that do not."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from atroposlib.errors import ConfigError, MissingExtraError
from environments.eval_environments import ifeval_eval as ifeval
from environments.eval_environments.ifeval_eval import (
    CHECKS,
    VerifiableInstruction,
    follows,
    follows_loosely,
)

AT_LEAST, LESS = "at least", "less than"
MANY = {"num_sentences": 9, "relation": AT_LEAST}

# id, arguments, texts that follow, texts that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Sun", "rain"]}, ["rain and sun"], ["sun only"]),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": AT_LEAST},
        ["Sun, sun"],
        ["sun"],
    ),
    (
        "keywords:frequency",
        {"keyword": "sun", "frequency": 2, "relation": LESS},
        ["sun", "rain"],
        ["sun sun"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["cat"]},
        ["concatenate"],
        ["a Cat.", "cat"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "e", "let_frequency": 3, "let_relation": AT_LEAST},
        ["Eerie"],
        ["tree"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": AT_LEAST},
        ["One. Two! Three?"],
        ["One, two. Three."],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": LESS},
        ["Dr. A. Smith of the U.S. came at 3.5 p.m. today."],
        ["One. Two."],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["One\n\n***\n\nTwo", "***\nOne\n***\nTwo\n***"],
        ["One", "One\n***\n***\nTwo", "1\n***\n2\n***\n3"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 4, "relation": LESS},
        ["just three words"],
        ["one two three four"],
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "But"},
        ['One day.\n\n"But why?"'],
        ["One day.\n\nSo why?", "But one", "a\n\nbut\n\nc"],
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[name] at [place]"],
        ["[name] at []"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Bye\n\nP.S. call me", "Bye\np. s. call"],
        ["Bye", "maps. Bye"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Bye\nP.P.S call me"],
        ["Bye\nP.S. call me"],
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "List:\n- a\n  - b"],
        ["* a", "* a\n* b\n* c", "**a**\n---\n"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "I say: My answer is maybe."],
        ["Yes", "My answer is perhaps."],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* and *b*", "**a** and *b c*"],
        ["*a*", "* a\n* b", "** **"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "Section A\nSection B"],
    ),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', '```json\n{"a": 1}\n```', "```\n[1]\n```"],
        ["a: 1", 'Here: {"a": 1}'],
    ),
    ("detectable_format:title", {}, ["<<On rain>>\ntext"], ["<On rain>", "<<>>", "<< >>"]),
    (
        "combination:two_responses",
        {},
        ["one\n******\ntwo", "one\n******\ntwo\n******", "******\none\n******\ntwo"],
        ["one", "one******one", "a******b******c", "a******", "a************b", "******a******a"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Say hello."},
        ["say hello. Hello!"],
        ["Hello! Say hello."],
    ),
    ("startend:end_checker", {"end_phrase": "The end."}, ['"So. the end."'], ["The end. No."]),
    ("startend:quotation", {}, ['"quoted"', ' "a "b" c" '], ['"open', '"', "plain"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": AT_LEAST},
        ["NASA and ESA"],
        ["NASA and Esa"],
    ),
    ("change_case:english_capital", {}, ["ALL 3 UP!"], ["All up"]),
    ("change_case:english_lowercase", {}, ["all 3 low!"], ["All low"]),
    ("punctuation:no_comma", {}, ["one; two"], ["one, two"]),
]


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_check(name: str, arguments: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    [instruction] = ifeval.instructions_of([name], [arguments])

    assert [text for text in right if not follows(instruction, text)] == []
    assert [text for text in wrong if follows(instruction, text)] == []


@pytest.mark.parametrize(("name", "arguments"), [case[:2] for case in CASES])
def test_empty_text_follows_nothing(name: str, arguments: dict[str, Any]) -> None:
    [instruction] = ifeval.instructions_of([name], [arguments])

    assert not follows(instruction, "")
    assert not follows_loosely(instruction, " \n ")


def test_every_instruction_of_the_data_set_has_a_case() -> None:
    assert len(CHECKS) == 25
    assert CHECKS.keys() - {case[0] for case in CASES} == {ifeval.LANGUAGE_ID}


def test_language_is_detected() -> None:
    pytest.importorskip("langdetect", reason="the extra instructions is not installed")
    [german] = ifeval.instructions_of([ifeval.LANGUAGE_ID], [{"language": "de"}])

    assert follows(german, "Heute scheint die Sonne, und wir gehen an den See.")
    assert not follows(german, "The sun is out today, so we go to the lake.")
    assert not follows(german, "12345")


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)

    with pytest.raises(MissingExtraError, match=r"\[instructions\]"):
        ifeval.require_language_detection()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No mark at the end", 1),
        ("One. Two.", 2),
        ('She said "Stop." Then she left.', 2),
        ("A title\n\nA sentence. Another one!", 3),
        ("Prices rose 3.5 percent, i.e. much.", 1),
        ("Wait... what?!", 2),
        ("It was J. R. Smith, Jr. who came.", 1),
        ("1. One thing", 2),  # as in any splitter without a model
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert ifeval.count_sentences(text) == count


@pytest.mark.parametrize(("sentence", "count"), [("a1. ", 50_000), ("Mr. ", 1), ("?! ", 0)])
def test_sentences_of_a_long_text(sentence: str, count: int) -> None:
    assert ifeval.count_sentences(sentence * 50_000) == count


def test_loose_result_forgives_an_introduction_and_asterisks() -> None:
    [instruction] = ifeval.instructions_of(["detectable_format:json_format"], [{}])

    assert not follows(instruction, 'Sure, here it is:\n{"a": 1}')
    assert follows_loosely(instruction, 'Sure, here it is:\n{"a": 1}')
    assert follows_loosely(instruction, '{"a": 1}\nI hope it helps.')
    assert len(ifeval.loose_variants("a")) == 8


@pytest.mark.parametrize(
    ("ids", "arguments", "said"),
    [
        (["keyword:existence"], [{}], "did you mean keywords:existence?"),
        (["keywords:existence"], [{"keywords": None}], "has no keywords"),
        (["keywords:existence"], [], "1 entries and kwargs has 0"),
        ([], [], "at least one"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3, "relation": "about"}],
            "expected at least or less than",
        ),
    ],
)
def test_unusable_rows_are_refused(ids: list[str], arguments: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        ifeval.instructions_of(ids, arguments)


def test_arguments_of_other_instructions_are_none_and_left_out() -> None:
    given = {"num_words": None, "keywords": ["a"]}

    assert ifeval.instructions_of(["keywords:existence"], [given]) == (
        VerifiableInstruction("keywords:existence", {"keywords": ["a"]}),
    )


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        (VerifiableInstruction("length_constraints:number_sentences", MANY), "." * 200_000 + "x"),
        (VerifiableInstruction("detectable_format:json_format", {}), "```" + "\n" * 200_000 + "x"),
    ],
)
def test_check_of_repeated_characters_takes_linear_time(
    instruction: VerifiableInstruction, text: str
) -> None:
    assert not follows(instruction, text)
