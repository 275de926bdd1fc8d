"""Whether a Sanskrit verse is in the metre asked for, judged by the package `chandas`."""

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
# Two letters for one sound come first: the first that matches is taken.
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
    """Return a text in IAST transliteration as SLP1, one letter per sound; the rest is kept."""
    return IAST.sub(lambda match: SLP1[match[0]], text)


@registry.register
class ChandasMeterReward(RewardFunction):
    """How sure the classifier is that the verse has the metre.

    Its score for that metre, 1.0 when it gives none; for another metre 1 minus its score there, 0.0
    when it gives none; 0.0 when it sees no metre or is not installed. Always between 0 and 1.

    Args:
        meter: the metre asked for, in the classifier's spelling, in either case.
        weight: what the reward is multiplied by.
        **kwargs: as for `RewardFunction`.

    Attributes:
        classifier: a `Classifier` of the package `chandas`; None when it is not available.
    """

    def __init__(self, meter: str = "tristubh", weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(weight=weight, **kwargs)
        self.meter = meter
        self.classifier: Any = _load_classifier()

    def compute(self, completions: list[Any], **kwargs: Any) -> list[float]:
        """Return [G] rewards between 0 and 1."""
        if self.classifier is None:
            return [0.0] * len(completions)
        return [self._score(self.get_content(each)) for each in completions]

    def _score(self, verse: str) -> float:
        try:
            found = self.classifier.classify(iast_to_slp1(verse))
        except Exception as error:  # noqa: BLE001 - the classifier fails on what is not verse
            logger.debug("no metre found: %s", error)
            return 0.0
        if not found:
            return 0.0
        # A border: some results of the classifier have no score.
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
    except Exception as error:  # noqa: BLE001 - without it every verse earns nothing
        logger.warning("no classifier of metres, every verse will earn 0: %s", error)
        return None


def _packaged_data() -> str | None:
    """Return the path of the metres that come with `chandas`; None when they are elsewhere."""
    data = resources.files("chandas").joinpath(DATA_FILE)
    return str(data) if data.is_file() else None
