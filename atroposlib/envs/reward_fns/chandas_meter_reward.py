"""Reward for a Sanskrit verse in a given meter, classified by the package `chandas`."""

from __future__ import annotations

import importlib
import logging
import re
from importlib import resources
from typing import Any

from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["ChandasMeterReward", "iast_to_slp1"]

logger = logging.getLogger(__name__)

# fmt: off
# Two-letter sounds come first, since the first match is used.
SLP1 = {
    "kh": "K", "gh": "G", "ch": "C", "jh": "J", "ṭh": "W", "ḍh": "Q", "th": "T", "dh": "D",
    "ph": "P", "bh": "B", "ai": "E", "au": "O",
    "ā": "A", "ī": "I", "ū": "U", "ṛ": "f", "ṝ": "F", "ḷ": "x", "ḹ": "X", "ṅ": "N", "ñ": "Y",
    "ṭ": "w", "ḍ": "q", "ṇ": "R", "ś": "S", "ṣ": "z", "ṃ": "M", "ṁ": "M", "ḥ": "H",
}
# fmt: on
IAST = re.compile("|".join(SLP1))
DATA_FILE = "data/data.json"


def iast_to_slp1(text: str) -> str:
    """Convert IAST transliteration to SLP1, with one letter per sound; other text is kept."""
    return IAST.sub(lambda match: SLP1[match[0]], text)


@registry.register
class ChandasMeterReward(RewardFunction):
    """Confidence of the classifier that the verse has the meter, 0 to 1.

    For this meter, the classifier's score, or 1.0 without a score. For another meter, 1 minus its
    score, or 0.0 without a score. 0.0 if no meter is found or `chandas` is not installed.

    Args:
        meter: name of the meter, as spelled by the classifier; case is ignored.
        **kwargs: as for `RewardFunction`, such as `weight`.

    Attributes:
        classifier: `Classifier` of the package `chandas`, or None if it is not available.
    """

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.meter = meter
        self.classifier: Any = _load_classifier()

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        if self.classifier is None:
            return [0.0] * len(completions)
        return [self._score(self.get_content(each)) for each in completions]

    def _score(self, verse: str) -> float:
        try:
            found = self.classifier.classify(iast_to_slp1(verse))
        except Exception as error:  # noqa: BLE001 - the classifier raises on text without verse
            logger.debug("no meter found: %s", error)
            return 0.0
        if not found:
            return 0.0
        # Some results of the classifier have no score.
        score = getattr(found, "score", None)
        if str(found.name).lower() == self.meter.lower():
            reward = 1.0 if score is None else float(score)
        else:
            reward = 0.0 if score is None else 1.0 - float(score)
        return max(0.0, min(1.0, reward))


def _load_classifier() -> Any:
    try:
        classifier_class = importlib.import_module("chandas").Classifier
        data = _packaged_data()
        return classifier_class() if data is None else classifier_class.from_json_file(data)
    except Exception as error:  # noqa: BLE001 - without a classifier, all rewards are 0
        logger.warning("no classifier of meters, every verse will earn 0: %s", error)
        return None


def _packaged_data() -> str | None:
    data = resources.files("chandas").joinpath(DATA_FILE)
    return str(data) if data.is_file() else None
