"""Settings of one training run: every field with its type, default, bounds and meaning.

There is one class per group of command-line flags (`cli` generates the flags from them);
`TrainingConfig` is their union and the only class the rest of the trainer sees.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atroposlib.errors import ConfigError
from atroposlib.utils.model_paths import missing_folder
from atroposlib.utils.text import near_name
from example_trainer.loss_choice import GrpoFields, KlEstimator

__all__ = [
    "BUILT_MODES",
    "ExtraLossFields",
    "GrpoFields",
    "LoraFields",
    "ModeFields",
    "TrainingConfig",
    "VllmFields",
    "default_device",
    "require_model_folder",
    "require_reference",
    "unloadable",
]


class ExtraLossFields(BaseModel):
    """Loss terms added to the policy loss."""

    kl_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the KL penalty to a reference model; 0: none.",
    )
    reference_model: str | None = Field(
        default=None,
        min_length=1,
        description="Hub name or directory of the frozen model of the KL penalty, scored in the "
        "trainer where groups carry no ref_logprobs; groups: every group carries them. none: under "
        "LoRA the model without its adapters, else kl_coef is refused.",
    )
    kl_unbiased: bool = Field(
        default=False,
        description="Multiply the KL estimate by the policy's ratio, which makes the gradient of "
        "k1 and k3 that of KL(policy || reference); TRL's use_bias_correction_kl.",
    )
    kl_estimator: KlEstimator = Field(
        default="k3",
        description="Estimator of that KL; k1 as a loss penalises nothing in expectation.",
    )
    sft_coef: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the likelihood of trajectories marked sft.",
    )
    distill_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the distillation from the groups' teacher arrays; 0: none, and "
        "groups that carry them are refused.",
    )
    distill_loss: Literal["cross_entropy", "reverse_kl"] = Field(
        default="cross_entropy",
        description="Cross entropy to the teacher's top tokens, or reverse KL within them.",
    )
    distill_temperature: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Divides the teacher's logprobs and the student's logits.",
    )


class VllmFields(BaseModel):
    """The inference engine."""

    vllm_host: str = Field(
        default="127.0.0.1", description="Address of the engine; a launched one binds to it."
    )
    vllm_port: int = Field(default=9001, ge=1, le=65535, description="Port of the engine.")
    vllm_gpu: int | None = Field(default=None, ge=0, description="GPU index for a launched engine.")
    vllm_gpu_memory_utilization: float = Field(
        default=0.45, gt=0, le=1, description="Share of GPU memory for a launched engine."
    )
    max_model_len: int = Field(
        default=4096, ge=2, description="Context length of a launched engine."
    )
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        default="bfloat16", description="Element type in the engine; bfloat16 means float32 on CPU."
    )
    vllm_restart_interval: int = Field(
        default=3, ge=0, description="Steps between weight updates of the engine; 0: never."
    )
    vllm_start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds a launched engine may take until it answers /health.",
    )
    vllm_args: str = Field(
        default="",
        description="More arguments for a launched engine: --vllm-args='--enforce-eager'.",
    )
    sync_pause_mode: Literal["keep", "wait", "abort", "none"] = Field(
        default="keep",
        description="Requests running during an in-place update: frozen and continued under the "
        "new weights, waited for, aborted, or (none) left running.",
    )
    sync_transport: Literal["disk", "shared_memory"] = Field(
        default="disk",
        description="Where in-place updates pass: a directory under save_path that the engine's "
        "host can read, or the memory of the one host that trainer and engine share.",
    )
    engine_urls: list[str] | None = Field(
        default=None,
        description="Addresses of all engines that in_place updates, where there are several or "
        "one on another host; none: the one at vllm_host and vllm_port.",
    )
    engine: Literal["vllm", "sglang"] = Field(
        default="vllm",
        description="What runs at vllm_port; an SGLang is updated in place and never launched.",
    )


class ModeFields(BaseModel):
    """How new weights reach the engine."""

    weight_bridge_mode: Literal[
        "auto", "shared_vllm", "lora_only", "lora_restart", "none", "in_place", "off"
    ] = Field(
        default="auto",
        description="auto: in_place where the engine can do it, else none; the log says which. "
        "none: restart an engine the trainer owns; in_place: the engine reloads "
        "weights while it runs (the engine at vllm_port, else one is launched); lora_only: LoRA "
        "adapters are swapped in the running engine at vllm_port; lora_restart: an engine the "
        "trainer owns restarts on them; off: no engine, for groups that are there already.",
    )
    vllm_config_path: str | None = Field(
        default=None, description="Bridge file of shared_vllm (mode not built yet)."
    )
    train_layer_indices: list[int] | None = Field(
        default=None, description="Train only these transformer blocks, e.g. 0-3,28-31."
    )


class LoraFields(BaseModel):
    """LoRA adapters, for the modes lora_only and lora_restart."""

    lora_r: int = Field(default=16, ge=1, description="Rank.")
    lora_alpha: int = Field(default=32, ge=1, description="Scale.")
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on adapter inputs.")
    lora_target_modules: list[str] | None = Field(
        default=None, description="Module names that get adapters; none: q_proj and v_proj."
    )
    lora_layer_indices: list[int] | None = Field(
        default=None, description="Blocks that get adapters, e.g. 0-3."
    )
    lora_name: str = Field(
        default="training_adapter",
        min_length=1,
        description="Name under which the engine serves the adapters: rollouts ask for this model.",
    )


BUILT_MODES = ("auto", "none", "in_place", "lora_only", "lora_restart", "off")
"""Weight bridge modes this version has; the others of the contract refuse at start."""


def default_device() -> str:
    """Return `cuda` when torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class ModelFields(BaseModel):
    """Which model is trained."""

    model_name: str = Field(min_length=1, description="Hub name or local directory of the model.")
    gradient_checkpointing: bool = Field(
        default=True,
        description="Recompute activations in the backward pass: less memory, more time.",
    )
    train_dtype: Literal["auto", "bfloat16", "float32", "mixed"] = Field(
        default="auto",
        description="Element type of the trained weights; auto: mixed on CUDA, float32 on CPU. "
        "mixed keeps float32 weights and optimizer states and runs the model in bfloat16, as "
        "float32 on CUDA does too. bfloat16 takes half the memory; AdamW then rounds "
        "stochastically, which keeps small updates on average and adds noise.",
    )


class TrainingFields(BaseModel):
    """How long, how large and with which optimiser."""

    lr: float = Field(
        default=1e-5,
        gt=0,
        allow_inf_nan=False,
        description="Peak learning rate. The default is that of earlier versions; atropos-train "
        "takes 1e-6, which is usual where all weights of a model are trained for long.",
    )
    training_steps: int = Field(default=10, ge=1, description="Optimiser steps of the whole run.")
    batch_size: int = Field(
        default=2,
        ge=1,
        description="Sequences per forward pass (micro-batch), unless microbatch_tokens is given.",
    )
    seq_len: int = Field(
        default=2048, ge=2, description="Longest trained sequence in tokens; cut there."
    )
    gradient_accumulation_steps: int = Field(
        default=32, ge=1, description="Times batch_size: the sequences of an optimiser step."
    )
    pad_multiple: int = Field(
        default=64,
        ge=1,
        description="Sequences of a forward pass are padded to a multiple of this many tokens; "
        "a small one saves time where kernels do not care for round shapes, as on a CPU.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Let sequences share a row instead of padding each; forward passes get about "
        "the same number of tokens each. auto: where a trial on the model shows that "
        "packed sequences do not see each other; on: insist on it.",
    )
    microbatch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of a forward pass, padding included, unless one sequence is "
        "longer. It alone decides the number of passes; a step still has batch_size x "
        "gradient_accumulation_steps sequences. none: batch_size sequences per pass.",
    )
    logprob_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits exist at one time; none: what fits a fixed part of "
        "memory.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear learning-rate warm-up.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate after the warm-up: constant, or falling from lr to min_lr over "
        "the steps of the run, along a line or half a cosine.",
    )
    min_lr: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Learning rate that lr_schedule falls to.",
    )
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        default="adamw_8bit",
        description="adamw_8bit falls back to adamw where bitsandbytes or a GPU is missing, and "
        "with sharded weights; adamw is fused on CUDA.",
    )
    adafactor_scale_parameter: bool = Field(
        default=False, description="Adafactor's scale_parameter."
    )
    adafactor_relative_step: bool = Field(default=False, description="Adafactor's relative_step.")
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay (AdamW).")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Global gradient norm is clipped to this."
    )
    seed: int = Field(
        default=0, ge=0, description="Seed of torch's and Python's random generators."
    )
    device: str = Field(
        default_factory=default_device, description="Torch device; auto: cuda if available."
    )
    save_path: str = Field(
        default="trained_model_checkpoints", description="Directory of checkpoints."
    )
    checkpoint_interval: int | None = Field(
        default=None,
        ge=0,
        description="Steps between resumable checkpoints; 0: only the final model; none: one every "
        "checkpoint_minutes.",
    )
    checkpoint_minutes: float = Field(
        default=20.0,
        gt=0,
        le=10080,
        description="Minutes between resumable checkpoints; not used with checkpoint_interval.",
    )
    keep_checkpoints: int | None = Field(
        default=2,
        ge=1,
        description="Resumable checkpoints of this run to keep, the newest, and as many of the "
        "adapters a LoRA mode publishes; none: all. While one is written there is one more.",
    )
    resume: bool = Field(
        default=False,
        description="Continue the run under save_path: from its newest step_<n> checkpoint and the "
        "batches trained after it.",
    )


class AtroposFields(BaseModel):
    """The trajectory service."""

    atropos_url: str = Field(default="http://localhost:8000", description="Address of the service.")
    service_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds to wait for an unreachable service before giving up.",
    )
    replace_run: bool = Field(
        default=False,
        description="Take over a run of the service whose settings differ, such as its batch size; "
        "its queued groups stay. Without it the service refuses (409).",
    )
    lease_s: float = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="Seconds a batch is this trainer's before the service may hand it out again.",
    )


class WandbFields(BaseModel):
    """Where metrics go."""

    use_wandb: bool = Field(default=False, description="Log to Weights & Biases too.")
    wandb_project: str | None = Field(
        default=None, description="Project; without one wandb stays off."
    )
    wandb_group: str | None = Field(default=None, description="Run group; random when missing.")
    metrics_path: str | None = Field(
        default=None, description="JSONL file of metrics; none: <save_path>/metrics.jsonl."
    )
    quiet: bool = Field(
        default=False,
        description="Log lines only, no live view; without a terminal there is none anyway.",
    )
    use_tensorboard: bool = Field(
        default=False,
        description="Also write TensorBoard event files, to the folder tensorboard beside "
        "metrics_path; needs the extra tensorboard.",
    )


class DistributedFields(BaseModel):
    """Several trainer processes; torchrun sets rank and number."""

    trainer_rank: int = Field(default=0, ge=0, description="Rank of this process; 0 leads.")
    world_size: int = Field(default=1, ge=1, description="Number of trainer processes.")
    parallel_mode: Literal["fsdp", "data"] = Field(
        default="fsdp",
        description="What several processes hold: fsdp, each a part of weights, gradients and "
        "optimiser state; data, each all of them.",
    )
    init_method: str = Field(
        default="env://", description="Rendezvous address of torch.distributed."
    )
    num_inference_nodes: int = Field(
        default=0, ge=0, description="Inference hosts of a cluster run."
    )


class DebugFields(BaseModel):
    """Diagnostics."""

    debug_loading: bool = Field(default=False, description="Log every parameter while loading.")
    benchmark: bool = Field(default=False, description="Log total time and memory at the end.")
    log_dir: str = Field(default="./logs", description="Directory of a launched engine's log file.")
    single_copy: bool = Field(
        default=False, description="Share weights with the engine (not built yet)."
    )


class TrainingConfig(
    DebugFields, DistributedFields, LoraFields, ModeFields, WandbFields, AtroposFields,
    VllmFields, ExtraLossFields, GrpoFields, TrainingFields, ModelFields,
):  # fmt: skip
    """All settings of one trainer run; frozen after construction.

    Example:
        `TrainingConfig(model_name="Qwen/Qwen2.5-1.5B-Instruct", training_steps=20)`
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step; the batch size registered with the service."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def is_sharded(self) -> bool:
        """Whether each of several trainer processes holds a part of the weights only."""
        return self.world_size > 1 and self.parallel_mode == "fsdp"

    @property
    def resolved_train_dtype(self) -> Literal["bfloat16", "float32", "mixed"]:
        """`train_dtype` with nothing left to `auto`."""
        if self.train_dtype == "auto":
            return "mixed" if self.device.startswith("cuda") else "float32"
        return self.train_dtype

    @property
    def loaded_dtype(self) -> Literal["bfloat16", "float32"]:
        """Element type of the weights as they are loaded.

        Under LoRA on CUDA the frozen weights of mixed precision are bfloat16: the optimizer never
        touches them. The adapters are float32; sharded, they must have the type of the others.
        """
        dtype = self.resolved_train_dtype
        if dtype != "mixed":
            return dtype
        freezes = self.uses_lora and not self.is_sharded and self.device.startswith("cuda")
        return "bfloat16" if freezes else "float32"

    @property
    def reference_source(self) -> Literal["none", "groups", "model", "base"]:
        """Where the KL penalty's reference logprobs come from when groups carry none."""
        if not self.kl_coef:
            return "none"
        if self.reference_model not in (None, "groups"):
            return "model"
        return "base" if self.uses_lora and self.reference_model is None else "groups"

    @property
    def autocasts(self) -> bool:
        """Whether forward passes run in bfloat16 whatever the weights are."""
        on_gpu = self.device.startswith("cuda")
        dtype = self.resolved_train_dtype
        return dtype == "mixed" or (on_gpu and dtype == "float32")

    @property
    def uses_lora(self) -> bool:
        """Whether adapters are trained instead of the model's own weights."""
        return self.weight_bridge_mode in ("lora_only", "lora_restart")

    @property
    def vllm_connect_host(self) -> str:
        """Host under which the trainer reaches the engine."""
        return "127.0.0.1" if self.vllm_host in ("0.0.0.0", "::") else self.vllm_host

    @model_validator(mode="before")
    @classmethod
    def _suggest_near_names(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            if name not in cls.model_fields:
                raise ValueError(
                    f"unknown trainer setting {name!r}{near_name(name, cls.model_fields)}"
                )
        return values

    @field_validator("device", mode="before")
    @classmethod
    def _resolve_auto_device(cls, value: Any) -> Any:
        return default_device() if value == "auto" else value

    @field_validator("device")
    @classmethod
    def _refuse_unknown_devices(cls, value: str) -> str:
        if not re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", value):
            raise ValueError("expected auto, cpu, cuda, or one GPU such as cuda:1")
        return value

    @field_validator("atropos_url")
    @classmethod
    def _refuse_addresses_without_scheme(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("expected an address that starts with http:// or https://")
        return value

    @field_validator("vllm_args")
    @classmethod
    def _refuse_unbalanced_quotes(cls, value: str) -> str:
        try:
            shlex.split(value)
        except ValueError as error:
            raise ValueError(f"cannot be split into arguments: {error}") from error
        return value

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> TrainingConfig:
        _ = self.loss_choice  # raises where settings of the loss exclude each other
        if not (self.policy_coef or self.kl_coef or self.sft_coef or self.distill_coef):
            raise ValueError(
                "policy_coef, kl_coef, sft_coef and distill_coef are all 0: nothing is trained"
            )
        if self.engine_urls and self.weight_bridge_mode not in ("auto", "in_place", "off"):
            raise ValueError("engine_urls are updated by weight_bridge_mode=in_place alone")
        if self.engine == "sglang" and self.weight_bridge_mode not in ("auto", "in_place", "off"):
            raise ValueError("engine=sglang is updated by weight_bridge_mode=in_place alone")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr:g} must not be above lr={self.lr:g}")
        if self.is_sharded and self.optimizer == "adafactor":
            raise ValueError("adafactor cannot be sharded: use adamw, or parallel_mode=data")
        limit = self.overlong_max_tokens
        if self.overlong_buffer_tokens and limit is None:
            raise ValueError("overlong_buffer_tokens needs overlong_max_tokens, where it ends")
        if limit is not None and self.overlong_buffer_tokens >= limit:
            raise ValueError(
                f"overlong_buffer_tokens={self.overlong_buffer_tokens} must be below "
                f"overlong_max_tokens={limit}"
            )
        return self


def unloadable(name: str, error: Exception, *, part: str = "model") -> ConfigError:
    """Return the error of a model, or a `part` of it, that cannot be loaded, in one line.

    Libraries write paragraphs; the first line says most.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[0].rstrip(" .:").removesuffix(" from one of")
    return ConfigError(
        f"{part} {name!r} cannot be loaded: {reason}; --model takes the folder of "
        "a model with its tokenizer, or its name on the Hugging Face hub"
    )


def require_model_folder(name: str) -> None:
    """Reject a path without a folder before slow imports start.

    Names on the hub are checked when the model is loaded.
    """
    reason = missing_folder(name)
    if reason is not None:
        raise unloadable(name, ConfigError(reason))


def require_reference(config: TrainingConfig) -> None:
    """Refuse a KL penalty without anything to compare with, and a reference without a penalty.

    Raises:
        ConfigError: names what to set.
    """
    if config.kl_coef and config.reference_model is None and not config.uses_lora:
        raise ConfigError(
            f"kl_coef={config.kl_coef:g} needs a reference: --reference-model NAME_OR_PATH, for "
            f"example {config.model_name}, or --reference-model groups where environments send "
            "ref_logprobs"
        )
    if config.reference_model is not None and not config.kl_coef:
        raise ConfigError("reference_model has no use without a KL penalty: set --kl-coef")
