"""Pure rules of tracked sequences: which one a prompt continues, and with which tokens and masks.

One conversation of two turns, `p` prompt, `c` sampled, `.` masked:

    turn 1   p p p p c c c e            e is the sampled end of turn, absent from the text
    turn 2   p p p p c c c e p p p c c  the next prompt repeats e as text: it is not added again
    masks    . . . . c c c e . . . c c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel

from atroposlib.scored_data import IGNORE_INDEX, MASKED_LOGPROB

__all__ = [
    "SequenceNode",
    "continue_ids",
    "longest_prefix",
    "make_node",
]


class SequenceNode(BaseModel):
    """One tracked sequence: a prompt, and everything sampled on the way.

    `tokens`, `masked_tokens` and `logprobs` have one entry per token. A worked example, prompt
    `[1, 72]` and sampled `[105, 2]`:

        tokens         [1,    72,   105,  2]
        masked_tokens  [-100, -100, 105,  2]
        logprobs       [1.0,  1.0,  -0.3, -0.1]
    """

    full_text: str
    """Prompt and completions as text, without special tokens in the completions."""
    tokens: list[int]
    """[L] ids as the engine reported them."""
    masked_tokens: list[int]
    """[L] the id where it was sampled, `IGNORE_INDEX` elsewhere."""
    logprobs: list[float]
    """[L] the sampled id's logprob, `MASKED_LOGPROB` elsewhere."""
    metadata: dict[str, Any] | None = None
    """`finish_reason` of the last completion, and where there is something to say:

    `extended_by_tokens`: why the recorded ids differ from what the chat template and the
    tokenizer would make of the conversation today: a list of `template` (earlier turns would be
    written differently) and `tokenisation` (the text of a reply has other ids than were sampled).

    `weight_versions`: what the engine called the weights of each completion, oldest first.

    `policy_version`: the oldest policy version among them, from the engine or the service.

    `tokenized_from_text`: True where the server reported no ids, so that those of at least one
    completion were made from its text; its logprobs are then `MASKED_LOGPROB`.
    """


def longest_prefix(nodes: Sequence[SequenceNode], text: str) -> SequenceNode | None:
    """Return the node whose text is the longest prefix of `text`; the first wins ties."""
    candidates = [node for node in nodes if text.startswith(node.full_text)]
    return max(candidates, key=lambda node: len(node.full_text), default=None)


def continue_ids(
    node: SequenceNode, added_ids: Sequence[int], is_hidden: Callable[[int], bool]
) -> list[int]:
    """Return the node's tokens followed by the added ones, the shared end of turn only once.

    The sampled end-of-turn tokens are not part of the node's text, so the next prompt brings
    them again; the longest overlap between them and the start of `added_ids` is skipped.

    Args:
        node: Sequence that the prompt continues.
        added_ids: [A] ids of the prompt's text behind the node's text.
        is_hidden: Whether a token leaves no trace in the node's text.
    """
    num_hidden = 0
    for token_id, mask in zip(reversed(node.tokens), reversed(node.masked_tokens), strict=True):
        if mask == IGNORE_INDEX or not is_hidden(token_id):
            break
        num_hidden += 1
    overlap = 0
    for length in range(min(num_hidden, len(added_ids)), 0, -1):
        if node.tokens[-length:] == list(added_ids[:length]):
            overlap = length
            break
    return [*node.tokens, *added_ids[overlap:]]


def make_node(
    *,
    full_text: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    completion_logprobs: Sequence[float],
    finish_reason: str,
    parent: SequenceNode | None,
    notes: Mapping[str, Any] | None = None,
) -> SequenceNode:
    """Build the node of one completion, keeping what its parent sampled trainable.

    Args:
        full_text: Prompt text and completion text.
        prompt_ids: [P] ids the engine read.
        completion_ids: [C] ids it sampled.
        completion_logprobs: [C] their logprobs; padded with `MASKED_LOGPROB` or cut to C.
        finish_reason: Why sampling ended.
        parent: Node the prompt continues. Its masks and logprobs are carried over as far as its
            tokens are what the engine read; None masks the whole prompt.
        notes: What else goes into `SequenceNode.metadata`.
    """
    masks = [IGNORE_INDEX] * len(prompt_ids)
    logprobs = [MASKED_LOGPROB] * len(prompt_ids)
    if parent is not None:
        shared = _common_length(parent.tokens, prompt_ids)
        masks[:shared] = parent.masked_tokens[:shared]
        logprobs[:shared] = parent.logprobs[:shared]
    padding = [MASKED_LOGPROB] * (len(completion_ids) - len(completion_logprobs))
    fields: dict[str, Any] = {
        "full_text": full_text,
        "tokens": [*prompt_ids, *completion_ids],
        "masked_tokens": [*masks, *completion_ids],
        "logprobs": [*logprobs, *completion_logprobs[: len(completion_ids)], *padding],
        "metadata": {"finish_reason": finish_reason, **(notes or {})},
    }
    try:  # takes a tenth of the time that the model takes, which holds up the event loop
        fields["tokens"] = msgspec.convert(fields["tokens"], list[int])
        fields["logprobs"] = msgspec.convert(fields["logprobs"], list[float])
    except msgspec.ValidationError:  # numbers of other kinds, or none
        return SequenceNode(**fields)
    return SequenceNode.model_construct(**fields)


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    shortest = min(len(first), len(second))
    if list(first[:shortest]) == list(second[:shortest]):
        return shortest
    return next(i for i in range(shortest) if first[i] != second[i])
