"""Rules for trainers, the content that they are checked with, and the table of results; pure.

`atropos-trainer-check` plays the environment, stands between trainer and service, and notes in a
`Checklist` which rules were exercised and which were broken.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

__all__ = [
    "FAULTS",
    "OPTIONAL_CONTENT",
    "RULES",
    "RULE_NAMES",
    "SLOTS",
    "Checklist",
    "Content",
    "KnownTrajectory",
    "TrainerRule",
    "check_rows",
    "report_text",
]


class TrainerRule(NamedTuple):
    """One rule, with a remedy for trainers that break it."""

    name: str
    text: str
    remedy: str


RULES = (
    TrainerRule(
        "registers",
        "registers with settings that the service accepts, before it takes batches",
        "send POST /register with all fields first",
    ),
    TrainerRule(
        "waits",
        "does not flood the service while there is no batch",
        "ask with GET /batch?wait=30, or pause for a second after null",
    ),
    TrainerRule(
        "acknowledges",
        "acknowledges or returns each leased batch before its lease ends",
        "send POST /batch/ID/ack after the optimizer step, or ask for a longer lease",
    ),
    TrainerRule(
        "versions",
        "reports policy versions that never decrease",
        "send POST /policy with the number of weight updates so far",
    ),
    TrainerRule(
        "json",
        "takes groups that were posted as JSON",
        "read groups in the format of the response's Content-Type",
    ),
    TrainerRule(
        "binary",
        "takes groups that were posted in the binary format",
        "read groups in the format of the response's Content-Type",
    ),
    TrainerRule(
        "sizes", "takes a batch of groups of several sizes", "do not assume one group size"
    ),
    TrainerRule(
        "masks",
        "takes trajectories of several turns, and trains on the sampled tokens only",
        "train where masks[i][t] is not -100, in all spans",
    ),
    TrainerRule(
        "overrides",
        "takes a group with set_advantage_to_zero, and honors it",
        "set the advantage of that trajectory to zero, or reject the batch: ack?steps_done=0",
    ),
    TrainerRule(
        "advantages",
        "takes advantages per token, and uses them in place of the scores",
        "use advantages if present, or reject the batch: ack?steps_done=0",
    ),
    TrainerRule(
        "busy",
        "retries a batch request that got 503, after Retry-After",
        "wait for the seconds in Retry-After, then send the request again",
    ),
    TrainerRule(
        "lost_batch",
        "asks again when the response of a batch is cut off",
        "retry GET /batch after a broken connection: the batch is redelivered",
    ),
    TrainerRule(
        "outage",
        "survives a service that is out of reach for two seconds",
        "retry with increasing pauses, for minutes",
    ),
    TrainerRule(
        "busy_ack",
        "repeats an acknowledgement that got 503, after Retry-After",
        "send the acknowledgement again: repeating it is safe",
    ),
    TrainerRule(
        "lost_lease",
        "continues when an acknowledgement gets 409",
        "log it and request the next batch: the groups may be delivered again",
    ),
    TrainerRule(
        "restart",
        'registers again when GET /batch answers {"status": "error"}',
        "send POST /register, with the steps done as starting_step, and continue",
    ),
    TrainerRule(
        "rows",
        "trains on every trajectory of the acknowledged batches, once",
        "train on each row of a batch before you acknowledge it",
    ),
    TrainerRule(
        "ends",
        "ends after num_steps, with no batch left unacknowledged",
        "stop once the run has its steps; acknowledge or return every batch",
    ),
)
RULE_NAMES = frozenset(rule.name for rule in RULES)


@dataclass
class Checklist:
    """The results so far."""

    seen: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)
    """First reason, by rule."""

    def saw(self, *names: str) -> None:
        """Note that rules were exercised."""
        self.seen.update(names)

    def broke(self, name: str, reason: str) -> None:
        self.broken.setdefault(name, reason)

    def result(self, name: str) -> str:
        if name in self.broken:
            return "broken"
        return "ok" if name in self.seen else "not exercised"


FAULTS = ("busy", "lost_batch", "outage", "busy_ack", "lost_lease", "restart")
"""In the order in which they happen: one at most after each batch that the trainer has taken."""

SLOTS: tuple[tuple[str, Literal["json", "msgpack"]], ...] = (
    ("json", "json"),
    ("binary", "msgpack"),
    ("sizes", "json"),
    ("masks", "msgpack"),
    ("overrides", "json"),
    ("advantages", "msgpack"),
)
"""Content and format of the first batches; those after them have plain content."""
OPTIONAL_CONTENT = ("overrides", "advantages")
_PROMPT_TOKENS = 6
_LOGPROB = -0.5


@dataclass(frozen=True)
class KnownTrajectory:
    """A trajectory of known content."""

    slot: int
    content: str
    tokens: tuple[int, ...]
    is_trained: tuple[int, ...]
    advantages: tuple[float, ...] | None = None
    """Required advantages, where trained; None: those that the trainer computes."""


class Content:
    """Groups of known content; no two trajectories have the same tokens.

    Args:
        batch_size: sequences per batch.
        vocabulary: number of token ids that may be used.
        without: kinds of content that are replaced by plain groups.
    """

    def __init__(self, batch_size: int, vocabulary: int, without: Sequence[str] = ()) -> None:
        self._batch_size = batch_size
        self._base = vocabulary - 1
        self._without = without
        self._num_trajectories = 0
        self.posted: dict[tuple[int, ...], KnownTrajectory] = {}

    def kind_of(self, slot: int) -> tuple[str, Literal["json", "msgpack"]]:
        """Return content and format of a batch."""
        kind, wire_format = SLOTS[slot] if slot < len(SLOTS) else ("plain", "json")
        if kind in self._without or (kind == "sizes" and self._batch_size < 2):
            kind = "plain"
        return kind, wire_format

    def groups(self, slot: int) -> list[dict[str, Any]]:
        """Return the groups of the batch of a slot."""
        kind, _ = self.kind_of(slot)
        half = self._batch_size // 2
        sizes = [self._batch_size]
        if kind == "sizes":
            sizes = [self._batch_size - half, *[1] * half]
        return [self._group(slot, kind, size) for size in sizes]

    def _group(self, slot: int, kind: str, size: int) -> dict[str, Any]:
        rows = [self._trajectory(slot, kind, i) for i in range(size)]
        self.posted.update({row.tokens: row for row in rows})
        group: dict[str, Any] = {
            "tokens": [list(row.tokens) for row in rows],
            "masks": [_where(row, row.tokens, -100) for row in rows],
            "scores": [float(i % 2) for i in range(size)],
            "inference_logprobs": [_where(row, [_LOGPROB] * len(row.tokens), 1.0) for row in rows],
        }
        if kind == "advantages":
            group["advantages"] = [list(row.advantages or ()) for row in rows]
        if kind == "overrides":
            group["overrides"] = [{"set_advantage_to_zero": i == 0} for i in range(size)]
        return group

    def _trajectory(self, slot: int, kind: str, i: int) -> KnownTrajectory:
        number, self._num_trajectories = self._num_trajectories, self._num_trajectories + 1
        digits = [number // self._base**place % self._base for place in range(_PROMPT_TOKENS)]
        prompt = [1 + digit for digit in digits]
        completion = [1 + (number + k) % self._base for k in range(2 + i % 3)]
        trained = [0] * len(prompt) + [1] * len(completion)
        tokens = [*prompt, *completion]
        if kind == "masks":  # a second turn after two tokens of the environment
            tokens += [1, 2, *completion]
            trained += [0, 0, *[1] * len(completion)]
        advantages: list[float] | None = None
        if kind == "advantages":
            advantages = [float(t * is_trained) / 8 - i for t, is_trained in enumerate(trained)]
        if kind == "overrides" and i == 0:
            advantages = [0.0] * len(tokens)
        return KnownTrajectory(
            slot,
            kind,
            tuple(tokens),
            tuple(trained),
            None if advantages is None else tuple(advantages),
        )


def _where(row: KnownTrajectory, values: Sequence[Any], otherwise: Any) -> list[Any]:
    """Return values where the trajectory is trained."""
    pairs = zip(values, row.is_trained, strict=True)
    return [value if is_trained else otherwise for value, is_trained in pairs]


def check_rows(
    lines: Sequence[str], content: Content, trained_slots: Mapping[int, int], checklist: Checklist
) -> None:
    """Compare the rows that the trainer wrote with what was posted.

    Args:
        lines: JSON objects; blank lines are skipped.
        content: what was posted.
        trained_slots: deliveries of each batch that was acknowledged as trained, by slot.
        checklist: receives the results.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    checklist.saw("rows")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tokens = tuple(int(token) for token in row["tokens"])
            trained = tuple(int(value) for value in row["trained"])
            advantages = [float(value) for value in row["advantages"]]
            if not len(tokens) == len(trained) == len(advantages):
                raise ValueError("expected one entry of trained and of advantages per token")
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            checklist.broke("rows", f"row {number} is not as documented: {error!r}")
            return
        posted = content.posted.get(tokens)
        if posted is None:
            checklist.broke("rows", f"row {number}: {list(tokens)[:12]} was never posted")
            continue
        counts[tokens] += 1
        if trained != posted.is_trained:
            checklist.broke(
                "masks", f"row {number} trains {list(trained)}, expected {list(posted.is_trained)}"
            )
        expected = None if posted.advantages is None else _where(posted, posted.advantages, 0.0)
        if expected is not None and not _are_close(_where(posted, advantages, 0.0), expected):
            checklist.broke(
                posted.content, f"row {number} has the advantages {advantages}, expected {expected}"
            )
    for tokens, posted in content.posted.items():
        most = trained_slots.get(posted.slot, 0)
        if most and not 1 <= counts[tokens] <= most:
            checklist.broke(
                "rows",
                f"a trajectory of batch {posted.slot + 1} was trained {counts[tokens]} times, "
                "and its batch was acknowledged as trained",
            )


def _are_close(values: Sequence[float], others: Sequence[float]) -> bool:
    return len(values) == len(others) and all(
        math.isclose(a, b, abs_tol=1e-4) for a, b in zip(values, others, strict=True)
    )


def report_text(checklist: Checklist, notes: Sequence[str]) -> str:
    """Return the table, with reason and remedy under each broken rule."""
    lines = []
    for rule in RULES:
        result = checklist.result(rule.name)
        lines.append(f"{result:<14}{rule.name:<14}{rule.text}")
        if result == "broken":
            lines.append(f"{'':<28}reason: {checklist.broken[rule.name]}")
            lines.append(f"{'':<28}remedy: {rule.remedy}")
    counts = Counter(checklist.result(rule.name) for rule in RULES)
    lines.append("")
    lines += notes
    lines.append(", ".join(f"{counts[name]} {name}" for name in ("ok", "broken", "not exercised")))
    return "\n".join(lines)
