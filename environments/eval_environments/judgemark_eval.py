"""Judgemark: the model scores creative texts as a judge, and should rank their writers as known.

    text, prompt with criteria -> one chat -> lines `Name: number` -> score of the text, 1 to 10
    mean score of each writer, reference of each writer -> rank correlation

    python environments/eval_environments/judgemark_eval.py evaluate \
        --env.samples_file environments/data/judgemark_sample/samples.json \
        --env.prompts_file environments/data/judgemark_sample/prompts.json \
        --env.data_dir_to_save_evals results

The data is that of a checkout of Judgemark-v2, or of the same form: `--env.samples_file` has texts
by writer, iteration and prompt, and `--env.prompts_file` the prompts of the judge. The reference of
a writer, such as its rating by people, is in the samples or in `--env.reference_file`.

Metrics: `eval/spearman` and `eval/kendall_tau` (-1 to 1; 0 if all scores are equal),
`eval/scored_rate` (replies with a score), `eval/mean_score` (0 for a reply without one),
`eval/writer_{k}_score`, `eval/num_writers` (those with a score, which alone are ranked). A reply
needs at least five criteria, each with one number in the range of the settings.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from atroposlib.envs.evaluation import take_evenly
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.eval_answers import answer_part
from atroposlib.tasks.evaluations import (
    EvalFamilyConfig,
    EvalGrade,
    EvalQuestion,
    EvalSource,
    EvaluationEnv,
)
from atroposlib.tasks.judge import quotations

__all__ = [
    "JudgeMarkEvalConfig",
    "JudgeMarkEvalEnv",
    "kendall_tau",
    "read_criteria",
    "spearman",
    "text_score",
]

CARD = EnvironmentCard(
    task="score creative texts as a judge, in the order of their writers (Judgemark)",
    turns="1",
    reward="1 to 10, the score that the model gives; 0 without one",
    data="a checkout of Judgemark-v2: `--env.samples_file`, `--env.prompts_file`",
    command="evaluate --env.samples_file environments/data/judgemark_sample/samples.json "
    "--env.prompts_file environments/data/judgemark_sample/prompts.json",
)
SAMPLE = Path(__file__).parents[1] / "data" / "judgemark_sample"

MIN_CRITERIA = 5
LOWEST, HIGHEST = 1.0, 10.0
"""Range of the score of a text."""
PLACEHOLDERS = ("{test_model_response}", "[TEST MODEL RESPONSE]")
"""Places of the text in the prompts, the first one of which counts."""
NEGATIVE_CRITERIA = [
    "amateurish", "amateurish descriptives", "characters are too good",
    "clunky asides and interruptive sentence structures", "contrived", "forced optimism",
    "incongruent ending positivity", "meandering", "melodramatic", "overwrought",
    "profundity over-reach", "purple prose", "shallow optimism", "shallow resolution",
    "simplistic moralizing", "stilted dialogue", "tell-don't-show", "tit-for-tat dialogue", "trite",
    "unearned resolution", "unearned transformations", "uninspiring", "unsurprising or uncreative",
    "weak dialogue",
]  # fmt: skip
CRITERION = re.compile(
    r"^[ \t>*_#\-\u2022]{0,9}(?:\d{1,2}[.)][ \t]{0,3})?[*_]{0,2}([A-Za-z][^\n:*_]{0,80}?)"
    r"[*_ \t]{0,4}:[*_ \t]{0,4}(-?\d{1,6}(?:\.\d{1,6})?)(?: ?/ ?(\d{1,6}))?[*_ \t.,;\r]{0,6}$",
    re.MULTILINE,
)
MAX_WRITERS = 1000


class JudgeMarkEvalConfig(EvalFamilyConfig):
    """Settings of the files and of the criteria."""

    eval_temperature: float = Field(0.0, ge=0, description="Sampling temperature of evaluations.")
    samples_file: str | None = Field(
        None, description="JSON file with the texts by writer, iteration and prompt, or as rows."
    )
    prompts_file: str | None = Field(
        None, description="JSON file with the judge's prompts, by the names in samples_file."
    )
    reference_file: str | None = Field(
        None,
        description="JSON file with the reference score of each writer; None: in samples_file.",
    )
    scoring_min: float = Field(
        0, ge=-1000, le=1000, description="Lowest number that a criterion may get."
    )
    scoring_max: float = Field(
        10, ge=-1000, le=1000, description="Highest number that a criterion may get."
    )
    max_samples: int | None = Field(
        None, ge=1, description="Maximum number of texts, evenly spaced over the file; None: all."
    )
    negative_criteria: list[str] = Field(
        NEGATIVE_CRITERIA, description="Criteria for which a low number is a good one."
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.scoring_min >= self.scoring_max:
            raise ValueError(
                f"scoring_min ({self.scoring_min:g}) must be below scoring_max "
                f"({self.scoring_max:g})"
            )
        return self


def sample_rows(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the texts of a file with `writer`, `prompt`, `text` and, if it has one, `reference`.

    Args:
        data: rows with these keys; or a mapping of writers to iterations to prompts to texts, where
            `samples` may hold the iterations, next to a `reference`.

    Raises:
        ConfigError: the data has another form.
    """
    if isinstance(data, list):
        for number, row in enumerate(data):
            if not isinstance(row, Mapping) or not {"writer", "prompt", "text"} <= row.keys():
                raise ConfigError(f"row {number} needs writer, prompt and text")
            yield {**row, "iteration": row.get("iteration", "1")}
        return
    for writer, entry in _mapping(data, "the file").items():
        fields = _mapping(entry, writer)
        iterations = _mapping(fields.get("samples", fields), writer)
        for iteration, texts in iterations.items():
            for prompt, text in _mapping(texts, f"{writer}, iteration {iteration}").items():
                row = {"writer": writer, "iteration": iteration, "prompt": prompt, "text": text}
                yield {**row, "reference": fields["reference"] if "samples" in fields else None}


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{place}: expected a mapping of writers to iterations to prompts to texts"
        )
    return value


def _read(row: Mapping[str, Any]) -> EvalQuestion:
    """Convert a row whose `template` is the prompt; the gold answer is the reference."""
    reference = float(row["reference"])
    text = str(row["text"])
    if not math.isfinite(reference):
        raise ConfigError("its reference is not finite")
    quoted = quotations({"text": text})
    template = str(row["template"])
    place = next((name for name in PLACEHOLDERS if name in template), None)
    question = f"{template}\n\n{quoted}" if place is None else template.replace(place, quoted, 1)
    return EvalQuestion(question, reference, groups=(("writer", str(row["writer"])),))


class JudgeMarkEvalEnv(EvaluationEnv):
    """Texts to score; an item has the group `writer`, and the writer's reference as gold."""

    name = "judgemark_eval"
    source = EvalSource(
        path="Judgemark-v2",
        columns=("writer", "prompt", "text", "reference"),
        read=_read,
        overall="eval/mean_score",
        group_metrics={"writer": "eval/writer_{}_score"},
    )
    env_config_cls = JudgeMarkEvalConfig
    config: JudgeMarkEvalConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "samples_file": str(SAMPLE / "samples.json"),
        "prompts_file": str(SAMPLE / "prompts.json"),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative = {_words(name) for name in self.config.negative_criteria}

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        if config.dataset_path:
            raise ConfigError("env.dataset_path: set samples_file and prompts_file instead")
        for setting in ("samples_file", "prompts_file", "reference_file"):
            path = getattr(config, setting)
            if path is None and setting != "reference_file":
                raise ConfigError(
                    f"env.{setting} is not set; expected a file of a checkout of Judgemark-v2, or "
                    f"of the form of {SAMPLE.name} in environments/data"
                )
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"env.{setting}: no file {path}")

    @property
    def place_of_data(self) -> str:
        return str(self.config.samples_file)

    def load_questions(self) -> list[EvalQuestion]:
        """Read the files.

        Raises:
            ConfigError: a file has another form, or a text has no prompt or no reference.
        """
        config = self.config
        self.check_inputs(config)
        prompts = _mapping(_json_of(config.prompts_file), "prompts_file")
        references: Mapping[str, Any] = {}
        if config.reference_file:
            references = _mapping(_json_of(config.reference_file), "reference_file")
        rows = take_evenly(list(sample_rows(_json_of(config.samples_file))), config.max_samples)
        completed = []
        for row in rows:
            reference = references.get(row["writer"], row.get("reference"))
            if row["prompt"] not in prompts:
                raise ConfigError(f"prompts_file has no prompt {row['prompt']!r}")
            if reference is None:
                raise ConfigError(
                    f"the writer {row['writer']!r} has no reference; set --env.reference_file"
                )
            template = prompts[row["prompt"]]
            completed.append({**row, "template": template, "reference": reference})
        num_writers = len({str(row["writer"]) for row in rows})
        if not 2 <= num_writers <= MAX_WRITERS:
            raise ConfigError(
                f"samples_file has {num_writers} writers; expected 2 to {MAX_WRITERS}"
            )
        return self.read_rows(completed)

    def question_text(self, item: EvalQuestion) -> str:
        return item.question

    async def grade(self, item: EvalQuestion, completion: str) -> EvalGrade:
        config = self.config
        criteria = read_criteria(completion, high=config.scoring_max)
        score = text_score(
            criteria, negative=self._negative, low=config.scoring_min, high=config.scoring_max
        )
        is_scored = score is not None
        found = "; ".join(f"{name}: {value:g}" for name, value in (criteria or {}).items())
        method = "criteria" if is_scored else "no_score"
        values = {"eval/scored_rate": float(is_scored)}
        return EvalGrade(score or 0.0, found or None, method, is_scored, values)

    def evaluation_values(self, record: Mapping[str, Any]) -> dict[str, float]:
        values = super().evaluation_values(record)
        if record["format_compliant"]:
            return values
        return {name: value for name, value in values.items() if "/writer_" not in name}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        metrics = super().evaluation_metrics(samples)
        del metrics["eval/total_correct"]  # scores are not right or wrong
        scores: dict[str, list[tuple[float, float]]] = {}
        for sample in samples:
            if sample["format_compliant"]:
                pair = (sample["score"], float(sample["gold_answer"]))
                scores.setdefault(sample["groups"]["writer"], []).append(pair)
        given = [statistics.fmean(score for score, _ in pairs) for pairs in scores.values()]
        known = [statistics.fmean(reference for _, reference in pairs) for pairs in scores.values()]
        return {
            **metrics,
            "eval/spearman": spearman(given, known),
            "eval/kendall_tau": kendall_tau(given, known),
            "eval/num_writers": len(scores),
        }

    def check_gold_answer(self, item: EvalQuestion) -> str:
        lines = (f"Criterion {letter}: {self.config.scoring_max:g}" for letter in "ABCDE")
        return "<think>I read it.</think>" + "\n".join(lines)


def _json_of(path: str | None) -> Any:
    """Return the content of a JSON file."""
    try:
        return json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error


def _words(name: str) -> str:
    return " ".join(re.findall(r"[^\W_]+", name.lower()))


def read_criteria(completion: str, *, high: float) -> dict[str, float] | None:
    """Return the numbers of the lines `Name: number` or `Name: number/high`.

    None if a name has several numbers, or if one is out of another highest number.
    """
    criteria: dict[str, float] = {}
    for name, number, highest in CRITERION.findall(answer_part(completion)):
        value = float(number)
        if criteria.setdefault(_words(name), value) != value or float(highest or high) != high:
            return None
    return criteria


def text_score(
    criteria: Mapping[str, float] | None, *, negative: set[str], low: float, high: float
) -> float | None:
    """Return the mean of criteria, negative ones inverted, mapped to 1 to 10.

    None with fewer than five criteria, or if a number is out of the range.
    """
    values = list((criteria or {}).items())
    if len(values) < MIN_CRITERIA or not all(low <= value <= high for _, value in values):
        return None
    mean = statistics.fmean(
        low + high - value if name in negative else value for name, value in values
    )
    return LOWEST + (HIGHEST - LOWEST) * (mean - low) / (high - low)


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the rank correlation of two lists of equal length; 0 if one is constant or short."""
    ranks = [_ranks(values) for values in (first, second)]
    if any(len(set(rank)) < 2 for rank in ranks):
        return 0.0
    return statistics.correlation(*ranks)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks from 1, equal values with the mean of theirs."""
    ordered = sorted(values)
    first: dict[float, int] = {}
    counts: dict[float, int] = {}
    for position, value in enumerate(ordered, 1):
        first.setdefault(value, position)
        counts[value] = counts.get(value, 0) + 1
    return [first[value] + (counts[value] - 1) / 2 for value in values]


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau-b of two lists of equal length; 0 if one is constant or short."""
    pairs = list(zip(first, second, strict=True))
    signs = [
        (_sign(a[0] - b[0]), _sign(a[1] - b[1])) for i, a in enumerate(pairs) for b in pairs[:i]
    ]
    untied = [sum(sign != 0 for sign in column) for column in zip(*signs, strict=True)]
    if not untied or 0 in untied:
        return 0.0
    return sum(a * b for a, b in signs) / math.sqrt(untied[0] * untied[1])


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


if __name__ == "__main__":
    JudgeMarkEvalEnv.cli()
