"""Settings of the two mathematics environments."""

from __future__ import annotations

from pydantic import Field

from atroposlib.envs.base import BaseEnvConfig

__all__ = ["MathConfig"]


class MathConfig(BaseEnvConfig):
    """Where the problems come from and what counts; class of the shared settings."""

    run_evaluation: bool = Field(True, description="Load the evaluation sets, and evaluate.")
    mask_too_long_completions: bool = Field(
        True, description="Keep completions that were cut from moving the policy."
    )
    percent_length_penalty: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Probability with which a group of correct answers is scored by length; "
        "otherwise it is dropped.",
    )
    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with a train and a test file, with the "
        "columns question and final_answer, and subset for tests; None loads from the hub.",
    )
