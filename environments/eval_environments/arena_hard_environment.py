"""Arena-Hard: hard requests of users, whose replies a judge compares with those of a baseline.

    prompt -> reply ─┬► A = reply,    B = baseline ─► judge ─► [[A>B]], [[B>A]] or [[A=B]]
                     └► A = baseline, B = reply    ─► judge ─► ...        mean of +1, -1 and 0

    python environments/eval_environments/arena_hard_environment.py evaluate \
        --env.dataset_path environments/data/arena_hard_sample --env.data_dir_to_save_evals results

The judge is Claude Sonnet 4 on the server of Anthropic, with the key of `ANTHROPIC_API_KEY`; see
the settings `judge_*`. With `--env.judge_base_url None`, the evaluated model judges itself. Local
rows have the columns `prompt` and `baseline`, or `question_id` and the answers in
`--env.baseline_path`. `serve` and `process` train on the same scores.

Metrics: `eval/overall_winrate` (0 to 1, a tie is half a win), `eval/win_rate`, `eval/tie_rate`,
`eval/loss_rate`, `eval/winrate_{category}`, and `eval/no_verdict_rate`: requests that the judge
gave no verdict on, or several. Those, and a reply without text, count as a loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.dataset_items import hub_rows
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import answer_part
from atroposlib.tasks.evaluations import (
    TRAIN_SETTINGS,
    EvalGrade,
    EvalQuestion,
    EvalSource,
    TrainableEvalConfig,
    TrainableEvaluation,
)
from atroposlib.tasks.judge import quotations, quoted_parts
from atroposlib.tasks.judged_evaluations import JudgedEvalConfig, JudgedEvaluationEnv
from atroposlib.utils.aio import all_results
from atroposlib.utils.local_records import read_split

__all__ = ["ArenaHardConfig", "ArenaHardEnv", "judge_request", "read_verdict"]

CARD = EnvironmentCard(
    task="hard requests of users, compared with the replies of a baseline (Arena-Hard)",
    turns="1",
    reward="-1 to 1, the mean verdict of a judge in both orders",
    data="Arena-Hard from the hub, or `--env.dataset_path`",
    command="evaluate --env.dataset_path environments/data/arena_hard_sample "
    "--env.judge_base_url None",
)
SAMPLE = Path(__file__).parents[1] / "data" / "arena_hard_sample"

PROMPT_COLUMNS = ("prompt", "question", "turns", "messages")
ANSWER_COLUMNS = ("baseline", "answer", "response", "output", "choices", "messages")
ID_COLUMNS = ("question_id", "uid", "id")
CATEGORY_COLUMNS = ("category", "cluster")
COLUMNS = tuple(dict.fromkeys((*PROMPT_COLUMNS, *ANSWER_COLUMNS, *ID_COLUMNS, *CATEGORY_COLUMNS)))
BASELINE_FILES = ("baseline", "train", "test")

JUDGE_REQUEST = (
    "Two models replied to a request of a user. Compare their replies. First think about what a "
    "good reply must contain. Then look for mistakes and for what is missing in each of the two. "
    "A reply should be right, helpful and to the point; length is not a merit, and the order of "
    "the two means nothing. {quotations}\n\n"
    "Explain your comparison in a few sentences. End with one verdict: [[A>B]] if reply A is "
    "better, [[B>A]] if reply B is better, [[A=B]] if they are equally good."
)
VERDICTS = {"A>B": 1, "B>A": -1, "A=B": 0}
"""Verdict to the score of A."""
VERDICT = re.compile(r"\[\[([AB<>=\s]{1,20})\]\]")
GOOD_REPLY = "This is a reply in full to what you asked."
"""Reply that the scripted judge of `check` prefers."""


class ArenaHardConfig(JudgedEvalConfig, TrainableEvalConfig):
    """Settings of Arena-Hard and its judge."""

    baseline_path: str | None = Field(
        None,
        description="File with the answers of the baseline, by question_id or prompt; None takes "
        "the column baseline of the prompts or, for those of the hub, baseline_name.",
    )
    baseline_name: str = Field(
        "NousResearch/gpt-4-0314-baseline-arenahard",
        description="Data set of the hub with the answers of the baseline.",
    )
    judge_model_name: str | None = Field(
        "claude-sonnet-4-20250514",
        description="Model of the judge; None uses the evaluated model.",
    )
    judge_base_url: str | None = Field(
        "https://api.anthropic.com/v1",
        description="URL of the judge's server, ending in /v1; None uses the servers of the "
        "evaluated model, and that model.",
    )
    judge_api_key_env: str = Field(
        "ANTHROPIC_API_KEY", description="Environment variable with the key of the judge's server."
    )


def text_in(value: Any, role: str) -> str:
    """Return a text, or that of the first message of a role in a chat; empty without one."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, Mapping):
        fields = (value.get(name) for name in ("content", "value", "turns"))
        return text_in(next(filter(None, fields), ""), role)
    entries = value if isinstance(value, list | tuple) else ()
    fitting = (e for e in entries if not isinstance(e, Mapping) or e.get("role", role) == role)
    return text_in(next(fitting, ""), role)


def text_of_row(row: Mapping[str, Any], columns: Sequence[str], role: str) -> str:
    """Return the first text in some columns of a row; empty without one."""
    return next(filter(None, (text_in(row.get(column), role) for column in columns)), "")


def keys_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a prompt and the answer of the baseline have in common: id, or prompt."""
    ids = [("id", str(row[name])) for name in ID_COLUMNS if row.get(name) is not None]
    prompt = text_of_row(row, PROMPT_COLUMNS, "user")
    return [*ids[:1], *([("prompt", prompt)] if prompt else [])]


def _read(row: Mapping[str, Any]) -> EvalQuestion:
    """Convert a row; the gold answer is that of the baseline."""
    prompt = text_of_row(row, PROMPT_COLUMNS, "user")
    baseline = text_in(row.get("baseline"), "assistant")
    if not prompt:
        raise ConfigError(f"it has no text in {', '.join(PROMPT_COLUMNS)}")
    if not baseline:
        raise ConfigError("there is no answer of the baseline to it; set --env.baseline_path")
    categories = [str(row[name]) for name in CATEGORY_COLUMNS if row.get(name)]
    return EvalQuestion(prompt, baseline, groups=tuple(("category", c) for c in categories[:1]))


class ArenaHardEnv(TrainableEvaluation, JudgedEvaluationEnv):
    """Arena-Hard; the gold answer is that of the baseline. An item has a `category`."""

    name = "arena_hard"
    source = EvalSource(
        path="NousResearch/arena-hard-v1-prompts",
        split="train",
        columns=(),
        optional=COLUMNS,
        read=_read,
        overall="eval/overall_winrate",
        group_metrics={"category": "eval/winrate_{}"},
    )
    default_settings: ClassVar[dict[str, Any]] = {**TRAIN_SETTINGS, "group_size": 8}
    env_config_cls = ArenaHardConfig
    config: ArenaHardConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "judge_base_url": None,
    }

    def questions_of(self, rows: Sequence[Mapping[str, Any]], *, place: str) -> list[EvalQuestion]:
        """Convert rows, with the answers of the baseline of another file where they have none."""
        is_complete = all(text_in(row.get("baseline"), "assistant") for row in rows)
        answers = {} if is_complete else self.baseline_answers()
        completed = []
        for row in rows:
            found = next((answers[key] for key in keys_of(row) if key in answers), None)
            completed.append({**row, "baseline": row.get("baseline") or found})
        return super().questions_of(completed, place=place)

    def baseline_answers(self) -> dict[tuple[str, str], str]:
        """Return the answers of the baseline by the keys of their prompts."""
        config = self.config
        if config.baseline_path:
            path = Path(config.baseline_path)
            rows = read_split(path, BASELINE_FILES, (), optional=COLUMNS)
        elif config.dataset_path:
            return {}
        else:
            rows = hub_rows(config.baseline_name, split="train")
        answers: dict[tuple[str, str], str] = {}
        for row in rows:
            answer = text_of_row(row, ANSWER_COLUMNS, "assistant")
            answers |= dict.fromkeys(keys_of(row), answer)
        return answers

    def question_text(self, item: EvalQuestion) -> str:
        return item.question

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        """Ask the judge in both orders; a reply without text loses and is not sent to it."""
        reply = answer_part(completion)
        if not reply:
            return _graded(-1.0, None, "no_answer", num_missing=0)
        verdicts = [
            read_verdict(text)
            for text in await all_results(
                self.judge.reply(judge_request(item.question, first, second))
                for first, second in ((reply, item.gold), (item.gold, reply))
            )
        ]
        signs = (1, -1)
        scores = [-1 if v is None else sign * v for sign, v in zip(signs, verdicts, strict=True)]
        num_missing = verdicts.count(None)
        method = "no_verdict" if num_missing else "judge"
        return _graded(sum(scores) / len(scores), reply, method, num_missing=num_missing)

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        return super().evaluation_values({**record, "score": (record["score"] + 1) / 2})

    def check_gold_answer(self, item: EvalQuestion) -> str:
        return f"<think>I plan it.</think>{GOOD_REPLY}"

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        parts = quoted_parts(str(messages[-1]["content"]))
        if "reply A" not in parts:
            return None
        is_good = [GOOD_REPLY in parts[f"reply {name}"] for name in "AB"]
        return "[[A=B]]" if is_good[0] == is_good[1] else f"[[{'A>B' if is_good[0] else 'B>A'}]]"


def _graded(score: float, reply: str | None, method: str, *, num_missing: int) -> EvalGrade:
    values = {
        "eval/win_rate": float(score > 0),
        "eval/tie_rate": float(score == 0),
        "eval/loss_rate": float(score < 0),
        "eval/no_verdict_rate": num_missing / 2,
    }
    return EvalGrade(score, reply, method, reply is not None, values)


def judge_request(prompt: str, first: str, second: str) -> str:
    """Return the request to compare two replies to a prompt."""
    parts = {"request": prompt, "reply A": first, "reply B": second}
    return JUDGE_REQUEST.format(quotations=quotations(parts))


def read_verdict(reply: str) -> int | None:
    """Return 1 if a judge prefers A, -1 for B, 0 for a tie; None for no verdict or several."""
    verdicts = {"".join(text.split()) for text in VERDICT.findall(answer_part(reply))}
    return VERDICTS.get(verdicts.pop()) if len(verdicts) == 1 else None


if __name__ == "__main__":
    ArenaHardEnv.cli()
