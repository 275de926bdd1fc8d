"""Weather forecasts: interpret the soundings of a model, and ask for the tools that are missing.

    soundings of a station -> [system, user] -> G completions: reasoning, tool calls, summary
        -> judge: REASONING_SCORE 0-5, TOOL_CALL_SCORE 0-3, FORECAST_SUMMARY_SCORE 0-2 -> their sum

The calls are rated, not made. The judge is the environment's own model, or that of
`--env.judge_base_url`. Soundings are JSON files, FOLDER/DATE/MODEL/STATION.json; some are shipped:

    python environments/community/meteorology_forecast/meteorology_forecast_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs.conversation import visible_text
from atroposlib.envs.dataset_items import DatasetItems
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.judge import quotations, quoted_parts
from atroposlib.tasks.judge_model import JudgeConfig, NoVerdictError, judge_of
from atroposlib.tasks.tool_calls import read_calls

__all__ = [
    "LEVEL",
    "MeteorologyForecastConfig",
    "MeteorologyForecastRLEnv",
    "read_ratings",
    "read_station",
    "summary_of",
]

logger = logging.getLogger("environments.meteorology_forecast")

CARD = EnvironmentCard(
    task="interpret model soundings and request tools",
    turns="1",
    reward="0 to 10, a judge's ratings of reasoning, tool calls and summary",
    data="soundings of 8 invented stations shipped, or `--env.sounding_data_root`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).with_name("sample")
LEVEL = (
    *("pressure_hpa", "height_m", "temperature_c", "dewpoint_c"),
    *("wind_direction_deg", "wind_speed_kt"),
)
"""Keys of one level of a sounding."""
MAX_LEVELS = 60
MAX_FILE_BYTES = 2_000_000
MAX_ANSWER_CHARACTERS = 20_000
TEST_FRACTION = 0.2
RATINGS = {"REASONING_SCORE": 5, "TOOL_CALL_SCORE": 3, "FORECAST_SUMMARY_SCORE": 2}
"""Name of a line of the judge to its highest number."""
PARTS = {
    "REASONING_SCORE": "reasoning",
    "TOOL_CALL_SCORE": "tool_calls",
    "FORECAST_SUMMARY_SCORE": "forecast_summary",
}
"""Name of a line of the judge to that of its part of the reward."""
RATING_LINE = re.compile(
    rf"[ \t*-]*({'|'.join(RATINGS)}):[ \t*]*(\d(?:\.\d{{1,2}})?)(?:/\d)?[ \t*]*"
)
"""A rating on a line of its own, which may be bold or an entry of a list."""
SUMMARY = "FORECAST SUMMARY:"
TOOLS = (
    "surface_observations(station), radar(station, product), satellite(channel), "
    "lightning(station), model_ensemble(model, variable), upper_air_observation(station), "
    "forecaster_discussion(office)"
)
SYSTEM_PROMPT = (
    "You are a meteorologist. Interpret the soundings of a numerical model for a station: "
    "stability, moisture, wind shear, inversions, the type of precipitation, and how they change "
    "with the hour. Write three things, in this order:\n"
    "1. Your reasoning, with the numbers that it rests on.\n"
    "2. One to four requests for the tools that would settle what is still open, each as "
    '<tool_call>{{"name": "radar", "arguments": {{"station": "ABCD", "product": '
    '"reflectivity"}}}}</tool_call>. The tools are {tools}. They are not run now.\n'
    "3. A last line that begins with {summary} and says in one or two sentences what to expect, "
    "with hours and risks.\n\n"
    "You may think first between <think> and </think>; only what follows is read."
)
QUESTION = "Station: {station}. Model: {model}, run of {date}.\n\n{soundings}"
REQUEST = (
    "You grade a trainee meteorologist, who has interpreted soundings. Compare the answer with the "
    "soundings; most answers deserve numbers in the middle. Rate\n"
    "- the reasoning, 0 to 5: does it follow from the numbers, is it right, and complete?\n"
    "- the requests for tools, 0 to 3: would they settle what is open, and are they well-formed?\n"
    "- the summary, 0 to 2: does it follow from the reasoning, with hours and risks?\n\n"
    "{quotations}\n\nEnd with three lines:\nREASONING_SCORE: n\nTOOL_CALL_SCORE: n\n"
    "FORECAST_SUMMARY_SCORE: n"
)
Station = Mapping[str, str]
"""One item: `station`, `model`, `date`, and `soundings` as a text."""


class MeteorologyForecastConfig(JudgeConfig, SingleTurnEnvConfig):
    """Settings of the soundings and of the judge."""

    sounding_data_root: str = Field(
        str(SAMPLE), description="Folder of soundings, with files DATE/MODEL/STATION.json."
    )
    target_date: str = Field(
        "20250314", pattern=r"^\d{8}$", description="Date of the soundings, as YYYYMMDD."
    )
    nwp_models_to_use: list[str] = Field(
        ["RAP"], min_length=1, description="Numerical models whose soundings are read."
    )
    forecast_hours_to_sample: list[int] = Field(
        [6, 9, 12, 15, 18], min_length=1, description="Hours of the forecast that are shown."
    )
    judge_api_key_env: str = Field(
        "OPENROUTER_API_KEY",
        description="Environment variable with the key of the judge's server.",
    )


def read_station(path: Path, hours: Sequence[int]) -> str | None:
    """Return the soundings of a file as tables; None if it has none of the hours.

    Args:
        path: file with `{"soundings": {HOUR: [level, ...]}}`; a level has a number for each key of
            `LEVEL`.
        hours: hours that are shown.

    Raises:
        ConfigError: the file cannot be read, or a level lacks a finite number.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        soundings = json.loads(path.read_text(encoding="utf-8"))["soundings"]
        tables = [_table(hour, soundings[str(hour)]) for hour in hours if str(hour) in soundings]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); expected an object with soundings by hour, of "
            f"levels with the numbers {', '.join(LEVEL)}"
        ) from error
    return "\n\n".join(tables) or None


def _table(hour: int, levels: Sequence[Mapping[str, float]]) -> str:
    lines = [f"Hour {hour}", " ".join(LEVEL)]
    for level in levels[:MAX_LEVELS]:
        values = [float(level[name]) for name in LEVEL]
        if not all(map(math.isfinite, values)):
            raise ValueError(f"hour {hour} has a number that is not finite")
        lines.append(" ".join(f"{value:g}" for value in values))
    return "\n".join(lines)


def summary_of(answer: str) -> str:
    """Return the text after the last line that begins with `SUMMARY`; empty without one."""
    for line in reversed(answer.splitlines()):
        text = line.strip().strip("*#").strip()
        if text.upper().startswith(SUMMARY):
            return text[len(SUMMARY) :].strip("* ")
    return ""


def read_ratings(verdict: str) -> dict[str, float] | None:
    """Return the ratings of a judge's reply; None unless each line is there once, in its range."""
    found = [RATING_LINE.fullmatch(line) for line in visible_text(verdict).splitlines()]
    pairs = [(line[1], float(line[2])) for line in found if line]
    ratings = dict(pairs)
    if len(pairs) != len(RATINGS) or ratings.keys() != RATINGS.keys():
        return None
    return ratings if all(ratings[name] <= most for name, most in RATINGS.items()) else None


class MeteorologyForecastRLEnv(DatasetItems, SingleTurnEnv):
    """Stations and their soundings; an item is a `Station`.

    Attributes:
        judge: rates answers.
    """

    name = "MeteorologyForecastRL"
    env_config_cls = MeteorologyForecastConfig
    config: MeteorologyForecastConfig
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 8192,
        "wandb_name": "MeteorologyForecastRL",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = judge_of(self, split="train")

    def _read(self) -> tuple[list[Station], list[Station]]:
        """Read the stations; a part of them is reserved for evaluations, for all models."""
        config = self.config
        folder = Path(config.sounding_data_root) / config.target_date
        stations: dict[str, list[Station]] = {}
        for model in config.nwp_models_to_use:
            for path in sorted((folder / model).glob("*.json")):
                text = read_station(path, config.forecast_hours_to_sample)
                if text is None:
                    logger.warning("%s has none of the hours, and is left out", path)
                    continue
                item = {"station": path.stem, "model": model, "date": config.target_date}
                stations.setdefault(path.stem, []).append({**item, "soundings": text})
        if not stations:
            raise ConfigError(
                f"{folder} has no soundings of {', '.join(config.nwp_models_to_use)} for the hours "
                f"{config.forecast_hours_to_sample}; expected files MODEL/STATION.json"
            )
        names = list(stations)
        random.Random(0).shuffle(names)
        num_test = max(1, round(TEST_FRACTION * len(names)))
        test = [item for name in names[:num_test] for item in stations[name]]
        train = [item for name in names[num_test:] for item in stations[name]]
        return train or test, test

    def prompt(self, item: Station) -> list[dict[str, str]]:
        system = SYSTEM_PROMPT.format(tools=TOOLS, summary=SUMMARY)
        return [
            {"role": "system", "content": system},
            {"role": "user", "content": QUESTION.format(**item)},
        ]

    async def score(self, item: Station, answer: str) -> dict[str, float]:
        """Return the judge's ratings; 0.0 for an empty or endless answer, which is not judged.

        An answer without a readable call, or without a summary, has 0.0 in that part.

        Raises:
            NoVerdictError: the judge did not give three ratings in their ranges.
        """
        if not answer.strip() or len(answer) > MAX_ANSWER_CHARACTERS:
            return dict.fromkeys(PARTS.values(), 0.0)
        parts = {"soundings": QUESTION.format(**item), "answer": answer}
        verdict = await self.judge.reply(REQUEST.format(quotations=quotations(parts)))
        ratings = read_ratings(verdict)
        if ratings is None:
            raise NoVerdictError(f"the judge did not give three ratings: {verdict[-80:]!r}")
        if not read_calls(answer).calls:
            ratings["TOOL_CALL_SCORE"] = 0.0
        if not summary_of(answer):
            ratings["FORECAST_SUMMARY_SCORE"] = 0.0
        return {PARTS[name]: value for name, value in ratings.items()}

    async def close(self) -> None:
        await self.judge.close()
        await super().close()

    def check_gold_answer(self, item: Station) -> str:
        call = {"name": "surface_observations", "arguments": {"station": item["station"]}}
        return (
            "The lowest levels are moist and the winds veer with height.\n"
            f"<tool_call>{json.dumps(call)}</tool_call>\n{SUMMARY} showers after hour 12."
        )

    def check_judge_reply(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        parts = quoted_parts(str(messages[-1].get("content")))
        if not parts:
            return None
        is_good = bool(summary_of(parts["answer"]))
        return "\n".join(f"{name}: {most if is_good else 0}" for name, most in RATINGS.items())


if __name__ == "__main__":
    MeteorologyForecastRLEnv.cli()
