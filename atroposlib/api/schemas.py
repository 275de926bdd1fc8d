"""Models of what the service is sent; replies are plain dictionaries, exact to the contract."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

__all__ = [
    "EnvIdentifier",
    "Info",
    "Policy",
    "RegisterEnv",
    "Registration",
    "ScoredData",
    "Status",
]


def _require_encodable(text: str) -> str:
    """Refuse lone surrogates: JSON can spell them, but no answer could carry them."""
    text.encode("utf-8")  # UnicodeEncodeError is a ValueError, so it becomes a 422
    return text


Text = Annotated[str, AfterValidator(_require_encodable)]
# Wider integers are accepted by Python alone; other clients could not read them back.
_INT64_MAX = 2**63 - 1
Int64 = Annotated[int, Field(ge=-(2**63), le=_INT64_MAX)]
# Bounds given to a field of type `Int64` would be overruled by those of the type.
Version = Annotated[int, Field(ge=0, le=_INT64_MAX)]
Count = Annotated[int, Field(ge=1, le=_INT64_MAX)]


class Registration(BaseModel):
    """A trainer starts a run."""

    wandb_group: Text = Field(description="Run group handed to environments.")
    wandb_project: Text = Field(description="Project handed to environments.")
    batch_size: Count = Field(description="Sequences per batch.")
    max_token_len: Int64 = Field(
        description="Sequences this long or longer are dropped by environments; 0 or less: none."
    )
    checkpoint_dir: Text = Field(description="Shared directory for checkpoints.")
    save_checkpoint_interval: Int64 = Field(description="Steps between environment checkpoints.")
    starting_step: Int64 = Field(description="Step the run starts or resumes at.")
    num_steps: Int64 = Field(description="Steps the run is planned to take.")
    replace: bool = Field(
        default=False, description="Replace the settings of a run that is registered already."
    )

    def differences(self, asked: Registration) -> list[str]:
        """Name the settings in which another registration would change the run.

        A checkpoint interval that is the number of steps on both sides was derived from it by the
        trainers, and is left out.
        """
        passed_over = {"starting_step", "replace"}
        if all(each.save_checkpoint_interval == each.num_steps for each in (self, asked)):
            passed_over.add("save_checkpoint_interval")
        return [
            f"{name} is {getattr(self, name)!r}, this request says {getattr(asked, name)!r}"
            for name in Registration.model_fields
            if name not in passed_over and getattr(self, name) != getattr(asked, name)
        ]


class RegisterEnv(BaseModel):
    """An environment joins a run."""

    max_token_length: Int64 = Field(description="Longest trajectory, in tokens.")
    desired_name: Text = Field(description="Name; the service appends a running number.")
    weight: float = Field(allow_inf_nan=False, description="Relative share of inference capacity.")
    group_size: Count | None = Field(
        default=None,
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


class EnvIdentifier(BaseModel):
    """The registration id of an environment."""

    env_id: Int64


class Policy(BaseModel):
    """A trainer has new weights in service."""

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

    @model_validator(mode="after")
    def _require_role_and_content(self) -> ScoredData:
        for conversation in self.messages or []:
            for message in conversation:
                if isinstance(message, dict) and not message.keys() >= {"role", "content"}:
                    raise ValueError("role and content are required in every message")
        return self


class Status(BaseModel):
    """Answer of `GET /status`."""

    current_step: int
    queue_size: int


class Info(BaseModel):
    """Answer of `GET /info`."""

    batch_size: int = -1
    max_token_len: int = -1
