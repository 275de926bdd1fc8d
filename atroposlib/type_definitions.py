"""Shared types of messages, items, game steps and evaluation results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypedDict

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionContentPartParam
else:
    # A content part is a mapping at run time; the openai package takes a second to import.
    ChatCompletionContentPartParam = dict[str, Any]

__all__ = [
    "UUID",
    "AgentHistory",
    "AgentStep",
    "Content",
    "EvaluationConfigGeneral",
    "EvaluationMetrics",
    "EvaluationResults",
    "EvaluationSample",
    "GameHistory",
    "GameStep",
    "Item",
    "Message",
    "Observation",
    "number",
]

Content = str | list[ChatCompletionContentPartParam]
Item = Any  # one dataset entry; opaque to the library
number = int | float
UUID = str


class Message(TypedDict):
    """One chat entry, optionally with the reward of the turn it closes."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Content
    reward: float | None


class AgentStep(TypedDict, total=False):
    """Observation and action of one agent in one step of an episode."""

    step: int
    messages: list[Message]
    reward: float


AgentHistory = dict[str, list[AgentStep]]


class Observation(TypedDict):
    """A game observation, raw and as shown to the model."""

    raw: dict[str, Any]
    rendered: Content


class GameStep(TypedDict):
    """One transition of a game."""

    step: int
    agent_id: str
    observation: Observation
    action: str
    reward: float | dict[str, float]
    done: bool
    info: dict[str, Any]


GameHistory = list[GameStep]


class EvaluationConfigGeneral(TypedDict):
    """Settings of an evaluation."""

    total_evaluation_time_seconds: str
    model_name: str | None
    generation_parameters: dict[str, Any]


class EvaluationResults(TypedDict):
    """Metrics of an evaluation; the key `all` holds every metric of every task."""

    all: dict[str, float]


class EvaluationMetrics(TypedDict):
    """The content of `metrics.json`."""

    config_general: EvaluationConfigGeneral
    results: EvaluationResults


class EvaluationSample(TypedDict, total=False):
    """One line of `samples.jsonl`."""

    messages: list[dict[str, str]] | None
    question: str | None
    gold_answer: str | None
    gold_parsed: str | None
    model_parsed: str | None
    score: int | None
    correct: bool | None
    finish_reason: str | None
    response_after_think: str | None
