"""Settings of one training run: every field with its type, default, bounds and meaning.

There is one class per group of command-line flags (`cli` generates the flags from them).
`TrainingConfig` combines them; the rest of the trainer uses it only.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from atroposlib.errors import ConfigError
from atroposlib.utils.model_paths import missing_folder, or_missing_folder, use_cache_without_hub
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
    "loading_errors",
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
        description="Weight of the KL penalty to a reference model; 0: no penalty.",
    )
    reference_model: str | None = Field(
        default=None,
        min_length=1,
        description="Hub name or directory of the frozen model of the KL penalty, which scores "
        "groups without ref_logprobs; groups: every group has them. none: with LoRA the model "
        "without its adapters, otherwise kl_coef is rejected.",
    )
    kl_unbiased: bool = Field(
        default=False,
        description="Whether to multiply the KL estimate by the policy's ratio, which makes the "
        "gradient of k1 and k3 that of KL(policy || reference); TRL's use_bias_correction_kl.",
    )
    kl_estimator: KlEstimator = Field(
        default="k3",
        description="Estimator of the KL penalty; as a loss, k1 has zero gradient in expectation.",
    )
    entropy_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the policy's entropy, which is added as a bonus against its "
        "collapse; 0: no bonus.",
    )
    sft_coef: float = Field(
        default=1.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the likelihood loss of trajectories marked sft.",
    )
    distill_coef: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Weight of the distillation from the groups' teacher arrays; 0: no "
        "distillation, and groups with such arrays are rejected.",
    )
    distill_loss: Literal["cross_entropy", "reverse_kl"] = Field(
        default="cross_entropy",
        description="Cross entropy to the teacher's top tokens, or reverse KL over them.",
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
        default="127.0.0.1",
        min_length=1,
        description="Host of the engine, to which a launched one binds.",
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
        default="bfloat16", description="Element type in the engine; on a CPU, bfloat16 is float32."
    )
    vllm_restart_interval: int = Field(
        default=3, ge=0, description="Steps between weight updates of the engine; 0: never."
    )
    vllm_start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Maximum time until a launched engine responds to /health, in seconds.",
    )
    vllm_args: str = Field(
        default="",
        description="Additional arguments of a launched engine, such as "
        "--vllm-args='--enforce-eager'.",
    )
    sync_pause_mode: Literal["keep", "wait", "abort", "none"] = Field(
        default="keep",
        description="Treatment of requests that run during an in-place update: pause and continue "
        "under the new weights, wait for them, abort them, or (none) let them run.",
    )
    sync_transport: Literal["disk", "shared_memory", "nccl", "ipc"] = Field(
        default="disk",
        description="Transport of in-place updates: a directory under save_path that the engine's "
        "host can read, or shared memory if trainer and engine run on one host. With vLLM on GPUs, "
        "its own transfer engines: nccl between GPUs, ipc on the GPU that both use.",
    )
    engine_urls: list[str] | None = Field(
        default=None,
        description="Addresses of all engines that in_place updates, if there are several or one "
        "on another host; none: the one at vllm_host and vllm_port.",
    )
    engine_timeout_s: float = Field(
        default=600.0,
        ge=0,
        description="Seconds to retry an in-place update while an engine of engine_urls is "
        "unreachable, before giving up; 0: do not retry.",
    )
    engine_wait_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds to wait for an engine that starts at the same time as the trainer, "
        "after the model was loaded; 0: the engine has to be ready, or the trainer launches one.",
    )
    engine: Literal["vllm", "sglang", "torch"] = Field(
        default="vllm",
        description="Engine at vllm_port; SGLang is updated in place and never launched. torch: "
        "example_trainer.torch_engine, which needs no vLLM.",
    )


class ModeFields(BaseModel):
    """Weight updates of the engine."""

    weight_bridge_mode: Literal[
        "auto", "shared_vllm", "lora_only", "lora_restart", "none", "in_place", "off"
    ] = Field(
        default="auto",
        description="Weight updates of the engine. auto: in_place if the engine supports it, else "
        "none; the log reports the choice. none: restart an engine that the trainer owns; "
        "in_place: reload weights while the engine at vllm_port, or a launched one, is running; "
        "lora_only: swap LoRA adapters in the running engine at vllm_port; lora_restart: restart "
        "an owned engine on new adapters; off: no engine; the groups were sampled earlier.",
    )
    publish_weights: str | None = Field(
        default=None,
        min_length=1,
        description="Folder or fsspec URL to which the weights are published as well, at the start "
        "and after every vllm_restart_interval steps, for `atropos-weights follow` on other hosts; "
        "none: nowhere.",
    )
    publish_dtype: Literal["bfloat16", "float16", "float32", "as_trained"] = Field(
        default="bfloat16",
        description="Element type of published weights. Versions in bfloat16 differ in few "
        "elements, so that their deltas are small.",
    )
    publish_keep_versions: int = Field(
        default=20, ge=1, description="Number of the newest published versions to keep."
    )
    vllm_config_path: str | None = Field(
        default=None, description="Bridge file of shared_vllm (mode not built yet)."
    )
    train_layer_indices: list[int] | None = Field(
        default=None, description="Train only these transformer blocks, e.g. 0-3,28-31."
    )


class LoraFields(BaseModel):
    """LoRA adapters."""

    lora: bool = Field(
        default=False,
        description="Train LoRA adapters only. Engines get the merged model, by the "
        "weight_bridge_mode auto, in_place or none; the modes lora_only and lora_restart, which "
        "imply it, give them the adapters.",
    )
    lora_r: int = Field(default=16, ge=1, le=8192, description="Rank of the LoRA adapters.")
    lora_alpha: int = Field(
        default=32, ge=1, description="LoRA alpha: updates are scaled by lora_alpha / lora_r."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on adapter inputs.")
    lora_target_modules: list[str] | None = Field(
        default=None, description="Names of the modules with adapters; none: q_proj and v_proj."
    )
    lora_layer_indices: list[int] | None = Field(
        default=None, description="Transformer blocks with adapters, e.g. 0-3."
    )
    lora_name: str = Field(
        default="training_adapter",
        min_length=1,
        description="Model name under which the engine serves the adapters to rollouts.",
    )


BUILT_MODES = ("auto", "none", "in_place", "lora_only", "lora_restart", "off")
"""Weight bridge modes of this version; the others of the contract raise an error at startup."""

TRANSFER_BACKENDS = ("nccl", "ipc")
"""Values of `sync_transport` that name a transfer engine of vLLM."""


def default_device() -> str:
    """Return `cuda` when torch sees a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class ModelFields(BaseModel):
    """The trained model."""

    model_name: str = Field(min_length=1, description="Hub name or local directory of the model.")
    gradient_checkpointing: bool = Field(
        default=True,
        description="Whether to recompute activations in the backward pass: less memory, more "
        "time.",
    )
    freeze_vision: bool = Field(
        default=False,
        description="Whether to keep the vision encoder of a model that reads images unchanged, "
        "which saves its gradients and optimizer state; the default trains it as well.",
    )
    train_dtype: Literal["auto", "bfloat16", "float32", "mixed"] = Field(
        default="auto",
        description="Element type of the trained weights; auto: mixed on CUDA, float32 on CPU. "
        "mixed keeps float32 weights and optimizer states and runs the model in bfloat16, as "
        "float32 on CUDA does too. bfloat16 takes half the memory; AdamW then rounds "
        "stochastically, which preserves small updates on average and adds noise.",
    )


class TrainingFields(BaseModel):
    """Length and size of the run, and the optimizer."""

    lr: float = Field(
        default=1e-5,
        gt=0,
        allow_inf_nan=False,
        description="Peak learning rate. The default is that of earlier versions; atropos-train "
        "uses 1e-6, which is common if all weights of a model are trained for long.",
    )
    training_steps: int = Field(default=10, ge=1, description="Optimizer steps of the whole run.")
    batch_size: int = Field(
        default=2,
        ge=1,
        description="Sequences per forward pass (microbatch), unless microbatch_tokens is given.",
    )
    seq_len: int = Field(
        default=2048, ge=2, description="Maximum sequence length in tokens; longer ones are cut."
    )
    gradient_accumulation_steps: int = Field(
        default=32, ge=1, description="Optimizer steps take batch_size times this many sequences."
    )
    num_iterations: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Optimizer updates on each batch, which together are one step: mu of GRPO, "
        "ppo_epochs of verl. The ratio of later ones divides by the logprobs before the first.",
    )
    pad_multiple: int = Field(
        default=64,
        ge=1,
        le=2**20,
        description="Sequences of a forward pass are padded to a multiple of this many tokens; "
        "a small multiple saves time on a CPU.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether sequences share a row instead of being padded; forward passes have "
        "about the same number of tokens each. auto: if a trial on the model shows that packed "
        "sequences do not attend to each other; on: fail if they do.",
    )
    shared_prefixes: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether packed sequences that begin alike, such as the completions of a "
        "prompt, compute these tokens once. auto: if a trial on the model gives the logprobs and "
        "gradients of single sequences, for batches in which that leaves out 5 % of the tokens, "
        "15 % on CUDA; on: fail if it does not, for every batch. Batches with images never share.",
    )
    torch_compile: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether transformer blocks and logprobs run as kernels that torch.compile "
        "fuses, which takes up to a minute at the start. auto: on CUDA with Triton, for packed "
        "models whose weights are all trained and not sharded, if a trial gives the same logprobs "
        "and gradients; on: fail if it does not.",
    )
    microbatch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of a forward pass, with padding and with shared prefixes "
        "counted once, unless one sequence is longer. It alone determines the number of passes; "
        "a step still has batch_size x gradient_accumulation_steps sequences. none: batch_size "
        "sequences per pass.",
    )
    logprob_chunk_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens whose logits are computed at a time; none: a fixed memory budget.",
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear learning-rate warm-up.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate after the warm-up: constant, or linear or cosine decay from lr "
        "to min_lr over the steps of the run.",
    )
    min_lr: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Final learning rate of lr_schedule.",
    )
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        default="adamw_8bit",
        description="Optimizer; adamw_8bit falls back to adamw without bitsandbytes or a GPU, and "
        "with sharded weights; adamw is fused on CUDA.",
    )
    adafactor_scale_parameter: bool = Field(
        default=False, description="Adafactor's scale_parameter."
    )
    adafactor_relative_step: bool = Field(default=False, description="Adafactor's relative_step.")
    weight_decay: float = Field(
        default=0.01, ge=0, allow_inf_nan=False, description="Decoupled weight decay (AdamW)."
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="Maximum norm of the gradient, which is clipped to it."
    )
    seed: int = Field(
        default=0,
        ge=0,
        le=2**32 - 1,
        description="Seed of the random generators of Python, numpy and torch.",
    )
    device: str = Field(
        default_factory=default_device, description="Torch device; auto: cuda if available."
    )
    save_path: str = Field(
        default="trained_model_checkpoints", min_length=1, description="Directory of checkpoints."
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
        description="Minutes between resumable checkpoints, unless checkpoint_interval is given.",
    )
    keep_checkpoints: int | None = Field(
        default=2,
        ge=1,
        description="Number of the newest resumable checkpoints of this run, and of the newest "
        "adapters of a LoRA mode, to keep; none: all. While one is written there is one more.",
    )
    resume: bool = Field(
        default=False,
        description="Whether to continue the run under save_path: from its newest step_<n> "
        "checkpoint and the batches trained after it.",
    )
    resume_or_start: bool = Field(
        default=False,
        description="Whether to resume if save_path has a run, and to start one otherwise, so that "
        "a supervisor can repeat the same command.",
    )
    record_run: bool = Field(
        default=False,
        description="Whether to keep every batch of the run, its settings, and a checksum of the "
        "weights after each step, in <save_path>/recorded, so that `atropos-replay run` can repeat "
        "it; needs one trainer process.",
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
        description="Whether to replace a run of the service that has other settings, such as the "
        "batch size; its queued groups are kept. Otherwise the service rejects this run (409).",
    )
    lease_s: float = Field(
        default=600.0,
        ge=1,
        le=86400,
        description="Seconds after which the service may redeliver a batch not acknowledged yet.",
    )


class WandbFields(BaseModel):
    """Outputs of the metrics."""

    use_wandb: bool = Field(
        default=False, description="Whether to log metrics to Weights & Biases as well."
    )
    wandb_project: str | None = Field(
        default=None, description="Weights & Biases project; none: no metrics are sent there."
    )
    wandb_group: str | None = Field(
        default=None, description="Run group of Weights & Biases; none: a random name."
    )
    metrics_path: str | None = Field(
        default=None, description="JSONL file of metrics; none: <save_path>/metrics.jsonl."
    )
    quiet: bool = Field(
        default=False,
        description="Whether to write log lines only, without the live view; a live view needs "
        "a terminal.",
    )
    use_tensorboard: bool = Field(
        default=False,
        description="Whether to write TensorBoard event files as well, to the folder tensorboard "
        "next to metrics_path; needs the extra tensorboard.",
    )


class DistributedFields(BaseModel):
    """Several trainer processes; torchrun sets the rank and the number of processes."""

    trainer_rank: int = Field(default=0, ge=0, description="Rank of this process; 0 leads.")
    world_size: int = Field(default=1, ge=1, description="Number of trainer processes.")
    parallel_mode: Literal["fsdp", "data"] = Field(
        default="fsdp",
        description="How state is distributed across processes. fsdp: shard weights, gradients "
        "and optimizer state; data: replicate them.",
    )
    init_method: str = Field(
        default="env://", description="Rendezvous address of torch.distributed."
    )
    num_inference_nodes: int = Field(
        default=0, ge=0, description="Number of inference hosts of a cluster run; not used."
    )


class DebugFields(BaseModel):
    """Diagnostics."""

    debug_loading: bool = Field(
        default=False, description="Whether to log every parameter of the loaded model."
    )
    benchmark: bool = Field(
        default=False, description="Whether to log total time and memory at the end."
    )
    log_dir: str = Field(default="./logs", description="Directory of a launched engine's log file.")
    single_copy: bool = Field(
        default=False, description="Whether to share weights with the engine (not built yet)."
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
        return self.world_size > 1 and self.parallel_mode == "fsdp"

    @property
    def resolved_train_dtype(self) -> Literal["bfloat16", "float32", "mixed"]:
        """`train_dtype` with `auto` resolved."""
        if self.train_dtype == "auto":
            return "mixed" if self.device.startswith("cuda") else "float32"
        return self.train_dtype

    @property
    def loaded_dtype(self) -> Literal["bfloat16", "float32"]:
        """Element type of the loaded weights.

        With LoRA and mixed precision on CUDA, the frozen weights are bfloat16 and the adapters
        float32, unless they are sharded, which takes a single type.
        """
        dtype = self.resolved_train_dtype
        if dtype != "mixed":
            return dtype
        freezes = self.uses_lora and not self.is_sharded and self.device.startswith("cuda")
        return "bfloat16" if freezes else "float32"

    @property
    def reference_source(self) -> Literal["none", "groups", "model", "base"]:
        """Source of the KL penalty's reference logprobs for groups that have none."""
        if not self.kl_coef:
            return "none"
        if self.reference_model not in (None, "groups"):
            return "model"
        return "base" if self.uses_lora and self.reference_model is None else "groups"

    @property
    def autocasts(self) -> bool:
        """Whether forward passes run in bfloat16 for any type of the weights."""
        on_gpu = self.device.startswith("cuda")
        dtype = self.resolved_train_dtype
        return dtype == "mixed" or (on_gpu and dtype == "float32")

    @property
    def uses_lora(self) -> bool:
        return self.lora or self._serves_adapters

    @property
    def merges_adapters(self) -> bool:
        """Whether engines get the merged model of a run that trains adapters."""
        return self.lora and not self._serves_adapters

    @property
    def _serves_adapters(self) -> bool:
        return self.weight_bridge_mode in ("lora_only", "lora_restart")

    @property
    def vllm_connect_host(self) -> str:
        """Host at which the trainer reaches the engine."""
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
        _ = self.loss_choice  # raises if settings of the loss exclude each other
        if not (self.policy_coef or self.kl_coef or self.sft_coef or self.distill_coef):
            raise ValueError(
                "policy_coef, kl_coef, sft_coef and distill_coef are all 0: nothing is trained"
            )
        if self.engine_urls and self.weight_bridge_mode not in ("auto", "in_place", "off"):
            raise ValueError("engine_urls needs weight_bridge_mode=in_place")
        if self.engine == "sglang" and self.weight_bridge_mode not in ("auto", "in_place", "off"):
            raise ValueError("engine=sglang needs weight_bridge_mode=in_place")
        if self.sync_transport in TRANSFER_BACKENDS:
            self._require_transfer()
        if self.shared_prefixes == "on" and self.packing == "off":
            raise ValueError("shared_prefixes=on needs packed sequences: use packing=auto or on")
        if self.publish_weights and self._serves_adapters:
            raise ValueError(
                "publish_weights publishes whole models; to train adapters, use lora with "
                "weight_bridge_mode=in_place or none"
            )
        if self.publish_weights and not self.vllm_restart_interval:
            raise ValueError("publish_weights needs vllm_restart_interval of at least 1")
        if self.engine == "torch" and self._serves_adapters:
            raise ValueError(
                "engine=torch serves no adapters: use lora with weight_bridge_mode=auto, or "
                "engine=vllm"
            )
        if self.record_run and self.world_size > 1:
            raise ValueError("record_run needs one trainer process: world_size=1")
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr:g} must not be above lr={self.lr:g}")
        if self.is_sharded and self.optimizer == "adafactor":
            raise ValueError("adafactor cannot be sharded: use adamw, or parallel_mode=data")
        limit = self.overlong_max_tokens
        if self.overlong_buffer_tokens and limit is None:
            raise ValueError("overlong_buffer_tokens needs overlong_max_tokens")
        if limit is not None and self.overlong_buffer_tokens >= limit:
            raise ValueError(
                f"overlong_buffer_tokens={self.overlong_buffer_tokens} must be below "
                f"overlong_max_tokens={limit}"
            )
        return self

    def _require_transfer(self) -> None:
        transport = f"sync_transport={self.sync_transport}"
        if not self.device.startswith("cuda"):
            raise ValueError(f"{transport} needs a GPU, but device={self.device}: use disk")
        if self.engine != "vllm" or self.weight_bridge_mode not in ("auto", "in_place"):
            raise ValueError(f"{transport} needs engine=vllm and weight_bridge_mode=in_place")
        if self.sync_transport == "ipc" and (self.world_size > 1 or self.engine_urls):
            raise ValueError(
                f"{transport} needs one trainer process and one engine on its GPU: use nccl"
            )


def loading_errors() -> tuple[type[Exception], ...]:
    """Return the errors by which transformers reports that a model cannot be loaded."""
    from safetensors import SafetensorError

    of_fields: tuple[type[Exception], ...] = ()
    with contextlib.suppress(ImportError):  # earlier versions do not check the fields of a config
        from huggingface_hub.errors import StrictDataclassError

        of_fields = (StrictDataclassError,)
    return (
        *(OSError, ValueError, KeyError, SafetensorError),  # KeyError: an unknown architecture
        *(ImportError, RecursionError),  # a package that the model needs; deeply nested JSON
        # Other content than that of a config: a list, no attention heads, an unknown type.
        *(AttributeError, TypeError, ZeroDivisionError, *of_fields),
    )


def unloadable(
    name: str, error: Exception, *, part: str = "model", flag: str = "--model"
) -> ConfigError:
    """Return the error that the model of a flag, or a part of it, cannot be loaded, as one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[0].rstrip(" .:").removesuffix(" from one of")
    return ConfigError(
        f"{part} {name!r} cannot be loaded: {or_missing_folder(reason, name)}; {flag} takes the "
        "folder of a model with its tokenizer, or its name on the Hugging Face hub"
    )


def require_model_folder(name: str, flag: str = "--model") -> None:
    """Reject a path to a missing folder; a name on the hub is checked when the model is loaded.

    For a name on the hub, see also `use_cache_without_hub`.
    """
    reason = missing_folder(name)
    if reason is not None:
        raise unloadable(name, ConfigError(reason), flag=flag)
    use_cache_without_hub(name)


def require_reference(config: TrainingConfig) -> None:
    """Raise `ConfigError` for a KL penalty without a reference, and the reverse."""
    if config.kl_coef and config.reference_model is None and not config.uses_lora:
        raise ConfigError(
            f"kl_coef={config.kl_coef:g} needs a reference: --reference-model NAME_OR_PATH, for "
            f"example {config.model_name}, or --reference-model groups if environments send "
            "ref_logprobs"
        )
    if config.reference_model is not None and not config.kl_coef:
        raise ConfigError("reference_model has no effect without a KL penalty: set --kl-coef")
    if config.reference_model not in (None, "groups"):
        require_model_folder(config.reference_model, "--reference-model")
