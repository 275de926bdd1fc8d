"""The settings every environment has."""

from __future__ import annotations

from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BaseEnvConfig", "EvalHandlingEnum", "ScoreBackendEnum", "StragglerPolicyEnum"]


class EvalHandlingEnum(str, Enum):
    """What rollout workers do while an evaluation runs."""

    STOP_TRAIN = "STOP_TRAIN"
    """Start no rollouts until the evaluation is over."""
    LIMIT_TRAIN = "LIMIT_TRAIN"
    """Use only `eval_limit_ratio` of the workers."""
    NONE = "NONE"
    """Go on as if there were no evaluation."""


class StragglerPolicyEnum(str, Enum):
    """What happens to a rollout that takes longer than `straggler_timeout_s`."""

    WAIT = "WAIT"
    """The group waits for it, up to `worker_timeout`."""
    RETRY = "RETRY"
    """It is ended and started again, `straggler_retries` times; then the group is given up."""
    SHRINK = "SHRINK"
    """The group goes without it, cut to a size of which `group_size` is a multiple."""
    GIVE_UP = "GIVE_UP"
    """The group is given up."""


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

    Unknown keywords are kept as plain attributes, so that environments may pass settings of
    their own without declaring them. Keys a user types, in a YAML file or as flags, are checked
    against the declared fields instead (`atroposlib.envs.settings`).

    Example:
        BaseEnvConfig(group_size=8, tokenizer_name="Qwen/Qwen3-0.6B", use_wandb=False)
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    group_size: int = Field(4, ge=1, description="Trajectories per group.")
    max_num_workers: int = Field(
        -1,
        ge=-1,
        description="Groups rolled out at once, by `serve` and `process`; "
        "-1 means max_num_workers_per_node times the number of inference servers.",
    )
    max_eval_workers: int = Field(
        16, description="Evaluation items run at once, for evaluate methods that ask for it."
    )
    max_num_workers_per_node: int = Field(
        8, ge=0, description="Groups rolled out at once per inference server."
    )
    steps_per_eval: int = Field(
        100, description="Trainer steps between two evaluations; 0 or less never evaluates."
    )
    max_token_length: int = Field(
        2048, description="Tokens one generation may use; sent to the service at registration."
    )
    eval_handling: EvalHandlingEnum = Field(
        EvalHandlingEnum.STOP_TRAIN,
        description="What rollout workers do while an evaluation runs: stop (STOP_TRAIN), "
        "use eval_limit_ratio of the workers (LIMIT_TRAIN), or go on (NONE).",
    )
    eval_limit_ratio: float = Field(
        0.5, ge=0, description="Fraction of the workers that stay active under LIMIT_TRAIN."
    )
    inference_weight: float = Field(
        1.0,
        description="Share of the inference capacity relative to other environments; "
        "-1 leaves this environment out of the sharing.",
    )
    batch_size: int = Field(
        -1,
        ge=-1,
        description="Sequences per training batch; "
        "-1 takes the trainer's, which also replaces any other value.",
    )
    max_batches_offpolicy: int = Field(
        3, description="Batches that may wait ahead of the trainer; 0 or less means no limit."
    )
    tokenizer_name: str = Field(
        "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
        description="Hugging Face name or local path of the tokenizer.",
    )
    use_wandb: bool = Field(True, description="Log metrics to Weights & Biases.")
    rollout_server_url: str = Field(
        "http://localhost:8000", description="Base URL of the trajectory service."
    )
    total_steps: int = Field(
        1000,
        ge=-1,
        description="Trainer steps after which the environment ends, -1 takes the trainer's; "
        "under `process` the number of groups to make.",
    )
    end_with_trainer: bool = Field(
        True,
        description="Whether the environment ends when the trainer has done the steps that it "
        "registered, where total_steps is more; False waits for further steps.",
    )
    engine_timeout: float = Field(
        900.0,
        ge=0,
        description="Seconds without any inference server, once one has answered, after which "
        "the environment ends; 0 waits without limit. When the training run is over, at most 60 s.",
    )
    wandb_name: str | None = Field(
        None,
        description="Name to register under, also the start of the W&B run name; "
        "None uses the environment's name.",
    )
    num_rollouts_to_keep: int = Field(
        32, ge=0, description="Groups kept for the table of rollouts in the metrics log."
    )
    num_rollouts_per_group_for_logging: int = Field(
        1, ge=-1, description="Trajectories per group in that table; -1 means group_size."
    )
    ensure_scores_are_not_same: bool = Field(
        True, description="Drop groups of two or more trajectories whose scores are all equal."
    )
    data_path_to_save_groups: str | None = Field(
        None,
        description="JSONL file for the groups, one per line; "
        "a number is added to the name when the file exists, None writes none.",
    )
    data_dir_to_save_evals: str | None = Field(
        None, description="Directory for evaluation results; None writes none."
    )
    min_items_sent_before_logging: int = Field(
        2,
        description="Groups sent before metrics are logged; 0 or less logs at every trainer step.",
    )
    include_messages: bool = Field(
        False, description="Add the decoded text as messages to groups that carry none."
    )
    min_batch_allocation: float | None = Field(
        None,
        ge=0,
        description="Fraction of every batch reserved for this environment, None reserves none; "
        "where the environments' fractions exceed 1 together, the service scales them down.",
    )
    worker_timeout: float = Field(
        600.0, description="Seconds one group may take before it is given up; 0 or less waits."
    )
    straggler_policy: StragglerPolicyEnum = Field(
        StragglerPolicyEnum.WAIT,
        description="What happens to a rollout that takes longer than straggler_timeout_s: wait "
        "for it (WAIT), begin it again (RETRY), leave it out of its group (SHRINK), or give its "
        "group up (GIVE_UP). RETRY also begins a group again that took longer than worker_timeout.",
    )
    straggler_timeout_s: float = Field(
        0.0,
        description="Seconds one rollout of a group may take before straggler_policy applies; "
        "0 or less: it never does.",
    )
    straggler_retries: int = Field(
        2, ge=0, description="Times RETRY begins again before it gives the group up."
    )
    min_group_size: int = Field(
        2, ge=1, description="Fewest trajectories a group may have under SHRINK."
    )
    rollout_grace_s: float = Field(
        10.0,
        ge=0,
        description="Seconds running rollouts may go on when the process is asked to stop; "
        "what they finish is delivered.",
    )
    score_backend: ScoreBackendEnum = Field(
        ScoreBackendEnum.PROCESS,
        description="Where score_pool runs scoring functions: worker processes (PROCESS), threads "
        "(THREAD) or a Ray cluster (RAY).",
    )
    num_score_workers: int = Field(
        2, ge=0, description="Scoring functions run at once; 0 runs them in threads."
    )
    score_timeout_s: float = Field(
        20.0, gt=0, description="Seconds one scoring function may take when it names no limit."
    )
    thinking_mode: bool = Field(False, description="Ask the inference server for reasoning.")
    reasoning_effort: str | None = Field(
        None,
        description="Reasoning effort: none, minimal, low, medium, high or xhigh; "
        "a value switches reasoning on.",
    )
    max_reasoning_tokens: int | None = Field(
        None,
        ge=1024,
        le=32000,
        description="Tokens the model may spend on reasoning; a value switches reasoning on.",
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
        description="Also write the metrics as TensorBoard event files, to the folder tensorboard "
        "beside metrics_path; needs the extra tensorboard.",
    )
