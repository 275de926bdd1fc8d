"""Models of request bodies; responses are plain dictionaries."""

from __future__ import annotations

from typing import Annotated, Any
from unicodedata import category

from pydantic import AfterValidator, BaseModel, Field, model_validator

MAX_BATCH_SIZE = 2**20
"""Maximum number of sequences in a batch."""
MAX_GROUP_SIZE = 4096
"""Maximum `group_size`, up to which the search in buffers is exact and fast."""

_MAX_NUMBER = 2**53 - 1  # exact in every JSON reader
_INT64_MAX = 2**63 - 1
_MAX_WEIGHT = 1e9
_MAX_NAME_CHARACTERS = 256
_MAX_PATH_CHARACTERS = 4096
_LINE_SEPARATORS = "\u2028\u2029"


def _require_encodable(text: str) -> str:
    """Reject lone surrogates: JSON can express them, but no response could carry them."""
    text.encode("utf-8")  # UnicodeEncodeError is a ValueError, so it becomes a 422
    return text


def _require_printable(text: str) -> str:
    """Reject control characters in names that logs and terminals show."""
    if not text.isprintable():
        raise ValueError("expected printable characters only")
    return text


def _refuse_control_characters(text: str) -> str:
    """Reject characters that would break lines or control terminals."""
    if any(category(char) == "Cc" or char in _LINE_SEPARATORS for char in text):
        raise ValueError("expected no control characters")
    return text


Text = Annotated[str, AfterValidator(_require_encodable)]
Name = Annotated[
    Text, AfterValidator(_refuse_control_characters), Field(max_length=_MAX_NAME_CHARACTERS)
]
# Trainers without Weights & Biases have no names.
OptionalName = Annotated[Name | None, AfterValidator(lambda name: name or "")]
Number = Annotated[int, Field(ge=-_MAX_NUMBER, le=_MAX_NUMBER)]
# Only Python accepts wider integers; other clients could not read them.
Int64 = Annotated[int, Field(ge=-(2**63), le=_INT64_MAX)]
# The bounds of the type `Number` would override those of a field.
Version = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]


class Registration(BaseModel):
    """Body of `POST /register`: a trainer starts or joins a run."""

    wandb_group: OptionalName = Field(
        description="Run group for environments; null means none, like an empty string."
    )
    wandb_project: OptionalName = Field(
        description="Project for environments; null means none, like an empty string."
    )
    batch_size: int = Field(ge=1, le=MAX_BATCH_SIZE, description="Sequences per batch.")
    max_token_len: Number = Field(
        description="Sequences this long or longer are dropped by environments; 0 or less: none."
    )
    checkpoint_dir: Annotated[Text, AfterValidator(_refuse_control_characters)] = Field(
        max_length=_MAX_PATH_CHARACTERS, description="Shared directory for checkpoints."
    )
    save_checkpoint_interval: Number = Field(description="Steps between environment checkpoints.")
    starting_step: Number = Field(description="Step the run starts or resumes at.")
    num_steps: Number = Field(description="Steps the run is planned to take.")
    replace: bool = Field(
        default=False, description="Replace the settings of a run that is registered already."
    )
    consumer: (
        Annotated[Text, AfterValidator(_require_printable), Field(min_length=1, max_length=100)]
        | None
    ) = Field(
        default=None,
        description="Name of a tool that stands in while no trainer is registered, such as an "
        "export: environments start at once, and any trainer may take its place. None: a trainer.",
    )
    short_batches: bool = Field(
        default=False,
        description="Deliver the oldest groups with at most `batch_size` sequences if the sizes of "
        "the queued ones do not add up to it. Otherwise a batch waits for other sizes.",
    )

    def differences(self, asked: Registration) -> list[str]:
        """List the settings of another registration that differ from this one.

        The checkpoint interval is left out if both trainers derived it from the number of steps.
        """
        ignored = {"starting_step", "replace", "consumer", "short_batches"}
        if all(each.save_checkpoint_interval == each.num_steps for each in (self, asked)):
            ignored.add("save_checkpoint_interval")
        return [
            f"{name} is {getattr(self, name)!r}, this request says {getattr(asked, name)!r}"
            for name in Registration.model_fields
            if name not in ignored and getattr(self, name) != getattr(asked, name)
        ]


class RegisterEnv(BaseModel):
    """Body of `POST /register-env`: an environment joins a run."""

    max_token_length: Number = Field(description="Longest trajectory, in tokens.")
    desired_name: Name = Field(description="Name; the service appends a running number.")
    weight: float = Field(
        ge=-_MAX_WEIGHT,
        le=_MAX_WEIGHT,
        allow_inf_nan=False,
        description="Relative share of inference capacity.",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        le=MAX_GROUP_SIZE,
        description="Sequences per group; smaller groups are collected until they add up to it. "
        "None: groups of every size are queued as they come.",
    )
    min_batch_allocation: float | None = Field(
        default=None,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="Guaranteed share of each batch; sums above 1 are scaled down.",
    )
    env_id: Int64 | None = Field(
        default=None,
        description="Id of an earlier registration; kept when a trainer has taken over `run_id`, "
        "or replaced its settings.",
    )
    run_id: Annotated[Text, AfterValidator(_refuse_control_characters)] | None = Field(
        default=None,
        max_length=_MAX_NAME_CHARACTERS,
        description="The run that `env_id` is of.",
    )


class EnvIdentifier(BaseModel):
    """The registration id of an environment."""

    env_id: Int64


class Policy(BaseModel):
    """Body of `POST /policy`: the trainer serves new weights."""

    version: Version = Field(description="Version of the policy, a number that grows.")


class ScoredData(BaseModel):
    """One scored group; documents the body, which is decoded by `atroposlib.wire`."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float] | float] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any] | str] | str] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None  # opaque JSON of the environment
    env_id: Int64 | None = None
    distill_token_ids: list[list[list[int]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    reward_parts: list[dict[str, float] | None] | None = None
    finish_reasons: list[str | None] | None = None
    tokenized_from_text: bool | None = None
    traces: list[dict[str, Any] | None] | None = None
    token_versions: list[list[tuple[int | None, int]] | None] | None = None
    columns: dict[str, list[Any]] | None = None  # nested lists of numbers
    traceparent: Any = None  # a W3C header; anything else is left out

    @model_validator(mode="after")
    def _require_role_and_content(self) -> ScoredData:
        for conversation in self.messages or []:
            for message in conversation:
                if isinstance(message, dict) and not message.keys() >= {"role", "content"}:
                    raise ValueError("role and content are required in every message")
        return self


class Status(BaseModel):
    """Response of `GET /status`."""

    current_step: int
    queue_size: int


class Info(BaseModel):
    """Response of `GET /info`."""

    batch_size: int = -1
    max_token_len: int = -1
