"""A scored group and its fields: types, the field table, merging, checking, runs of versions.

A *group* is G trajectories of one dataset item, scored together. A worked example, G = 2:

    {
        "tokens":             [[1, 15, 16, 2], [1, 15, 17, 2]],
        "masks":              [[-100, -100, 16, 2], [-100, -100, 17, 2]],
        "scores":             [1.0, -1.0],
        "inference_logprobs": [[1.0, 1.0, -0.1, -0.3], [1.0, 1.0, -2.4, -0.2]],
    }

`masks[i][t]` is `IGNORE_INDEX` where the token is not trained on, otherwise the token id itself;
`inference_logprobs[i][t]` is `MASKED_LOGPROB` where masked, otherwise finite and at most 0.
All code that depends on the set of fields (wire, service, merging, trainer) reads `GROUP_FIELDS`.
One more key, `policy_version`, names the weights that sampled the group. It is not a field: the
service stores it separately and reports it with each lease (docs/wire.md).

The versions of single tokens are runs: a policy version, None where no model sampled or where it is
unknown, and the number of successive tokens that were sampled with it.

    engine: "weight_versions": [{"version": "7", "num_tokens": 57}, ...]   of one completion
    group:  "token_versions":  [[null, 12], [7, 57], [8, 20]]              of one trajectory
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from typing_extensions import TypedDict

from atroposlib.errors import GroupError, InferenceError

__all__ = [
    "GROUP_FIELDS",
    "IGNORE_INDEX",
    "MASKED_LOGPROB",
    "MAX_SCORE",
    "PLACEHOLDER_TOKENS",
    "GroupField",
    "ScoredDataGroup",
    "ScoredDataItem",
    "VersionRun",
    "WeightSpan",
    "are_token_ids",
    "check_group",
    "cut_runs",
    "has_placeholder_tokens",
    "has_zeroed_advantage",
    "is_demonstration",
    "is_traceparent",
    "join_runs",
    "merge_columns",
    "merge_items",
    "num_sequences",
    "read_spans",
    "select_runs",
    "temperature_of",
    "wrong_number",
]

IGNORE_INDEX = -100
"""Mask value of a token that carries no loss."""

MASKED_LOGPROB = 1.0
"""Placeholder logprob of a token the policy did not sample; impossible as a real logprob."""

MAX_SCORE = 1e30
"""Largest magnitude of a score: sums and squares of such numbers are also finite."""

PLACEHOLDER_TOKENS = tuple(range(128))
"""Placeholder tokens of sessions opened with ATROPOS_ALLOW_DUMMY_MANAGED_SERVER."""


class ScoredDataGroup(TypedDict, total=False):
    """G trajectories of one item; a plain dict at run time, extra keys are allowed.

    Only `tokens`, `masks` and `scores` are required. Any other field may be missing or None.
    """

    tokens: list[list[int]]
    """[G][L] prompt and completion ids."""
    masks: list[list[int]]
    """[G][L] `IGNORE_INDEX`, or the token id where it is trained on."""
    scores: list[float]
    """[G] one number per trajectory."""
    advantages: list[list[float]] | None
    """[G][L] token-level advantages; replace what the trainer would derive from `scores`."""
    ref_logprobs: list[list[float]] | None
    """[G][L] logprobs of a frozen reference policy."""
    messages: list[list[Any]] | None
    """[G][messages] chat records."""
    generation_params: dict[str, Any] | None
    """Sampling parameters of the group, e.g. `temperature`."""
    inference_logprobs: list[list[float]] | None
    """[G][L] logprobs of the policy that sampled; `MASKED_LOGPROB` where masked."""
    group_overrides: dict[str, Any] | None
    """Switches for the whole group, e.g. `group_size`, `sft`, `temperature`."""
    overrides: list[dict[str, Any]] | None
    """[G] switches per trajectory, e.g. `set_advantage_to_zero`."""
    images: Any
    """Multimodal payload, passed through."""
    distill_token_ids: list[list[list[int]]] | None
    """[G][L][K] teacher's top token ids."""
    distill_logprobs: list[list[list[float]]] | None
    """[G][L][K] teacher's logprobs of those ids."""
    env_id: int | None
    """Registration id of the sender; set when the group is sent."""
    reward_parts: list[dict[str, float]] | None
    """[G] named parts of each reward, before they are weighted and summed."""
    finish_reasons: list[str | None] | None
    """[G] the engine's finish reason of each trajectory's last completion, e.g. `length`."""
    tokenized_from_text: bool | None
    """Whether the tokens were made from the server's text; None means an engine reported them."""
    traces: list[dict[str, Any] | None] | None
    """[G] record of the agent that made each trajectory, an `AgentTrace`; None where another
    trajectory of the same rollout has it."""
    token_versions: list[list[tuple[int | None, int]] | None] | None
    """[G] runs `[policy version, number of tokens]` that cover the L tokens in order. The version
    is None where no model sampled or it is unknown; the runs are None if all of them are."""
    columns: dict[str, Any] | None
    """Further numbers by name, [G] arrays or lists (L,), (L, K) or (L, layers, k), carried as they
    are; see `wire.columns`."""
    traceparent: str | None
    """W3C header of the span in which the group was made; see docs/telemetry.md."""


class ScoredDataItem(TypedDict, total=False):
    """One trajectory: the fields of `ScoredDataGroup` without the G dimension."""

    tokens: list[int]
    masks: list[int]
    scores: float
    advantages: list[float] | None
    ref_logprobs: list[float] | None
    messages: list[Any] | None
    generation_params: dict[str, Any] | None
    inference_logprobs: list[float] | None
    group_overrides: dict[str, Any] | None
    overrides: dict[str, Any] | None
    images: Any
    distill_token_ids: list[list[int]] | None
    distill_logprobs: list[list[float]] | None
    reward_parts: dict[str, float] | None
    finish_reasons: str | None
    tokenized_from_text: bool | None
    traces: dict[str, Any] | None
    token_versions: list[tuple[int | None, int]] | None
    columns: dict[str, Any] | None


class GroupField(NamedTuple):
    """One row of the field table."""

    name: str
    dtype: Literal["int", "float", "json", "columns"]
    """Element type: token ids, numbers, opaque JSON, or named numbers of any type."""
    shape: Literal["G", "GL", "GLK", "G*", "*"]
    """Leading dimensions: `G*` is one opaque value per trajectory, `*` one for the group."""
    required: bool = False
    aligned: bool = False
    """Whether the lengths must equal those of `tokens`."""
    is_note: bool = False
    """Whether the key is left out if the field is absent; other absent fields are null."""

    @property
    def per_trajectory(self) -> bool:
        return self.shape.startswith("G")


GROUP_FIELDS: tuple[GroupField, ...] = (
    GroupField("tokens", "int", "GL", required=True),
    GroupField("masks", "int", "GL", required=True, aligned=True),
    GroupField("scores", "float", "G", required=True),
    GroupField("advantages", "float", "GL"),
    GroupField("ref_logprobs", "float", "GL"),
    GroupField("messages", "json", "G*"),
    GroupField("generation_params", "json", "*"),
    GroupField("inference_logprobs", "float", "GL", aligned=True),
    GroupField("overrides", "json", "G*"),
    GroupField("group_overrides", "json", "*"),
    GroupField("images", "json", "*"),
    GroupField("env_id", "json", "*"),
    GroupField("distill_token_ids", "int", "GLK"),
    GroupField("distill_logprobs", "float", "GLK"),
    GroupField("reward_parts", "json", "G*", is_note=True),
    GroupField("finish_reasons", "json", "G*", is_note=True),
    GroupField("tokenized_from_text", "json", "*", is_note=True),
    GroupField("traces", "json", "G*", is_note=True),
    GroupField("token_versions", "json", "G*", is_note=True),
    GroupField("columns", "columns", "*", is_note=True),
    GroupField("traceparent", "json", "*", is_note=True),
)
"""The fields of a group on the wire, in wire order: fourteen that every delivered group has, then
the notes, which are present only if the sender set them."""


def num_sequences(group: Mapping[str, Any]) -> int:
    """Return G, the number of trajectories in a group."""
    return len(group["tokens"])


def are_token_ids(row: Sequence[Any]) -> bool:
    """Whether all entries are integers from 0 that fit 32 bits."""
    try:
        # The sum of integers is one; this is much faster than a loop.
        return type(sum(row)) is int and (not row or (min(row) >= 0 and max(row) < 2**31))
    except TypeError:
        return False


def has_placeholder_tokens(tokens: Sequence[int]) -> bool:
    """Whether the [L] ids of a trajectory are `PLACEHOLDER_TOKENS`."""
    return len(tokens) == len(PLACEHOLDER_TOKENS) and tuple(tokens) == PLACEHOLDER_TOKENS


_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def is_traceparent(value: Any) -> bool:
    """Whether a value is a W3C `traceparent` of version 00, the one that exists."""
    return isinstance(value, str) and _TRACEPARENT.fullmatch(value) is not None


def is_demonstration(group: Mapping[str, Any], i: int) -> bool:
    """Return whether trajectory i is trained by likelihood: its own `sft`, else the group's.

    Raises:
        GroupError: `set_advantage_to_zero` is set too.
    """
    own = _override_of(group, i).get("sft")
    of_group = (group.get("group_overrides") or {}).get("sft")
    is_sft = bool(of_group if own is None else own)
    if is_sft and has_zeroed_advantage(group, i):
        raise GroupError(
            f"overrides[{i}]: sft and set_advantage_to_zero exclude each other; a demonstration "
            "has no advantage. Mask its tokens to leave it out"
        )
    return is_sft


def has_zeroed_advantage(group: Mapping[str, Any], i: int) -> bool:
    """Return whether an override sets the advantage of trajectory i to zero."""
    return bool(_override_of(group, i).get("set_advantage_to_zero"))


def temperature_of(group: Mapping[str, Any], i: int) -> float:
    """Return the sampling temperature of trajectory i, 1 if unknown or greedy."""
    for source in (
        _override_of(group, i),
        group.get("generation_params") or {},
        group.get("group_overrides") or {},
    ):
        value = source.get("temperature")
        if value is not None:
            # Logits cannot be divided by the temperature of greedy decoding, 0.
            return float(value) if float(value) > 0 else 1.0
    return 1.0


def _override_of(group: Mapping[str, Any], i: int) -> Mapping[str, Any]:
    overrides = group.get("overrides") or []
    return (overrides[i] or {}) if i < len(overrides) else {}


def merge_items(items: Sequence[Mapping[str, Any]]) -> tuple[ScoredDataGroup, list[str]]:
    """Stack trajectories into one group, keeping every field they have.

    A per-trajectory field is kept if *every* item has it, and dropped if only some do: in a shorter
    list, entries would belong to the wrong trajectories. The same holds for each of `columns`. Of
    `traces` and `token_versions`, missing ones are None.
    Mappings of the whole group (`group_overrides`, `generation_params`) are merged; later items
    take precedence.

    Args:
        items: [G] trajectories, each with at least `tokens`, `masks`, `scores`.

    Returns:
        The group, and the names of fields dropped because only some items had them.

    Raises:
        GroupError: an item lacks a required field; the message names its position.
    """
    group: dict[str, Any] = {}
    dropped: list[str] = []
    for field in GROUP_FIELDS:
        if field.name == "env_id":
            continue
        present = [item[field.name] for item in items if item.get(field.name) is not None]
        if field.required and len(present) < len(items):
            missing = next(i for i, item in enumerate(items) if item.get(field.name) is None)
            raise GroupError(f"item {missing} of {len(items)} has no {field.name!r}")
        if not present:
            if not field.is_note:
                group[field.name] = None
        elif field.name in ("group_overrides", "generation_params"):
            group[field.name] = {k: v for mapping in present for k, v in mapping.items()}
        elif field.name == "tokenized_from_text":
            group[field.name] = any(present)
        elif field.name in ("traces", "token_versions"):
            group[field.name] = [item.get(field.name) for item in items]
        elif field.name == "columns":
            group[field.name], incomplete = merge_columns(present, len(items))
            dropped += incomplete
        elif len(present) == len(items):
            group[field.name] = present
        else:
            group[field.name] = None
            dropped.append(field.name)
    return group, dropped  # type: ignore[return-value]


def merge_columns(
    present: Sequence[Mapping[str, Any]], num_items: int
) -> tuple[dict[str, list[Any]] | None, list[str]]:
    """Stack the `columns` of trajectories; return them, and the names of those that some lack."""
    names = list(dict.fromkeys(name for columns in present for name in columns))
    complete = [
        name
        for name in names
        if len(present) == num_items and all(name in columns for columns in present)
    ]
    merged = {name: [columns[name] for columns in present] for name in complete}
    return merged or None, [f"columns.{name}" for name in names if name not in merged]


def check_group(group: Mapping[str, Any]) -> None:
    """Reject a group whose fields have different counts or lengths, or invalid numbers.

    Checks counts and lengths of `tokens`, `masks`, `scores` and `inference_logprobs`, that scores
    and logprobs are finite, and that no score is beyond `MAX_SCORE`. Element types are checked by
    the codec. Other fields are not checked; trainers interpret them.

    Raises:
        GroupError: names the path and what was expected, e.g.
            `masks[1]: 812 entries, tokens[1] has 815`.
    """
    for field in GROUP_FIELDS:
        if field.required and group.get(field.name) is None:
            raise GroupError(f"{field.name}: missing; every group needs it")
    tokens = group["tokens"]
    if len(tokens) == 0:  # arrays have no truth value
        raise GroupError("tokens: empty; a group needs at least one trajectory")
    _check_count("scores", group["scores"], len(tokens))
    _check_finite("scores", group["scores"])
    _check_scores(group["scores"])
    for field in GROUP_FIELDS:
        rows = group.get(field.name)
        if not field.aligned or rows is None:
            continue
        # Some environments use an empty list for an optional field without values.
        if not field.required and hasattr(rows, "__len__") and len(rows) == 0:
            continue
        _check_count(field.name, rows, len(tokens))
        for i, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
            if len(row) != len(ids):
                raise GroupError(
                    f"{field.name}[{i}]: {len(row)} entries, tokens[{i}] has {len(ids)}"
                )
            if field.dtype == "float":
                _check_finite(f"{field.name}[{i}]", row)


def _check_count(name: str, rows: Sequence[Any], expected: int) -> None:
    if len(rows) != expected:
        raise GroupError(f"{name}: {len(rows)} entries, tokens has {expected}")


def wrong_number(path: str, values: Sequence[Any]) -> str | None:
    """Return a message about the first value that is not a number, or None.

    Numbers include those of NumPy and tensors of one element, but not strings.
    """
    for i, value in enumerate(values):
        try:
            math.isfinite(value)
        except (TypeError, ValueError):
            return f"{path}[{i}] is {value!r:.60}; expected a number"
    return None


def _check_finite(path: str, values: Sequence[float]) -> None:
    # A sum is finite only if all numbers are; summing is much faster than a loop.
    try:
        if math.isfinite(sum(values)):
            return
    except (OverflowError, TypeError):  # an integer too large for a float, or no number
        pass
    except RuntimeError as error:  # such as of a tensor on the device `meta`
        raise GroupError(f"{path}: its numbers cannot be read: {error}") from error
    for i, value in enumerate(values):
        try:
            is_finite = math.isfinite(value)
        except OverflowError as error:
            raise GroupError(f"{path}[{i}]: an integer too large for a float") from error
        except (TypeError, ValueError) as error:
            raise GroupError(wrong_number(path, values) or f"{path}: {error}") from error
        if not is_finite:
            raise GroupError(f"{path}[{i}]: {value} is not a finite number")


def _check_scores(scores: Sequence[float]) -> None:
    if min(scores) >= -MAX_SCORE and max(scores) <= MAX_SCORE:
        return
    for i, score in enumerate(scores):
        if not -MAX_SCORE <= score <= MAX_SCORE:
            raise GroupError(f"scores[{i}]: {score}; expected a score within ±{MAX_SCORE:g}")


VersionRun = tuple[int | None, int]
"""Version, number of tokens."""


class WeightSpan(NamedTuple):
    """Successive tokens of a completion that were sampled with the same weights."""

    version: str | None
    """The engine's name of the weights; None if it does not report one."""
    num_tokens: int


def read_spans(given: Any, num_tokens: int, *, completion_index: int) -> list[WeightSpan]:
    """Read the `weight_versions` of a completion of `num_tokens`; nothing is one unknown span.

    Raises:
        InferenceError: they do not cover the tokens of the completion.
    """
    if not given:
        return [WeightSpan(None, num_tokens)]
    try:
        pairs = [(span["version"], int(span["num_tokens"])) for span in given]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InferenceError(
            f"completion {completion_index}: expected weight_versions of the form "
            f'[{{"version": "12", "num_tokens": 57}}], the engine sent {given!r:.80}'
        ) from error
    spans = [WeightSpan(None if name is None else str(name), size) for name, size in pairs]
    total = sum(span.num_tokens for span in spans)
    if total != num_tokens or any(span.num_tokens < 0 for span in spans):
        raise InferenceError(
            f"completion {completion_index} has {num_tokens} ids, the spans of its "
            f"weight_versions {total}"
        )
    return spans


def join_runs(runs: Iterable[Sequence[int | None]]) -> list[VersionRun]:
    """Return the same versions in the fewest runs."""
    joined: list[VersionRun] = []
    for version, length in runs:
        if not length:
            continue
        if joined and joined[-1][0] == version:
            length += joined.pop()[1]
        joined.append((version, length))
    return joined


def cut_runs(runs: Iterable[Sequence[int | None]], num_tokens: int) -> list[VersionRun]:
    """Return the runs of the first tokens."""
    cut: list[VersionRun] = []
    for version, length in runs:
        taken = min(length or 0, num_tokens)
        num_tokens -= taken
        cut.append((version, taken))
    return join_runs(cut)


def select_runs(runs: Iterable[Sequence[int | None]], positions: Iterable[int]) -> list[VersionRun]:
    """Return the runs of the tokens at `positions`, each in the range that `runs` cover."""
    versions = [version for version, length in runs for _ in range(length or 0)]
    return join_runs((versions[position], 1) for position in positions)
