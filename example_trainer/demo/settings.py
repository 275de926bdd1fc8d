"""Settings, paths, plan and model of one run of the demo.

The tokenizer of the model is byte-level BPE and can encode any text. Its merges are learned on the
texts of the task and may span words: a sentence that occurs in every prompt becomes one token. Each
digit is a token. No file is downloaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atroposlib.errors import ConfigError
from atroposlib.utils.writable import naming_writes
from example_trainer.cli import require_extra
from example_trainer.launch.options import EnvironmentPlan, RunPaths, RunPlan
from example_trainer.launch.preflight import EngineKind
from example_trainer.reporting.run_folder import ENVIRONMENT_METRICS_NAME, GROUPS_NAME

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

PAD_TOKEN = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# ChatML, as Qwen and Hermes models have it.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


@dataclass(frozen=True)
class TinyModelShape:
    """Sizes of a Llama-like model; the defaults give about 1.1 million parameters."""

    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    num_heads: int = 4
    """Attention heads; the width of one head must be a multiple of 32 for vLLM on CPU."""
    max_length: int = 256
    """Maximum sequence length in tokens."""
    max_vocabulary: int = 768
    """Maximum size of the vocabulary; 259 entries are bytes and special tokens."""


def train_tokenizer(
    conversations: Iterable[Sequence[Mapping[str, str]]],
    *,
    max_length: int,
    max_vocabulary: int = TinyModelShape.max_vocabulary,
) -> PreTrainedTokenizerFast:
    """Train a tokenizer with a ChatML template on conversations of the task.

    `<|im_end|>` ends a turn, `<|endoftext|>` is the padding token.
    """
    with require_extra("trainer"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # No merges across the first line of a message: the tokens of a prompt are a prefix of
            # those of the conversation, for any completion.
            pre_tokenizers.Split(Regex(r"\A(system|user|assistant)\n"), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated"),
            # Without the usual word pattern, so that merges may span words.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocabulary,
        min_frequency=8,
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text
        for messages in conversations
        for message in messages
        for text in (f"{message['role']}\n", message["content"])
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, shape: TinyModelShape, *, seed: int
) -> PreTrainedModel:
    """Create a Llama-like model with random float32 weights for `tokenizer`."""
    with require_extra("trainer"):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=4 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        max_position_embeddings=shape.max_length,
        # On a CPU, vLLM does not update a tied output layer in place.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def save_tiny_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write model and tokenizer to `folder`, loadable offline with `from_pretrained`."""
    with require_extra("trainer"):
        from transformers.utils import logging as transformers_logging

        from example_trainer.checkpointing import safetensors_errors

    transformers_logging.disable_progress_bar()  # the file has 4 MB
    with naming_writes(folder), safetensors_errors():
        model.save_pretrained(os.fspath(folder))
        tokenizer.save_pretrained(os.fspath(folder))


REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the clone that contains this module."""

ENVIRONMENT_DOOR = (
    Path("environments") / "reasoning_gym_environment" / "reasoning_gym_environment.py"
)
"""Script of the environment the demo runs, relative to `REPOSITORY`."""


def require_clone() -> None:
    """Make `environments` importable; raise `ConfigError` outside of a clone."""
    if not (REPOSITORY / ENVIRONMENT_DOOR).is_file():
        raise ConfigError(
            f"the demo runs {ENVIRONMENT_DOOR} of the repository, which is missing under "
            f"{REPOSITORY}; clone the repository and run `make demo` there"
        )
    if str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))


Profile = Literal["full", "quick"]


@dataclass(frozen=True)
class TaskSettings:
    """The reasoning-gym task of the demo."""

    name: str = "chain_sum"
    """Name of the task in the reasoning-gym package."""
    num_terms: int = 3
    """Numbers in one sum; three numbers of one digit give 4,000 problems."""
    num_digits: int = 1
    """Digits of each number."""
    system_prompt: str | None = "Give the answer in <answer> tags."
    """Replaces the environment's system prompt; None keeps it."""

    @property
    def params(self) -> dict[str, int]:
        """Parameters of the task as reasoning-gym names them."""
        return {
            "min_terms": self.num_terms,
            "max_terms": self.num_terms,
            "min_digits": self.num_digits,
            "max_digits": self.num_digits,
        }


@dataclass(frozen=True)
class WarmUpSettings:
    """Supervised learning in two parts: worked solutions, then a mix with direct answers.

    The model answers directly with low accuracy, which reinforcement learning can improve. Both
    parts end on measured accuracy, so that the starting point is similar for every seed.
    """

    worked_accuracy: float = 0.6
    """Accuracy on held-out problems at which the first part ends."""
    start_accuracy: tuple[float, float] = (0.33, 0.5)
    """Range of accuracy in which the second part ends."""
    direct_share: float = 0.4
    """Share of direct answers in the second part."""
    limit_s: float = 240.0
    """Maximum duration of each part in seconds."""
    lr: float = 2e-3
    """Learning rate of the first part."""
    mixed_lr: float = 1e-3
    """Learning rate of the second part."""
    batch_size: int = 64
    """Conversations per step."""
    num_conversations: int = 20_000
    """Number of training conversations."""
    steps_per_check: int = 20
    """Steps between two measurements."""


@dataclass(frozen=True)
class DemoSettings:
    """Settings of one run of the demo."""

    model: str | None = None
    """Hub name or folder of a model; None: train a tiny one."""
    seed: int = 0
    """Seed of the weights, the problems, the sampling and the trainer."""
    steps: int = 60
    """Optimizer steps of the reinforcement learning."""
    groups_per_step: int = 16
    """Problems in one optimizer step."""
    group_size: int = 8
    """Completions sampled for each problem."""
    lr: float = 2e-4
    """Learning rate of the reinforcement learning."""
    max_tokens: int = 64
    """Maximum tokens of prompt and completion."""
    num_held_out: int = 512
    """Number of problems that accuracy is measured on."""
    task: TaskSettings | None = TaskSettings()
    """The task; None if `environment_sections` determine it."""
    warm_up: WarmUpSettings = WarmUpSettings()
    """Supervised learning of the tiny model."""
    warmed_up_model: Path | None = None
    """Folder of a tiny model after supervised learning; None: train one."""
    engine: EngineKind = "vllm"
    """Engine to launch."""
    trainer_flags: tuple[str, ...] = ()
    """Additional flags of the trainer, such as `--algorithm=gspo`; they have precedence."""
    environment_door: Path = ENVIRONMENT_DOOR
    """Script of the environment, relative to the repository."""
    environment_sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Additional settings of the environment, by section of its YAML file; with precedence."""
    shape: TinyModelShape = field(default_factory=TinyModelShape)
    """Sizes of the tiny model."""
    stall_limit_s: float = 300.0
    """Seconds without a trainer step after which the run fails."""
    start_limit_s: float = 600.0
    """Maximum seconds for the start of each process."""

    @property
    def uses_tiny_model(self) -> bool:
        return self.model is None

    @property
    def sequences_per_step(self) -> int:
        return self.groups_per_step * self.group_size

    @property
    def sequences_per_pass(self) -> int:
        """Trajectories in one forward pass of the trainer; divides `sequences_per_step`."""
        return self.sequences_per_step if self.uses_tiny_model else 2

    @property
    def eval_seed(self) -> int:
        return 1_000_003 + self.seed


def settings_for(
    profile: Profile,
    *,
    model: str | None = None,
    seed: int = 0,
    steps: int | None = None,
    lr: float | None = None,
    max_tokens: int | None = None,
    algorithm: str | None = None,
    engine: EngineKind = "vllm",
) -> DemoSettings:
    """Return the settings of a profile with the given values.

    `quick` runs through every part without learning much. A `model` instead of the tiny one changes
    the defaults that depend on size.

    Raises:
        ConfigError: `max_tokens` is more than the tiny model reads.
    """
    task = TaskSettings()
    settings = DemoSettings(model=model, seed=seed, engine=engine)
    limit = settings.shape.max_length
    if model is None and max_tokens is not None and max_tokens > limit:
        raise ConfigError(
            f"--max-tokens {max_tokens}: the small model reads at most {limit} tokens; give at "
            f"most {limit}, or another model with --model"
        )
    if algorithm is not None:
        settings = replace(settings, trainer_flags=(f"--algorithm={algorithm}",))
    if model is not None:
        # A larger model follows the environment's own instructions and needs more tokens.
        task = replace(task, num_terms=6, num_digits=3, system_prompt=None)
        settings = replace(settings, lr=1e-6, max_tokens=1024, stall_limit_s=1800.0, task=task)
    if profile == "quick":
        # Just enough accuracy that scores within a group differ.
        settings = replace(
            settings,
            steps=3,
            groups_per_step=4,
            num_held_out=32,
            task=replace(task, num_terms=2),
            shape=replace(settings.shape, num_layers=2),
            warm_up=replace(settings.warm_up, worked_accuracy=0.2, start_accuracy=(0.0, 1.0)),
        )
    return replace(
        settings,
        steps=settings.steps if steps is None else steps,
        lr=settings.lr if lr is None else lr,
        max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
    )


@dataclass(frozen=True)
class DemoPaths(RunPaths):
    """Output paths of one run of the demo; the environment's files are in `output` itself."""

    @property
    def tiny_model(self) -> Path:
        return self.output / "model"

    @property
    def groups(self) -> Path:
        return self.output / GROUPS_NAME

    @property
    def environment_metrics(self) -> Path:
        return self.output / ENVIRONMENT_METRICS_NAME


def demo_plan(settings: DemoSettings, paths: DemoPaths, *, model: str, on_gpu: bool) -> RunPlan:
    """Return the plan of a run of the demo, or of a benchmark based on it."""
    environment = EnvironmentPlan(
        program=(str(settings.environment_door),),
        folder=paths.output,
        settings=environment_settings(settings),
        sections={
            **settings.environment_sections,
            "openai": {
                "num_max_requests_at_once": 4 * settings.groups_per_step,
                **settings.environment_sections.get("openai", {}),
            },
        },
    )
    return RunPlan(
        model=model,
        environments=(environment,),
        steps=settings.steps,
        sequences_per_step=settings.sequences_per_step,
        context_tokens=settings.max_tokens,
        work=f"{settings.groups_per_step} problems x {settings.group_size} tries",
        expected="a few minutes" if settings.uses_tiny_model else "depends on the model",
        seed=settings.seed,
        on_gpu=on_gpu,
        engine=settings.engine,
        engine_flags=_engine_flags(settings, on_gpu=on_gpu),
        trainer_flags=_trainer_flags(settings),
        variables=_variables(settings),
        import_folder=REPOSITORY,
        working_folder=REPOSITORY,
        stall_limit_s=settings.stall_limit_s,
        start_limit_s=settings.start_limit_s,
    )


def environment_settings(settings: DemoSettings) -> dict[str, Any]:
    """Return the settings of the environment, by field of its config."""
    return {
        **({} if settings.task is None else _task_fields(settings, settings.task)),
        "temperature": 1.0,
        "group_size": settings.group_size,
        "max_num_workers": 2 * settings.groups_per_step,
        "max_batches_offpolicy": 1,
        "max_token_length": settings.max_tokens,
        "steps_per_eval": 0,
    }


def _task_fields(settings: DemoSettings, task: TaskSettings) -> dict[str, Any]:
    return {
        "task_names": [task.name],
        "task_params": {task.name: task.params},
        "system_prompt": task.system_prompt,
        "seed": settings.seed,
        "eval_seed": settings.eval_seed,
        "num_eval_samples_per_task": settings.num_held_out,
        "top_p": 1.0,
        # Scoring is two lines of arithmetic, which needs no further processes.
        "num_score_workers": 0,
    }


def _engine_flags(settings: DemoSettings, *, on_gpu: bool) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if settings.uses_tiny_model or not on_gpu:
        flags += ("--dtype", "float32", "--max-num-seqs", "256")
        flags += () if settings.engine == "torch" else ("--enforce-eager",)
    if settings.engine == "torch" and not on_gpu:
        flags += ("--device", "cpu")
    if on_gpu:
        flags += ("--gpu-memory-utilization", "0.45")
    return flags


def _trainer_flags(settings: DemoSettings) -> tuple[str, ...]:
    flags: dict[str, Any] = {
        "lr": settings.lr,
        "warmup-steps": min(10, settings.steps),
        "weight-decay": 0.0,
        "batch-size": settings.sequences_per_pass,
        "gradient-accumulation-steps": settings.sequences_per_step // settings.sequences_per_pass,
        "pad-multiple": 8 if settings.uses_tiny_model else 64,
        "optimizer": "adamw",
        "checkpoint-interval": 0,
    }
    arguments = tuple(f"--{name}={value}" for name, value in flags.items())
    if settings.uses_tiny_model:
        # A GPU would not be faster, and memory is sufficient.
        arguments += ("--device=cpu", "--no-gradient-checkpointing")
    return arguments + settings.trainer_flags


def _variables(settings: DemoSettings) -> Mapping[str, str]:
    variables = {"WANDB_MODE": "disabled"}
    if settings.uses_tiny_model:
        # The processes share a few cores.
        variables["OMP_NUM_THREADS"] = "1"
        # Nothing is downloaded, and a network may not be available.
        variables["HF_HUB_OFFLINE"] = "1"
        variables["HF_DATASETS_OFFLINE"] = "1"
    return variables
