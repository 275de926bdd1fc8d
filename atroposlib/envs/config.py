"""The settings every environment has."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BaseEnvConfig", "EvalHandlingEnum", "ScoreBackendEnum", "StragglerPolicyEnum"]


class EvalHandlingEnum(str, Enum):
    """Mode of the rollout workers while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    """Start no rollouts until the evaluation is over."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """Use only `eval_limit_ratio` of the workers."""
    NONE = "NONE"
    """Continue as without an evaluation."""


class StragglerPolicyEnum(str, Enum):
    """Treatment of a rollout that takes longer than `straggler_timeout_s`."""

    WAIT = "WAIT"
    """Wait for it, up to `worker_timeout`."""
    RETRY = "RETRY"
    """Cancel and restart it, up to `straggler_retries` times; then drop the group."""
    SHRINK = "SHRINK"
    """Send the group without it, reduced to a divisor of `group_size`."""
    GIVE_UP = "GIVE_UP"
    """Drop the group."""


class ScoreBackendEnum(str, Enum):
    """Where scoring functions run."""

    PROCESS = "PROCESS"
    """In worker processes of this machine."""
    THREAD = "THREAD"
    """In threads of this process; for short functions that release the interpreter."""
    RAY = "RAY"
    """As tasks of a Ray cluster."""


class BaseEnvConfig(BaseModel):
    """Settings of an environment; subclasses add fields.

    Undeclared keywords become plain attributes, so environments may pass settings without declaring
    them. Keys of a YAML file and flags are checked against the declared fields
    (`atroposlib.envs.settings`).

    Example:
        BaseEnvConfig(group_size=8, tokenizer_name="Qwen/Qwen3-0.6B", use_wandb=False)
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    group_size: int = Field(4, ge=1, description="Trajectories per group.")
    max_num_workers: int = Field(
        -1,
        ge=-1,
        description="Maximum number of groups rolled out at once by `serve` and `process`; "
        "-1 means max_num_workers_per_node times the number of inference servers.",
    )
    max_eval_workers: int = Field(
        16, description="Maximum number of concurrent items, for evaluate methods that read it."
    )
    max_num_workers_per_node: int = Field(
        8, ge=0, description="Maximum number of groups rolled out at once per inference server."
    )
    steps_per_eval: int = Field(
        100, description="Trainer steps between two evaluations; 0 or less disables them."
    )
    max_token_length: int = Field(
        2048, description="Token limit of one generation; sent to the service at registration."
    )
    eval_handling: EvalHandlingEnum = Field(
        EvalHandlingEnum.STOP_TRAIN,
        description="Mode of the rollout workers while an evaluation runs: stop (STOP_TRAIN), "
        "use eval_limit_ratio of the workers (LIMIT_TRAIN), or continue (NONE).",
    )
    eval_limit_ratio: float = Field(
        0.5, ge=0, description="Fraction of the workers that stay active under LIMIT_TRAIN."
    )
    inference_weight: float = Field(
        1.0,
        description="Share of the inference capacity relative to other environments; "
        "-1 excludes this environment from the sharing. The share of a batch is set by "
        "min_batch_allocation.",
    )
    batch_size: int = Field(
        -1,
        ge=-1,
        description="Sequences per training batch; "
        "-1 uses the value of the trainer, which also replaces other values.",
    )
    max_batches_offpolicy: int = Field(
        3,
        description="Maximum number of batches ahead of the trainer; 0 or less removes the limit.",
    )
    straggler_batches: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Number of batches that finished rollouts may occupy in addition to "
        "max_batches_offpolicy while their groups wait for slower rollouts; 0 counts whole groups.",
    )
    tokenizer_name: str = Field(
        "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        description="Hugging Face name or local path of the tokenizer.",
    )
    use_wandb: bool = Field(True, description="Whether to log metrics to Weights & Biases.")
    rollout_server_url: str = Field(
        "http://localhost:8000", description="Base URL of the trajectory service."
    )
    total_steps: int = Field(
        1000,
        ge=-1,
        description="Trainer steps after which the environment ends, -1 takes the trainer's "
        "number; under `process`, the number of groups to make.",
    )
    end_with_trainer: bool = Field(
        True,
        description="Whether the environment ends after the number of steps that the trainer "
        "registered, if total_steps is larger; False waits for further steps.",
    )
    engine_timeout: float = Field(
        900.0,
        ge=0,
        description="Seconds without an available inference server, after one has answered, until "
        "the environment ends; 0 waits without limit. After the training run, at most 60 s.",
    )
    wandb_name: str | None = Field(
        None,
        description="Name to register under, and first part of the W&B run name; "
        "None uses the environment's name.",
    )
    num_rollouts_to_keep: int = Field(
        32,
        ge=0,
        description="Maximum number of groups in the table of rollouts of the metrics log.",
    )
    num_rollouts_per_group_for_logging: int = Field(
        1, ge=-1, description="Trajectories per group in that table; -1 means group_size."
    )
    ensure_scores_are_not_same: bool = Field(
        True, description="Whether to drop groups of two or more trajectories with equal scores."
    )
    data_path_to_save_groups: str | None = Field(
        None,
        description="JSONL file for the groups, one per line; if it exists, a number is added to "
        "the name. None writes no file.",
    )
    data_dir_to_save_evals: str | None = Field(
        None, description="Directory for evaluation results; None writes no files."
    )
    min_items_sent_before_logging: int = Field(
        2,
        description="Groups sent before metrics are logged; 0 or less logs at every trainer step.",
    )
    include_messages: bool = Field(
        False, description="Whether to add the decoded text as messages to groups without messages."
    )
    min_batch_allocation: float | None = Field(
        None,
        ge=0,
        description="Fraction of every batch reserved for this environment; None reserves nothing. "
        "If the fractions of all environments exceed 1, the service scales them down.",
    )
    worker_timeout: float = Field(
        600.0, description="Seconds one group may take before it is dropped; 0 or less: no limit."
    )
    straggler_policy: StragglerPolicyEnum = Field(
        StragglerPolicyEnum.WAIT,
        description="Treatment of a rollout that takes longer than straggler_timeout_s: wait for "
        "it (WAIT), restart it (RETRY), send its group without it (SHRINK), or drop its group "
        "(GIVE_UP). RETRY also restarts a group that took longer than worker_timeout.",
    )
    straggler_timeout_s: float = Field(
        0.0,
        description="Seconds one rollout of a group may take before straggler_policy applies; "
        "0 or less disables the policy.",
    )
    straggler_retries: int = Field(
        2, ge=0, description="Number of restarts under RETRY before the group is dropped."
    )
    min_group_size: int = Field(
        2, ge=1, description="Minimum number of trajectories in a group under SHRINK."
    )
    rollout_grace_s: float = Field(
        10.0,
        ge=0,
        description="Seconds that running rollouts may continue after a signal to stop; groups "
        "that they finish are delivered.",
    )
    score_backend: ScoreBackendEnum = Field(
        ScoreBackendEnum.PROCESS,
        description="Where score_pool runs scoring functions: worker processes (PROCESS), threads "
        "(THREAD) or a Ray cluster (RAY).",
    )
    num_score_workers: int = Field(
        2, ge=0, description="Maximum number of concurrent scoring functions; 0 uses threads."
    )
    score_timeout_s: float = Field(
        20.0, gt=0, description="Seconds one scoring function may take if its call sets no limit."
    )
    thinking_mode: bool = Field(
        False, description="Whether to ask the inference server for reasoning."
    )
    reasoning_effort: str | None = Field(
        None,
        description="Reasoning effort: none, minimal, low, medium, high or xhigh; "
        "a value enables reasoning.",
    )
    max_reasoning_tokens: int | None = Field(
        None,
        ge=1024,
        le=32000,
        description="Token limit of the reasoning; a value enables reasoning.",
    )
    custom_thinking_prompt: str | None = Field(
        None, description="System prompt that asks for reasoning, for environments that use one."
    )
    metrics_path: str | None = Field(
        None,
        description="JSONL file for the metrics of this run; "
        "None means logs/<registered name>/metrics.jsonl.",
    )
    use_tensorboard: bool = Field(
        False,
        description="Whether to also write the metrics as TensorBoard event files, to the folder "
        "tensorboard next to metrics_path; needs the extra tensorboard.",
    )
