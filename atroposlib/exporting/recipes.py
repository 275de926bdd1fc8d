"""From a decoded group to records: what an SFT and a DPO export do differently; pure.

pick(group) ─► picks, a few per group          build(picks of many groups) ─► records
               └ reasons for all left out                  texts decoded together
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from atroposlib.exporting.chats import ChatError
from atroposlib.exporting.dpo_formats import DpoFormat, Preference
from atroposlib.exporting.groups import ExportGroup
from atroposlib.exporting.pairing import GroupChooser, PairRule, pair_up
from atroposlib.exporting.selection import SelectionRule, select
from atroposlib.exporting.sft_formats import Example, SftFormat
from atroposlib.exporting.splitting import pair_prompt_length
from atroposlib.exporting.texts import Decoder, TextPair, split_texts
from atroposlib.exporting.trajectories import UNKNOWN_ENDS, TrajectoryReader, TruncationRule

__all__ = ["Built", "DpoRecipe", "Picked", "Recipe", "SftRecipe"]


class Built(NamedTuple):
    """One record on its way to the output."""

    record: dict[str, Any] | None
    """None when the format cannot hold it."""
    score: float
    num_tokens: int
    """Of the completion, both sides of a pair together."""
    is_truncated: bool
    where: str
    reason: str = ""
    """Why there is no record."""


class Picked(NamedTuple):
    """What is taken of one group."""

    picks: list[Any]
    """Opaque; for `build` of the same recipe."""
    refused: dict[str, int]
    """Trajectories left out, by reason."""


class Recipe(Protocol):
    """One way to make records."""

    def pick(self, group: ExportGroup, where: str) -> Picked:
        """Choose what becomes records."""

    def build(self, picks: Sequence[Any]) -> list[Built]:
        """Make the records, decoding all texts together."""


class SftRecipe:
    """Examples to imitate.

    Args:
        form: the format of the output.
        rule: which trajectories are good enough.
        decode: of the tokenizer; None when the format needs no text.
        truncation: what is done with completions that were cut.
    """

    def __init__(
        self,
        form: SftFormat,
        rule: SelectionRule,
        decode: Decoder | None,
        truncation: TruncationRule = UNKNOWN_ENDS,
    ) -> None:
        self._form = form
        self._rule = rule
        self._decode = decode
        self._reader = TrajectoryReader(truncation, needs_messages=form.needs_messages)

    def pick(self, group: ExportGroup, where: str) -> Picked:
        """Choose the best trajectories of a group."""
        sides, refused = self._reader.read(group)
        selection = select(group.scores, self._rule, eligible=list(sides))
        picks = [(where, sides[i]) for i in selection.chosen]
        return Picked(picks, {**refused, **selection.refused})

    def build(self, picks: Sequence[Any]) -> list[Built]:
        """Make the records of chosen trajectories."""
        texts = self._texts(picks)
        segments = self._segments(picks)
        built = []
        for i, (where, side) in enumerate(picks):
            example = Example(
                tokens=side.tokens,
                mask=side.mask,
                prompt_length=side.prompt_length,
                text=texts[i] if texts else None,
                segments=segments[i] if segments else (),
                messages=side.messages,
            )
            place = f"{where}, trajectory {side.position + 1}"
            record, reason = _record_or_reason(self._form, example)
            num_tokens = len(side.tokens) - side.prompt_length
            built.append(Built(record, side.score, num_tokens, side.is_truncated, place, reason))
        return built

    def _texts(self, picks: Sequence[Any]) -> list[TextPair]:
        if not self._form.needs_text:
            return []
        assert self._decode is not None
        return split_texts([(side.tokens, side.prompt_length) for _, side in picks], self._decode)

    def _segments(self, picks: Sequence[Any]) -> list[list[str]]:
        if not self._form.needs_segments:
            return []
        assert self._decode is not None
        spans = [
            Example(side.tokens, side.mask, side.prompt_length, None, (), None).spans()
            for _, side in picks
        ]
        rows = [
            side.tokens[span.start : span.end]
            for (_, side), own in zip(picks, spans, strict=True)
            for span in own
        ]
        texts = iter(self._decode(rows))
        return [[next(texts) for _ in own] for own in spans]


class DpoRecipe:
    """Preference pairs.

    Args:
        form: the format of the output.
        rule: which pairs are made.
        decode: of the tokenizer; None when the format needs no text.
        truncation: what is done with completions that were cut.
        seed: of random draws.
    """

    def __init__(
        self,
        form: DpoFormat,
        rule: PairRule,
        decode: Decoder | None,
        truncation: TruncationRule = UNKNOWN_ENDS,
        *,
        seed: int = 0,
    ) -> None:
        self._form = form
        self._rule = rule
        self._decode = decode
        self._seed = seed
        self._reader = TrajectoryReader(truncation, needs_messages=form.needs_messages)

    def pick(self, group: ExportGroup, where: str) -> Picked:
        """Pair the trajectories of a group."""
        sides, refused = self._reader.read(group)
        positions = list(sides)
        if not positions:
            return Picked([], refused)
        scores = [group.scores[i] for i in positions]
        pairing = pair_up(scores, self._rule, GroupChooser(self._seed, where))
        picks = [
            (where, sides[positions[pair.chosen]], sides[positions[pair.rejected]])
            for pair in pairing.pairs
        ]
        return Picked(picks, {**refused, **pairing.refused})

    def build(self, picks: Sequence[Any]) -> list[Built]:
        """Make the records of pairs."""
        lengths = [
            pair_prompt_length(
                chosen.tokens,
                rejected.tokens,
                chosen_prompt=chosen.prompt_length,
                rejected_prompt=rejected.prompt_length,
            )
            for _, chosen, rejected in picks
        ]
        texts = self._texts(picks, lengths)
        built = []
        for i, (where, chosen, rejected) in enumerate(picks):
            pair = Preference(
                texts[2 * i] if texts else None,
                texts[2 * i + 1] if texts else None,
                chosen.messages,
                rejected.messages,
            )
            place = f"{where}, trajectories {chosen.position + 1} and {rejected.position + 1}"
            record, reason = _record_or_reason(self._form, pair)
            num_tokens = len(chosen.tokens) + len(rejected.tokens) - 2 * lengths[i]
            is_cut = chosen.is_truncated or rejected.is_truncated
            built.append(Built(record, chosen.score, num_tokens, is_cut, place, reason))
        return built

    def _texts(self, picks: Sequence[Any], lengths: Sequence[int]) -> list[TextPair]:
        if not self._form.needs_text:
            return []
        assert self._decode is not None
        parts = [
            (side.tokens, length)
            for (_, *pair), length in zip(picks, lengths, strict=True)
            for side in pair
        ]
        return split_texts(parts, self._decode)


def _record_or_reason(form: Any, source: Any) -> tuple[dict[str, Any] | None, str]:
    """Build a record; a chat that the format cannot hold gives the reason instead."""
    try:
        return form.build(source), ""
    except ChatError as error:
        return None, str(error)
