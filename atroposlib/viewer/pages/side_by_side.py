"""The rollouts of one group beside each other; pure."""

from __future__ import annotations

import json
import statistics

from atroposlib.viewer.pages.markup import block, chip, empty, folded, part_chips, score_chip
from atroposlib.viewer.rollouts import Group, Rollout, text_of_content
from atroposlib.viewer.texts import RolloutText

__all__ = ["side_by_side_page"]

_MAX_ANSWER_CHARACTERS = 6000
_OPEN_PROMPT_CHARACTERS = 1200
_GROUP_FIELDS = ("generation_params", "group_overrides")


def side_by_side_page(group: Group, texts: list[RolloutText], *, selected: int) -> str:
    """Return the page: the question once, then every answer with its score.

    Args:
        group: what to show.
        texts: prompt and answer of each rollout.
        selected: number of the rollout that other pages show.
    """
    if not group.rollouts:
        return empty("This group has no rollouts.")
    parts = [_question(group, texts)]
    if group.fields.get("tokenized_from_text"):
        parts.append(chip("tokenized from text", "no token ids or logprobs of the server"))
    for name in _GROUP_FIELDS:
        if group.fields.get(name):
            parts.append(folded(name, block(json.dumps(group.fields[name], default=str))))
    cards = "".join(
        _card(group, rollout, text.answer, rollout.number == selected)
        for rollout, text in zip(group.rollouts, texts, strict=True)
    )
    return "".join(parts) + f'<div class="v-cards">{cards}</div>'


def _question(group: Group, texts: list[RolloutText]) -> str:
    """Show what was asked: the last message before the answers, those before it folded."""
    shared = group.rollouts[0].chat[: group.num_shared_messages]
    if not shared:
        prompt = texts[0].prompt
        is_shared = all(text.prompt == prompt for text in texts)
        title = f"prompt, {len(prompt):,} characters"
        title += "" if is_shared else " (of rollout 0; others differ)"
        return folded(title, block(prompt), is_open=len(prompt) <= _OPEN_PROMPT_CHARACTERS)
    before = "".join(
        folded(f"{message.get('role') or 'text'}, {len(text):,} characters", block(text))
        for message in shared[:-1]
        for text in [text_of_content(message.get("content"))]
    )
    asked = text_of_content(shared[-1].get("content"))
    title = str(shared[-1].get("role") or "text")
    return before + folded(
        title, block(asked, max_characters=_OPEN_PROMPT_CHARACTERS), is_open=True
    )


def _card(group: Group, rollout: Rollout, answer: str, is_selected: bool) -> str:
    facts = [chip(f"{len(rollout):,} tokens"), chip(f"{rollout.num_trained:,} trained")]
    advantage = group.advantage(rollout)
    if advantage is not None:
        facts.insert(0, chip(f"advantage {advantage:+.2f}", "score less mean, in deviations"))
    sampled = [p for i, p in enumerate(rollout.logprobs) if rollout.is_trained(i)]
    if sampled:
        facts.append(chip(f"mean logprob {statistics.fmean(sampled):.2f}"))
    if rollout.overrides:
        facts.append(chip(json.dumps(rollout.overrides, default=str)[:80], "overrides"))
    return (
        f'<section class="v-card{" v-selected" if is_selected else ""}" '
        f'data-rollout="{rollout.number}" tabindex="0">'
        f"<h4>rollout {rollout.number} {score_chip(rollout.score)}</h4>"
        f'<div class="v-chips">{part_chips(rollout.reward_parts)}{"".join(facts)}</div>'
        f"{block(answer, max_characters=_MAX_ANSWER_CHARACTERS) if answer else _nothing()}"
        "</section>"
    )


def _nothing() -> str:
    return '<p class="v-empty">an empty answer</p>'
