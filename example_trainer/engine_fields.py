"""Settings of the inference engine and of how it gets new weights, one class per group of flags."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

__all__ = ["LoraFields", "ModeFields", "VllmFields"]


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
