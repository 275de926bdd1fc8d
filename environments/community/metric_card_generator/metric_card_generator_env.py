"""Metric cards: describe one number of a dashboard as JSON.

    request -> [system, user] -> G completions -> a card with the value that was asked for?
        -> 0.5 for its schema and content, 0.5 for JSON and nothing else

Requests are built in:

    python environments/community/metric_card_generator/metric_card_generator_env.py process \
        --env.total_steps 4
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.tasks.answers import last_code_block
from atroposlib.tasks.card import EnvironmentCard

__all__ = [
    "REQUESTS",
    "CardRequest",
    "MetricCard",
    "MetricCardConfig",
    "MetricCardEnv",
    "read_object",
    "score_card",
]

CARD = EnvironmentCard(
    task="describe a number of a dashboard as a JSON card",
    turns="1",
    reward="0.5 schema and content, 0.5 JSON only; 0 for a card without the value",
    data="24 requests built in",
    command="process --env.total_steps 4",
)

SCHEMA, FORMATTING = 0.5, 0.5
MAX_ANSWER_CHARACTERS = 5_000
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
NUM_TEST = 6
SYSTEM_PROMPT = (
    "You write metric cards for a dashboard. A card is one JSON object and nothing else, such as:"
    '\n\n{"componentType": "metricCard", "props": {"title": "Open tickets", "value": "37", '
    '"description": "Waiting for a reply", "trend": {"direction": "down", "value": "5%"}, '
    '"icon": "inbox"}}\n\ncomponentType, title and value are required, and all texts are strings. '
    "description, trend and icon may be left out; direction is up, down or flat. Give a trend if "
    "and only if the request has one. You may reason first between <think> and </think>."
)
Direction = Literal["up", "down", "flat"]


class CardRequest(NamedTuple):
    """One item."""

    request: str
    title_words: tuple[str, ...]
    """Words of which a title has at least one, in lower case."""
    value: float
    direction: Direction | None = None
    """Direction of the trend; None if the request has none."""


REQUESTS = (
    CardRequest(
        "Monthly revenue is 48,200 euros, 12% more than last month.", ("revenue",), 48200, "up"
    ),
    CardRequest("There are 318 active users at the moment.", ("users",), 318),
    CardRequest("The conversion rate fell by half a point to 2.7%.", ("conversion",), 2.7, "down"),
    CardRequest("On average, a page loads in 1.4 seconds.", ("load", "page"), 1.4),
    CardRequest("We shipped 1,925 orders this week, 8% more than before.", ("orders",), 1925, "up"),
    CardRequest("The warehouse has 64 pallets left.", ("pallets", "stock", "warehouse"), 64),
    CardRequest("The error rate is unchanged at 0.3%.", ("error", "errors"), 0.3, "flat"),
    CardRequest("Customer satisfaction is 4.6 out of 5.", ("satisfaction",), 4.6),
    CardRequest("The battery of the sensor is down to 23%.", ("battery",), 23, "down"),
    CardRequest("The library lent 742 books in May.", ("books", "loans"), 742),
    CardRequest("Energy use fell to 389 kilowatt hours, 15% less.", ("energy",), 389, "down"),
    CardRequest(
        "Our newsletter has 10,540 subscribers, 210 more.",
        ("subscribers", "newsletter"),
        10540,
        "up",
    ),
    CardRequest("The water level of the reservoir is 71%.", ("water", "reservoir"), 71),
    CardRequest("Delivery takes 2.5 days, the same as last month.", ("delivery",), 2.5, "flat"),
    CardRequest("The team closed 29 tickets today.", ("tickets",), 29),
    CardRequest(
        "The app was installed 8,310 times, 4% more.",
        ("installs", "app", "installations"),
        8310,
        "up",
    ),
    CardRequest("Memory use of the server is 83%.", ("memory",), 83),
    CardRequest(
        "The bakery sold 156 loaves, 20 fewer than yesterday.", ("loaves", "bread"), 156, "down"
    ),
    CardRequest("Uptime this year is 99.95%.", ("uptime",), 99.95),
    CardRequest("Visitors of the museum rose to 3,480 this week.", ("visitors",), 3480, "up"),
    CardRequest("The queue has 12 jobs.", ("jobs", "queue"), 12),
    CardRequest("The churn rate stays at 1.8%.", ("churn",), 1.8, "flat"),
    CardRequest("Donations are 6,075 dollars so far.", ("donations",), 6075),
    CardRequest("The mean test score fell to 68 points.", ("score", "test"), 68, "down"),
)
"""The last `NUM_TEST` are for evaluations."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Trend(_Strict):
    """Change of the value."""

    direction: Direction
    value: str | None = Field(None, max_length=40)


class CardProps(_Strict):
    """Texts of a card."""

    title: str = Field(min_length=1, max_length=80)
    value: str = Field(min_length=1, max_length=40)
    description: str | None = Field(None, max_length=200)
    trend: Trend | None = None
    icon: str | None = Field(None, max_length=40)


class MetricCard(_Strict):
    """A card of a dashboard."""

    componentType: Literal["metricCard"]
    props: CardProps


class MetricCardConfig(SingleTurnEnvConfig):
    """Sampling of the cards."""


def read_object(answer: str) -> tuple[dict[str, Any] | None, bool]:
    """Return the JSON object of an answer, and whether it stands alone or in one fence.

    An object between other text is that from the first to the last brace; None for no object.
    """
    text = answer.strip()
    if len(text) > MAX_ANSWER_CHARACTERS:
        return None, False
    is_fenced = text.startswith("```") and text.count("```") == 2 and text.endswith("```")
    body = (last_code_block(text) or "") if is_fenced else text
    for candidate, is_alone in ((body, True), (text[text.find("{") : text.rfind("}") + 1], False)):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found, is_alone
    return None, False


def score_card(answer: str, item: CardRequest) -> dict[str, float]:
    """Return the parts of the score; both are 0.0 for an object without the value of the request.

    Args:
        answer: the completion without its thinking.
        item: the request.
    """
    card, is_alone = read_object(answer)
    props = card.get("props") if card else None
    value = props.get("value") if isinstance(props, dict) else None
    if _number(value) != item.value:
        return {"schema": 0.0, "formatting": 0.0}
    return {
        "schema": SCHEMA if _is_right(card, item) else 0.0,
        "formatting": FORMATTING if is_alone else 0.0,
    }


def _number(value: Any) -> float | None:
    """Return the only number in a text of a card, without thousands commas."""
    numbers = NUMBER.findall(value) if isinstance(value, str) and len(value) <= 40 else []
    return float(numbers[0].replace(",", "")) if len(numbers) == 1 else None


def _is_right(card: Any, item: CardRequest) -> bool:
    try:
        props = MetricCard.model_validate(card).props
    except ValidationError:
        return False
    has_subject = any(word in re.findall(r"\w+", props.title.lower()) for word in item.title_words)
    return has_subject and (props.trend.direction if props.trend else None) == item.direction


class MetricCardEnv(SingleTurnEnv):
    """Requests for cards; an item is a `CardRequest`.

    Attributes:
        iter: requests handed out so far; kept in checkpoints.
    """

    name = "metric_card_generator"
    env_config_cls = MetricCardConfig
    config: MetricCardConfig
    default_model = "Qwen/Qwen3-1.7B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "max_token_length": 2048,
        "wandb_name": "metric_card_generator",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0

    async def get_next_item(self) -> CardRequest:
        requests = REQUESTS[:-NUM_TEST]
        item = requests[self.iter % len(requests)]
        self.iter += 1
        return item

    def eval_items(self) -> Sequence[CardRequest]:
        return REQUESTS[-NUM_TEST:]

    def prompt(self, item: CardRequest) -> list[dict[str, str]]:
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": item.request},
        ]

    async def score(self, item: CardRequest, answer: str) -> dict[str, float]:
        return score_card(answer, item)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: CardRequest) -> str:
        props: dict[str, Any] = {"title": item.title_words[0].title(), "value": f"{item.value:,}"}
        if item.direction is not None:
            props["trend"] = {"direction": item.direction}
        return json.dumps({"componentType": "metricCard", "props": props})


if __name__ == "__main__":
    MetricCardEnv.cli()
