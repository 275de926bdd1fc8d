r"""SWE-RL: repair a program from an issue, with SEARCH/REPLACE hunks.

    issue, files -> completion -> hunks -> files after the edit ─┐
                     oracle's patch -----> files after the edit ─┴► diffs compared -> 0 to 1

The oracle is a unified diff and the answer is not, so both are applied to the same files, and the
two resulting diffs are compared. An answer that makes the oracle's edit has the score 1.

    python environments/swe_rl_env.py process --env.dataset_path environments/data/swe_rl_sample \
        --env.total_steps 4

Source: Wei et al. 2025, "SWE-RL", arXiv:2502.18449, section 2. Differs in comparing diffs of equal
form, in words rather than characters, and in scoring malformed answers 0 instead of -1.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from atroposlib.envs.base import APIServerConfig, Item, ScoredDataGroup
from atroposlib.envs.dataset_items import hub_dataset
from atroposlib.envs.reporting import GroupWriter
from atroposlib.envs.single_turn_env import SingleTurnEnvConfig, Trajectory
from atroposlib.errors import ConfigError, NoDataError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import (
    THINK_TAG,
    ThinkingEnv,
    answer_after_thinking,
    deep_hermes_settings,
)
from atroposlib.utils.local_records import read_splits

__all__ = [
    "Hunk",
    "Issue",
    "SWERLEnv",
    "SWERLEnvConfig",
    "apply_hunks",
    "apply_unified_diff",
    "edit_similarity",
    "read_code_context",
    "read_hunks",
    "read_issue",
    "score_answer",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="repair a program from an issue, with SEARCH/REPLACE hunks",
    turns="1",
    reward="0 to 1, similarity to the oracle's edit; 0 if malformed",
    data="SWE-smith oracle from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/swe_rl_sample --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("data") / "swe_rl_sample"

Files = Mapping[str, str]
"""Contents of files by path."""


class Hunk(NamedTuple):
    """One replacement in a file."""

    path: str
    search: str
    """Lines to replace, with their indentation; empty to create a file."""
    replace: str


class Issue(NamedTuple):
    """One item."""

    statement: str
    files: dict[str, str]
    """Files of the repository that the patch concerns, before the edit."""
    fixed: dict[str, str]
    """The same files after the oracle's edit; a deleted file is missing."""
    item_id: str


SEARCH_MARK, MIDDLE_MARK, REPLACE_MARK = "<<<<<<< SEARCH", "=======", ">>>>>>> REPLACE"
FENCE = re.compile(r"\s*```[\w+-]*\s*")
PATH_LINE = re.compile(r"\s*###\s+(\S.*?)\s*")


def read_hunks(answer: str) -> list[Hunk] | None:
    """Read the SEARCH/REPLACE hunks of an answer, given without thinking.

    A hunk may be fenced, with the path inside or before the fence, and several hunks may follow
    one path. Indentation is kept. Apart from hunks, only blank lines and fences are allowed.

    Returns:
        The hunks in order, at least one; None if the answer is malformed.
    """
    hunks: list[Hunk] = []
    path: str | None = None
    lines = iter(answer.split("\n"))
    for line in lines:
        named = PATH_LINE.fullmatch(line)
        if named:
            path = named[1].strip("`")
        elif line.strip() == SEARCH_MARK and path is not None:
            search = _lines_until(lines, MIDDLE_MARK)
            replace = _lines_until(lines, REPLACE_MARK) if search is not None else None
            if search is None or replace is None:
                return None
            hunks.append(Hunk(path, search, replace))
        elif line.strip() and not FENCE.fullmatch(line):
            return None
    return hunks or None


def _lines_until(lines: Iterator[str], mark: str) -> str | None:
    """Return the lines before a mark, each with its line end; None if there is no mark."""
    taken: list[str] = []
    for line in lines:
        if line.strip() == mark:
            return "".join(f"{one}\n" for one in taken)
        taken.append(line.removesuffix("\r"))
    return None


def apply_hunks(files: Files, hunks: Sequence[Hunk]) -> dict[str, str] | None:
    """Return the files after the hunks; None if a hunk does not apply.

    Each hunk replaces the first occurrence of its lines. An empty search creates a file.
    """
    edited = dict(files)
    for path, search, replace in hunks:
        if not search:
            if path in edited:
                return None
            edited[path] = replace
            continue
        lines, wanted = edited.get(path, "").split("\n"), search.split("\n")[:-1]
        starts = range(len(lines) - len(wanted) + 1)
        at = next((i for i in starts if lines[i : i + len(wanted)] == wanted), None)
        if at is None:
            return None
        lines[at : at + len(wanted)] = replace.split("\n")[:-1]
        edited[path] = "\n".join(lines)
    return edited


class DiffHunk(NamedTuple):
    """One hunk of a unified diff: the old lines from line `start`, and the new ones."""

    start: int
    old: list[str]
    new: list[str]


HUNK_HEADER = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
NO_FILE = "/dev/null"


def apply_unified_diff(files: Files, patch: str) -> dict[str, str] | None:
    """Return the files after a unified diff; None if it does not apply exactly."""
    edited = dict(files)
    for old_path, new_path, hunks in _diff_sections(patch):
        before = "" if old_path == NO_FILE else edited.pop(old_path, None)
        if before is None:
            return None
        after = _with_diff_hunks(before, hunks)
        if after is None:
            return None
        if new_path != NO_FILE:
            edited[new_path] = after
    return edited


def _diff_sections(patch: str) -> Iterator[tuple[str, str, list[DiffHunk]]]:
    """Yield old path, new path and hunks of each file of a unified diff."""
    lines = patch.split("\n")
    section: tuple[str, str, list[DiffHunk]] | None = None
    i = 0
    while i < len(lines):
        header = HUNK_HEADER.match(lines[i])
        if lines[i].startswith("--- ") and lines[i + 1 : i + 2] and lines[i + 1][:4] == "+++ ":
            if section is not None:
                yield section
            section = (_diff_path(lines[i]), _diff_path(lines[i + 1]), [])
            i += 2
        elif header and section is not None:
            hunk, i = _diff_hunk(lines, i + 1, header)
            section[2].append(hunk)
        else:
            i += 1
    if section is not None:
        yield section


def _diff_path(line: str) -> str:
    path = line[4:].split("\t")[0].strip()
    return path if path == NO_FILE else re.sub(r"^[ab]/", "", path)


def _diff_hunk(lines: Sequence[str], i: int, header: re.Match[str]) -> tuple[DiffHunk, int]:
    """Return the hunk whose lines start at `i`, and the index after it."""
    num_old, num_new = (int(header[group] or 1) for group in (2, 4))
    old: list[str] = []
    new: list[str] = []
    while i < len(lines) and (len(old) < num_old or len(new) < num_new):
        sign, text = lines[i][:1], lines[i][1:]
        if sign in ("-", " ", ""):
            old.append(text)
        if sign in ("+", " ", ""):
            new.append(text)
        i += 1
    return DiffHunk(int(header[1]), old, new), i


def _with_diff_hunks(before: str, hunks: Sequence[DiffHunk]) -> str | None:
    lines = before.split("\n")
    shift = 0
    for start, old, new in hunks:
        at = max(0, start - 1 + shift) if old else start + shift
        if lines[at : at + len(old)] != old:
            return None
        lines[at : at + len(old)] = new
        shift += len(new) - len(old)
    return "\n".join(lines)


WORD = re.compile(r"\w+|\s+|[^\w\s]")
MAX_DIFF_WORDS = 8000


def edit_similarity(files: Files, edited: Files, fixed: Files) -> float:
    """Compare two edits of the same files, in [0, 1]; 1 if and only if both have the same result.

    Args:
        files: contents before both edits.
        edited: contents after the edit to score.
        fixed: contents after the oracle's edit.
    """
    if edited == fixed:
        return 1.0
    mine, gold = _diff_words(files, edited), _diff_words(files, fixed)
    if not mine:  # nothing was changed
        return 0.0
    ratio = difflib.SequenceMatcher(None, mine, gold, autojunk=False).ratio()
    return min(ratio, 1.0 - 1e-6)  # diffs may agree up to `MAX_DIFF_WORDS`


def _diff_words(before: Files, after: Files) -> list[str]:
    words: list[str] = []
    for path in sorted({*before, *after}):
        old, new = (files.get(path, "").splitlines() for files in (before, after))
        if old != new:
            lines = list(difflib.unified_diff(old, new, lineterm=""))[2:]
            lines = ["@@" if line.startswith("@@") else line for line in lines]
            words += WORD.findall("\n".join([path, *lines, ""]))
    return words[:MAX_DIFF_WORDS]


def score_answer(completion: str, issue: Issue) -> float:
    """Return the similarity of an answer's edit to the oracle's; 0 if it is malformed.

    The completion must have one pair of think tags, followed by nothing but hunks that apply.
    """
    answer = answer_after_thinking(completion)
    hunks = None if answer is None else read_hunks(answer)
    edited = None if hunks is None else apply_hunks(issue.files, hunks)
    return 0.0 if edited is None else edit_similarity(issue.files, edited, issue.fixed)


FILE_START = re.compile(r"\[start of ([^\]\n]+)\]\n")
NUMBERED = re.compile(r"(\d+)(?: (.*)|)")


def read_code_context(text: str) -> dict[str, str]:
    """Return the files in a text of the form `[start of PATH]`, lines, `[end of PATH]`.

    If all lines of a file are numbered from 1, the numbers are removed.
    """
    files = {}
    position = 0
    while start := FILE_START.search(text, position):
        end = text.find(f"[end of {start[1]}]", start.end())
        if end < 0:
            break
        files[start[1]] = _without_numbers(text[start.end() : end])
        position = end
    return files


def _without_numbers(content: str) -> str:
    lines = content.removesuffix("\n").split("\n")
    found = [NUMBERED.fullmatch(line) for line in lines]
    if all(match and int(match[1]) == i for i, match in enumerate(found, start=1)):
        lines = [match[2] or "" for match in found if match]
    return "".join(f"{line}\n" for line in lines)


def read_issue(statement: str, code_context: str, patch: str, *, item_id: str) -> Issue | None:
    """Return the item of a row, with the files that the patch concerns.

    None if the patch does not apply to the files of the row, or changes nothing.
    """
    # Answers are read without carriage returns, so files with them could not be edited.
    files = read_code_context(code_context.replace("\r\n", "\n"))
    fixed = apply_unified_diff(files, patch.replace("\r\n", "\n"))
    if fixed is None or fixed == files:
        return None
    return Issue(statement, files, fixed, item_id)


SYSTEM_PROMPT = (
    "You are a software engineer who thinks deeply. Read the issue and the files, reason for as "
    "long as you need inside <think> </think> tags, and after the closing tag write the repair. "
    "The repair is a list of SEARCH/REPLACE hunks and nothing else: no explanation, no unified "
    "diff, no whole file, no other format."
)

USER_PROMPT = """Resolve this issue.

--- BEGIN ISSUE ---
{statement}
--- END ISSUE ---

{files}

Write each hunk in this form, with the path of the file first:

```
### path/to/file.py
<<<<<<< SEARCH
lines of the file, copied exactly
=======
lines that replace them
>>>>>>> REPLACE
```

The lines after SEARCH must be whole lines of the file, with their indentation, and are replaced \
where they first occur. To create a file, leave the SEARCH part empty."""

FILE_PROMPT = "--- BEGIN FILE {path} ---\n{content}--- END FILE {path} ---"

EXAMPLE_ISSUE = Issue(
    "`mean([])` raises ZeroDivisionError. It should return 0.0.",
    {"stats.py": "def mean(values):\n    total = sum(values)\n    return total / len(values)\n"},
    {},
    "example",
)
EXAMPLE_ANSWER = """<think>
An empty list has length 0, and the last line divides by it. The list has to be checked before.
</think>
```
### stats.py
<<<<<<< SEARCH
    total = sum(values)
    return total / len(values)
=======
    if not values:
        return 0.0
    total = sum(values)
    return total / len(values)
>>>>>>> REPLACE
```"""


def _user_message(issue: Issue) -> dict[str, str]:
    shown = [FILE_PROMPT.format(path=path, content=text) for path, text in issue.files.items()]
    content = USER_PROMPT.format(statement=issue.statement, files="\n\n".join(shown))
    return {"role": "user", "content": content}


def gold_answer(issue: Issue) -> str:
    """Return an answer that makes the oracle's edit, by replacing whole files."""
    hunks = [
        f"### {path}\n{SEARCH_MARK}\n{issue.files.get(path, '')}{MIDDLE_MARK}\n{text}{REPLACE_MARK}"
        for path, text in issue.fixed.items()
        if issue.files.get(path) != text
    ]
    return "<think>The oracle has it.</think>\n" + "\n\n".join(hunks)


class SWERLEnvConfig(SingleTurnEnvConfig):
    """Settings of the data sets, of the worked example and of dumps."""

    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with a train and a test file; None "
        "loads from the hub.",
    )
    dataset_name: str = Field(
        "princeton-nlp/SWE-bench_Lite_oracle", description="Data set of the hub for training."
    )
    dataset_config_name: str | None = Field(
        None, description="Configuration of that data set, if it has several."
    )
    dataset_split_train: str = Field("train", description="Split of the training data set.")
    dataset_split_eval: str = Field("test", description="Split of the evaluation data set.")
    dataset_issue_column: str = Field("problem_statement", description="Column of the issue.")
    dataset_code_context_column: str = Field(
        "text", description="Column of the files, between [start of PATH] and [end of PATH]."
    )
    dataset_oracle_patch_column: str = Field(
        "patch", description="Column of the oracle's patch, a unified diff."
    )
    dataset_name_eval: str | None = Field(
        None,
        description="Data set of the hub for evaluations; None reserves up to 500 training rows.",
    )
    dataset_config_name_eval: str | None = Field(
        None, description="Configuration of that data set, if it has several."
    )
    max_train_samples: int | None = Field(
        None, ge=1, description="Maximum number of training rows; None takes all."
    )
    max_test_samples: int | None = Field(
        None, ge=1, description="Maximum number of evaluation rows; None takes all."
    )
    dataset_seed: int = Field(42, description="Seed of the order of the rows.")
    eval_n_samples: int = Field(
        1, ge=1, le=128, description="Number of answers to each evaluation issue; all are scored."
    )
    use_curriculum_learning: bool = Field(
        True,
        description="Whether a worked example precedes each issue until enough patches are "
        "well-formed.",
    )
    icl_prompt_threshold: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Fraction of well-formed patches since the last log from which the worked "
        "example is omitted, permanently.",
    )
    dump_rollouts: bool = Field(
        False, description="Whether to save groups with a positive score to dump_dir."
    )
    dump_failed_rollouts: bool = Field(
        False, description="Whether to save groups without a positive score to dump_dir."
    )
    dump_dir: str = Field("data_dumps", description="Folder of saved groups.")
    temperature: float = Field(0.8, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.2, ge=0, description="Sampling temperature of evaluations.")
    mute_truncated: bool = Field(
        True, description="Whether to exclude truncated completions from training."
    )


class FormNote(NamedTuple):
    """Form and score of one completion."""

    has_think_tags: bool
    has_one_thought: bool
    has_patch: bool
    score: float


def note_form(completion: str, score: float) -> FormNote:
    """Record whether a completion has think tags, exactly one thought, and a patch after it."""
    answer = answer_after_thinking(completion)
    return FormNote(
        THINK_TAG.search(completion) is not None,
        answer is not None,
        answer is not None and read_hunks(answer) is not None,
        score,
    )


class SWERLEnv(ThinkingEnv):
    """Issues with an oracle patch; an item is an `Issue`.

    Attributes:
        iter: training rows used so far; kept in checkpoints.
        uses_icl: Whether the worked example precedes an issue; kept in checkpoints.
        num_skipped: rows whose patch does not apply to their files.
        notes: forms of the completions since the last log.
    """

    name = "swe_rl"
    env_config_cls = SWERLEnvConfig
    config: SWERLEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.uses_icl = self.config.use_curriculum_learning
        self.num_skipped = 0
        self.notes: list[FormNote] = []
        self._dumps: dict[str, GroupWriter] = {}

    @classmethod
    def config_init(cls) -> tuple[SWERLEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            SWERLEnvConfig,
            group_size=16,
            batch_size=512,
            total_steps=10000,
            steps_per_eval=100,
            max_token_length=15360,
            wandb_name="swe_rl",
            dataset_name="NousResearch/SWE-smith-oracle",
            max_train_samples=100_000,
            dataset_name_eval="princeton-nlp/SWE-bench_Lite_oracle",
            max_test_samples=500,
            dump_failed_rollouts=True,
        )

    async def setup(self) -> None:
        self.train, self.test = await asyncio.to_thread(self._read)
        logger.info("%d training rows and %d test issues", len(self.train), len(self.test))

    async def get_next_item(self) -> Issue:
        for _ in range(len(self.train)):
            index, self.iter = self.iter % len(self.train), self.iter + 1
            # In a thread: rows may hold megabytes of code.
            issue = await asyncio.to_thread(self._issue, self.train, index)
            if issue is not None:
                return issue
            self.num_skipped += 1
        raise NoDataError(
            "no patch of the data applies to the files of its row; expected unified diffs of the "
            "files between [start of PATH] and [end of PATH] in the column "
            f"{self.config.dataset_code_context_column}"
        )

    def eval_items(self) -> Sequence[Issue]:
        return [issue for issue in self.test for _ in range(self.config.eval_n_samples)]

    def prompt(self, item: Issue) -> list[dict[str, str]]:
        example = [
            _user_message(EXAMPLE_ISSUE),
            {"role": "assistant", "content": EXAMPLE_ANSWER},
        ]
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            *(example if self.uses_icl else ()),
            _user_message(item),
        ]

    async def score(self, item: Issue, answer: str) -> float:
        """Return the similarity of the edit; 0 after a timeout."""
        completion = self.opened_tag + answer if answer else ""
        return await self.score_pool.run(score_answer, completion, item, default=0.0)

    async def collect_trajectories(self, item: Issue) -> tuple[ScoredDataGroup | None, list[Item]]:
        """Sample and score a group; `item_ids` names the issue in saved groups."""
        group, backlog = await super().collect_trajectories(item)
        if group is not None:
            ids = [item.item_id] * len(group["tokens"])
            group["item_ids"] = ids  # type: ignore[typeddict-unknown-key]
        return group, backlog

    def note_group(
        self, item: Issue, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        pairs = list(zip(trajectories, scores, strict=True))
        self.notes += [note_form(self.opened_tag + t.completion, score) for t, score in pairs]
        has_success = any(score > 0 for score in scores)
        if self.config.dump_rollouts if has_success else self.config.dump_failed_rollouts:
            self._dump("rollouts" if has_success else "failed_rollouts", item, pairs)

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        notes, self.notes = self.notes, []
        metrics = {"env/using_icl_prompt": float(self.uses_icl)}
        if not notes:
            return metrics
        formed = statistics.fmean(note.has_patch for note in notes)
        if formed >= self.config.icl_prompt_threshold:
            self.uses_icl = False
        right_form = [note.score for note in notes if note.has_patch]
        if right_form:
            metrics["train/avg_similarity_score_for_correct_patches"] = statistics.fmean(right_form)
        return {
            **metrics,
            "train/avg_patch_format_accuracy": formed,
            "train/avg_think_tags_present_accuracy": statistics.fmean(
                note.has_think_tags for note in notes
            ),
            "train/avg_think_tags_well_formed_accuracy": statistics.fmean(
                note.has_one_thought for note in notes
            ),
        }

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        notes = [
            note_form(self.opened_tag + sample["messages"][-1]["content"], sample["score"])
            for sample in samples
        ]
        right_form = [note.score for note in notes if note.has_patch]
        return {
            "eval/avg_similarity_score_correct_patch_format": statistics.fmean(right_form or [0.0]),
            "eval/patch_format_accuracy": len(right_form) / len(notes),
            "eval/pass_at_1": statistics.fmean(note.score == 1.0 for note in notes),
            "eval/total_eval_items": len(notes),
            "eval/total_patch_format_correct": len(right_form),
            "eval/avg_think_tags_present": statistics.fmean(note.has_think_tags for note in notes),
            "eval/avg_think_tags_well_formed": statistics.fmean(
                note.has_one_thought for note in notes
            ),
        }

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        metrics["env/rows_skipped"] = self.num_skipped
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        own = {"iter": self.iter, "uses_icl": self.uses_icl}
        super().save_checkpoint(step, {**(data or {}), **own})

    async def close(self) -> None:
        for writer in self._dumps.values():
            writer.close()

    def check_gold_answer(self, item: Issue) -> str:
        return gold_answer(item)

    def _issue(self, rows: Any, index: int) -> Issue | None:
        row = rows[index]
        texts = (row[column] or "" for column in self._columns)
        return read_issue(*texts, item_id=str(row.get("instance_id") or index))

    @property
    def _columns(self) -> tuple[str, str, str]:
        config = self.config
        return (
            config.dataset_issue_column,
            config.dataset_code_context_column,
            config.dataset_oracle_patch_column,
        )

    def _read(self) -> tuple[Any, list[Issue]]:
        """Return the training rows, and the test issues whose patch applies."""
        train, test = self._read_local() if self.config.dataset_path else self._read_hub()
        found = [self._issue(test, i) for i in range(len(test))]
        issues = [issue for issue in found if issue is not None]
        if len(issues) < len(found):
            dropped = len(found) - len(issues)
            logger.warning("%d test rows dropped: their patch does not apply", dropped)
        return train, issues

    def _read_local(self) -> tuple[Any, Any]:
        train, test = read_splits(
            Path(self.config.dataset_path or ""),
            self._columns,
            shuffle_seed=self.config.dataset_seed,
            optional=("instance_id",),
        )
        return train[: self.config.max_train_samples], test[: self.config.max_test_samples]

    def _read_hub(self) -> tuple[Any, Any]:
        config = self.config
        rows = self._hub(
            config.dataset_name, config.dataset_config_name, config.dataset_split_train
        )
        if config.dataset_name_eval is None:
            num_test = min(MAX_RESERVED_ROWS, len(rows) // 2)
            test, rows = rows.select(range(num_test)), rows.select(range(num_test, len(rows)))
        else:
            test = self._hub(
                config.dataset_name_eval, config.dataset_config_name_eval, config.dataset_split_eval
            )
        return _first(rows, config.max_train_samples), _first(test, config.max_test_samples)

    def _hub(self, path: str, subset: str | None, split: str) -> Any:
        rows = hub_dataset(path, split=split, subset=subset)
        missing = sorted(set(self._columns) - set(rows.column_names))
        if missing:
            raise ConfigError(f"{path} on the hub has no {', '.join(missing)}")
        return rows.shuffle(seed=self.config.dataset_seed)

    def _dump(self, kind: str, item: Issue, pairs: Sequence[tuple[Trajectory, float]]) -> None:
        if kind not in self._dumps:
            self._dumps[kind] = GroupWriter(Path(self.config.dump_dir) / f"swe_rl_{kind}.jsonl")
        messages = self.prompt(item)
        record = {
            "item_id": item.item_id,
            "messages": [trajectory.chat(messages) for trajectory, _ in pairs],
            "scores": [score for _, score in pairs],
        }
        self._dumps[kind].write(record)


MAX_RESERVED_ROWS = 500
"""Training rows reserved for evaluations if there is no data set for them."""


def _first(rows: Any, limit: int | None) -> Any:
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


if __name__ == "__main__":
    SWERLEnv.cli()
