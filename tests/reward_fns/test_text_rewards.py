"""Steps of reasoning, repetition, and metre."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs.reward_fns.chandas_meter_reward import ChandasMeterReward, iast_to_slp1
from atroposlib.envs.reward_fns.reasoning_steps_reward import (
    ReasoningStepsReward,
    reasoning_steps_reward,
)
from atroposlib.envs.reward_fns.repetition_penalty_reward import (
    RepetitionPenaltyReward,
    repetition_penalty_reward,
)
from atroposlib.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Step 1: a Step 2: b Step 3: c", 0.5),
        ("STEP 1 a", 0.5 / 3),
        ("Step 1.", 0.0),  # neither space nor colon
        ("1. a\n  2. b\n3. c", 0.5),
        ("- a\n* b\n  • c", 0.4),
        ("-a", 0.0),
        ("a b c d e f g h i j k", 0.1),  # eleven words
        ("a b c d e f g h i j", 0.0),  # ten
        ("first then finally", 0.3),
        ("To begin, let's begin; I'll first", 0.3),
        ("firstly thence", 0.0),  # whole words only
        ("", 0.0),
        # 0.5 + 0.5 + 0.4 + 0.3 + 0.1 = 1.8, capped
        ("Step 1: Step 2: Step 3:\n1. a\n2. b\n3. c\n- d\n- e\n- f\nfirst then next", 1.0),
    ],
)
def test_reasoning_steps(text: str, expected: float) -> None:
    assert reasoning_steps_reward([text]) == pytest.approx([expected])


def test_reasoning_steps_parameters() -> None:
    reward = ReasoningStepsReward(
        min_words=1, min_steps=1, base_score=0.2, pattern_weights={"bullet_points": 0.6}
    )

    assert reward(["- a", "then", "then so"]) == pytest.approx([0.8, 0.3, 0.5])
    with pytest.raises(ConfigError, match="bullets; expected numbered_steps"):
        ReasoningStepsReward(pattern_weights={"bullets": 1.0})
    with pytest.raises(ConfigError, match="min_steps"):
        ReasoningStepsReward(min_steps=0)


TWICE = "I like big red apples. I like big red apples. ok then now we go on"
ALPHA = " ".join(f"alpha beta gamma delta {n}." for n in ("one", "two", "six"))
PLAIN = "The cat sat near my door. Some rain fell on it, so we let her in."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # one repeat among three sentences: -0.6 - 0.4 / 3
        (TWICE, -0.7333333),
        # word 8/15, phrase (4 + 2 x 4/3)/15, beginning 2/3:
        # 0.3 x 0.53333 + 0.4 x 0.44444 + 0.5 x 0.66667 = 0.67111; (0.67111 - 0.05) / 0.95
        (ALPHA, -0.6538012),
        (PLAIN, 0.0),
        ("", -0.1),
        ("too short", -0.1),
        ("one sentence of more than ten words that just does not end", -0.1),
        # four identical sentences: 3 repeats of 4, -0.6 - 0.4 x 0.75
        ("we go home now. " * 4, -0.9),
        # consecutive 2/14 x 0.6 = 0.0857 is above 0.05 by 3.8 %: at least -0.1
        ("you see see a big red fox. My dog ran ran to him now.", -0.1),
        ("1234 " * 20 + ". a", -1.0),
    ],
)
def test_repetition_penalty(text: str, expected: float) -> None:
    assert repetition_penalty_reward([text]) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("component", "text", "repetition"),
    [
        # aaaa repeats twice; bbbb occurs only twice, cat is short
        ("word_repetition", "aaaa aaaa aaaa bbbb bbbb cat cat cat", 2 / 8),
        ("word_repetition", "with with with aaaa", 0.0),  # a stopword
        # abc bcd cde, abcd bcde, abcde once more: (3 x 1 + 2 x 4/3 + 1 x 5/3) / 10
        ("phrase_repetition", "a b c d e a b c d e", 22 / 30),
        ("consecutive_repetition", "cat cat Cat ab ab ok me", 2 / 7),
        # the third sentence has no three words
        ("beginning_repetition", "I go home. I go home now. I go.", 1 / 3),
        # equal sentences of three words are no repeated sentences, only equal beginnings
        ("beginning_repetition", "I go home. I go home!", 1 / 2),
        ("beginning_repetition", "I go home. i go home!", 0.0),
    ],
)
def test_repetition_penalty_of_one_component(component: str, text: str, repetition: float) -> None:
    names = ("word", "phrase", "consecutive", "beginning")
    weights = {f"{name}_repetition": 0.0 for name in names}
    reward = RepetitionPenaltyReward(
        threshold=0.0, min_words=1, min_sentences=1, component_weights={**weights, component: 1.0}
    )

    assert reward([text]) == pytest.approx([-repetition])


def test_repetition_penalty_compares_sentences_with_case() -> None:
    once = "We go home now. we go home now. I see you there."

    assert repetition_penalty_reward([once])[0] > -0.6


def test_repetition_penalty_parameters() -> None:
    assert repetition_penalty_reward([ALPHA], threshold=0.9) == [0.0]
    short = RepetitionPenaltyReward(min_words=1, min_sentences=1, short_text_penalty=-0.3)
    assert short(["word", ""]) == [0.0, -0.3]
    # without the word measure 0.4 x 0.44444 + 0.5 x 0.66667 = 0.51111; 0.46111 / 0.95
    unweighted = RepetitionPenaltyReward(component_weights={"word_repetition": 0.0})
    assert unweighted([ALPHA]) == pytest.approx([-0.4853801])
    stopped = RepetitionPenaltyReward(stopwords=["alpha", "beta", "gamma", "delta"])
    assert stopped([ALPHA]) == pytest.approx([-0.4853801])
    # -0.2 - 0.4 / 3
    base = RepetitionPenaltyReward(paragraph_repetition_base_penalty=-0.2)
    assert base([TWICE]) == pytest.approx([-0.3333333])


@pytest.mark.parametrize("parameters", [{"threshold": 1.0}, {"component_weights": {"words": 1.0}}])
def test_repetition_penalty_refuses_odd_parameters(parameters: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RepetitionPenaltyReward(**parameters)


def test_repetition_penalty_logs_nothing_malformed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        repetition_penalty_reward([TWICE, ALPHA, PLAIN, ""])

    assert [record.getMessage() for record in caplog.records] == []


def test_repetition_penalty_earns_its_own_reward_for_a_tolerated_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reward = RepetitionPenaltyReward(tolerate_errors=True)
    reward.stopwords = None  # type: ignore[assignment]

    assert reward([ALPHA]) == [-0.2]


@pytest.mark.parametrize(
    ("iast", "slp1"),
    [
        ("kh gh ch jh ṭh ḍh th dh ph bh ai au", "K G C J W Q T D P B E O"),
        ("ā ī ū ṛ ṝ ḷ ḹ ṅ ñ ṭ ḍ ṇ ś ṣ ṃ ṁ ḥ", "A I U f F x X N Y w q R S z M M H"),
        ("dharmakṣetre kurukṣetre", "Darmakzetre kurukzetre"),
        ("a, b|1", "a, b|1"),
    ],
)
def test_iast_to_slp1(iast: str, slp1: str) -> None:
    assert iast_to_slp1(iast) == slp1


FOUND = {
    "sure": SimpleNamespace(name="Tristubh", score=0.8),
    "bare": SimpleNamespace(name="tristubh"),
    "beyond": SimpleNamespace(name="tristubh", score=3),
    "foreign": SimpleNamespace(name="anustup", score=0.3),
    "foreign beyond": SimpleNamespace(name="anustup", score=2),
    "foreign bare": SimpleNamespace(name="anustup"),
}


class ScriptedClassifier:
    """Knows the metre of a few verses, and fails on one."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def classify(self, text: str) -> Any:
        self.seen.append(text)
        if text == "raise":
            raise IndexError("no syllables")
        return FOUND.get(text)


@pytest.fixture
def chandas(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("chandas")
    module.Classifier = ScriptedClassifier  # type: ignore[attr-defined]
    module.__path__ = []
    monkeypatch.setitem(sys.modules, "chandas", module)
    monkeypatch.setattr(
        "atroposlib.envs.reward_fns.chandas_meter_reward._packaged_data", lambda: None
    )


@pytest.mark.parametrize(
    ("verse", "expected"),
    [
        ("sure", 0.8),
        ("bare", 1.0),
        ("beyond", 1.0),  # clamped
        ("foreign", 0.7),
        ("foreign beyond", 0.0),
        ("foreign bare", 0.0),  # another metre without a score earns nothing
        ("", 0.0),
        ("raise", 0.0),
    ],
)
@pytest.mark.usefixtures("chandas")
def test_chandas_meter(verse: str, expected: float) -> None:
    assert ChandasMeterReward()([verse]) == pytest.approx([expected])


@pytest.mark.usefixtures("chandas")
def test_chandas_meter_classifies_slp1() -> None:
    reward = ChandasMeterReward(meter="gAyatrI")

    reward(["gāyatrī"])

    assert reward.classifier.seen == ["gAyatrI"]


def test_chandas_meter_without_the_package_earns_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "chandas", None)

    reward = ChandasMeterReward()

    assert reward.classifier is None
    assert reward(["tristubh", ""]) == [0.0, 0.0]
    assert "every verse will earn 0" in caplog.text
