"""The options of `atropos-train` and the plan of the run that follows from them; pure.

    options + facts about model, environments and machine ─► RunPlan, notes on the choices

`atropos-train` and `atropos-demo` each create a `RunPlan`; `stack` turns it into processes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from atroposlib.adapters.registry import KINDS
from atroposlib.errors import ConfigError
from example_trainer.config import TrainingConfig
from example_trainer.launch.preflight import EngineKind, EnvironmentFacts, ModelFacts
from example_trainer.memory_plan import GIB, STATE_BYTES
from example_trainer.model import choose_optimizer
from example_trainer.reporting.run_folder import (
    ENVIRONMENT_METRICS_NAME,
    ENVIRONMENTS_NAME,
    GROUPS_NAME,
    ROLLOUTS_NAME,
    SUMMARY_NAME,
)
from example_trainer.reporting.writing import REPORT_NAME


@dataclass(frozen=True)
class EnvironmentPlan:
    """One environment process of a run."""

    program: tuple[str, ...]
    """Words after `python`: the environment's file, absolute or relative to
    `RunPlan.working_folder`, or `-m`, a module and its argument."""
    folder: Path
    """Output folder of its settings, groups, metrics and evaluations."""
    name: str = "environment"
    """Unique name for tables."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Section `env` of its YAML file, with precedence over the settings of every environment."""
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Additional settings by section of the YAML file, with precedence over `settings`."""
    flags: tuple[str, ...] = ()
    """Flags such as `--env.group_size=8`, with precedence over the YAML file."""
    num_servers: int = 1
    """Number of inference servers in its defaults; each is replaced by the engine of the run."""
    is_evaluated: bool = False
    """Whether its `evaluate` measures something."""

    @property
    def process_name(self) -> str:
        return "environment" if self.name == "environment" else f"environment {self.name}"

    @property
    def config(self) -> Path:
        return self.folder / "environment.yaml"

    @property
    def groups(self) -> Path:
        return self.folder / GROUPS_NAME

    @property
    def metrics(self) -> Path:
        return self.folder / ENVIRONMENT_METRICS_NAME

    def evaluation(self, when: str) -> Path:
        """Folder of the evaluation `before` or `after` training."""
        return self.folder / f"evaluation_{when}"


@dataclass(frozen=True)
class RunPlan:
    """Settings of the processes of a run."""

    model: str
    """Hub name or folder of the model, and its name in the engine."""
    environments: tuple[EnvironmentPlan, ...]
    """At least one; names are unique."""
    steps: int
    """Optimizer steps of the whole run."""
    sequences_per_step: int
    """Trajectories in one optimizer step."""
    context_tokens: int
    """Maximum tokens of prompt and completion."""
    work: str = ""
    """Work of one step for the progress lines: `16 problems x 8 tries`."""
    expected: str = "depends on the model"
    """Expected duration of the training, in words."""
    seed: int = 0
    """Seed of the engine and of the trainer."""
    on_gpu: bool = False
    """Whether engine and trainer run on a GPU."""
    engine_model: Path | None = None
    """Folder of the engine's copy of the model; None: `model`."""
    engine: EngineKind = "vllm"
    """Engine to launch."""
    engine_url: str | None = None
    """Address, without `/v1`, of a running engine; None: launch one."""
    engine_flags: tuple[str, ...] = ()
    """Additional arguments of the launched engine."""
    engine_variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the launched engine."""
    trainer_flags: tuple[str, ...] = ()
    """Additional flags of `atropos-grpo`, with precedence."""
    trainer_variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of the trainer."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables of every process."""
    import_folder: Path | None = None
    """First entry of the module search path of every process."""
    working_folder: Path = field(default_factory=Path.cwd)
    """Working directory of the environments."""
    starts_together: bool = False
    """Whether all processes start at the same time; the trainer then waits for the engine."""
    is_resumed: bool = False
    """Whether the trainer continues from its checkpoints."""
    stall_limit_s: float = 1800.0
    """Seconds without a trainer step after which the run fails."""
    start_limit_s: float = 600.0
    """Maximum seconds for the start of each process."""


@dataclass(frozen=True)
class RunPaths:
    """Output paths of one run, all under `output`."""

    output: Path
    """Folder of the run, absolute."""

    @property
    def logs(self) -> Path:
        return self.output / "logs"

    @property
    def service_data(self) -> Path:
        return self.output / "service"

    @property
    def trainer_metrics(self) -> Path:
        """JSONL file of the trainer's metrics, one line per step."""
        return self.output / "trainer_metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.output / "trainer"

    @property
    def final_model(self) -> Path:
        return self.checkpoints / "final_model"

    @property
    def final_adapter(self) -> Path:
        """Of a run that trains adapters."""
        return self.checkpoints / "final_adapter"

    @property
    def curve(self) -> Path:
        """Picture of the reward over the steps."""
        return self.output / "reward_curve.png"

    @property
    def report(self) -> Path:
        """Page of the training's curves and settings."""
        return self.output / REPORT_NAME

    @property
    def rollouts(self) -> Path:
        """Page of rollouts from the first and the last steps."""
        return self.output / ROLLOUTS_NAME

    @property
    def summary(self) -> Path:
        """JSON file with the results of the run."""
        return self.output / SUMMARY_NAME


def shown_path(path: Path) -> str:
    """Return an absolute path relative to the working directory, if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def batch_sequences(group_sizes: Sequence[int], groups: int) -> int:
    """Return a batch size that is a multiple of every group size.

    It is about `groups` groups of mean size, rounded up, with at least one of each environment.
    """
    common = math.lcm(*group_sizes)
    wanted = max(sum(group_sizes), round(groups * sum(group_sizes) / len(group_sizes)))
    return -(-wanted // common) * common


def batch_shares(
    weights: Sequence[float], group_sizes: Sequence[int], sequences: int
) -> list[float]:
    """Return the share of each batch that is reserved for each environment.

    A share is an integer number of groups minus half a sequence, so that rounding never reserves
    more groups than fit. The remainder is not reserved.
    """
    total = sum(weights)
    shares = []
    for weight, size in zip(weights, group_sizes, strict=True):
        groups = max(1, int(sequences * weight / total / size + 1e-9))
        shares.append((groups * size - 0.5) / sequences)
    return shares


TINY_PARAMETERS = 20_000_000
"""Smaller models are for experiments: large learning rate, no limits on memory."""

PROMPT_ROOM_TOKENS = 1024
"""Tokens of the engine's context beyond `max_token_length`, for environments that limit completions
only or send other requests as well."""

CPU_TOKEN_LIMIT = 512
"""Maximum conversation length on a CPU, unless the model is tiny or a flag is given."""

_PARALLEL_SIZES = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)
"""Arguments of vLLM whose product is the number of GPUs it uses."""

_SHARED_GPU_UTILIZATION = 0.45
_OWN_GPU_UTILIZATION = 0.9
_FLOPS_PER_CORE = 2e10
_FLOPS_PER_PARAMETER_AND_TOKEN = 10
"""2 to generate, 6 to train, 2 to recompute activations."""


class EnvironmentFile(NamedTuple):
    """One environment of the command line."""

    path: str
    """File of an environment, or KIND:NAME of a task set of another library."""
    weight: float = 1.0
    """Share of every batch, relative to the others."""

    @property
    def is_task_set(self) -> bool:
        return self.path.partition(":")[0] in KINDS and not self.path.endswith(".py")

    @property
    def stem(self) -> str:
        """Name for folders and flags."""
        if self.is_task_set:
            return re.sub(r"[^A-Za-z0-9]+", "_", self.path).strip("_")[:64]
        return Path(self.path).stem

    def program(self, folder: Path) -> tuple[str, ...]:
        """Return the words after `python` that start its commands, from a working folder."""
        if self.is_task_set:
            return ("-m", "atroposlib.cli.env", self.path)
        return (str(folder / self.path),)


@dataclass(frozen=True)
class TrainOptions:
    """The command line of a run, saved in its folder for `--resume`."""

    files: tuple[EnvironmentFile, ...]
    model: str
    steps: int = 200
    seed: int = 0
    lr: float | None = None
    groups_per_step: int | None = None
    context_tokens: int | None = None
    device: str = "auto"
    evaluates: bool = True
    starts_together: bool = False
    engine: EngineKind = "vllm"
    engine_url: str | None = None
    engine_args: str = ""
    gpu_memory_utilization: float | None = None
    environment_flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Flags by environment name; those under "" are for every environment."""
    trainer_flags: tuple[str, ...] = ()
    working_folder: str = "."
    first_steps: int | None = None
    """`steps` of the first start, if a later one changed them."""

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up: those of the first start, since a resumed run repeats its steps."""
        return min(10, (self.first_steps or self.steps) // 10)

    def with_steps(self, steps: int) -> TrainOptions:
        """Return the options of a run that is continued to another step."""
        return replace(self, steps=steps, first_steps=self.first_steps or self.steps)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> TrainOptions:
        """Return the options from the JSON form of `asdict`.

        Raises:
            ValueError: A key is unknown, or a value has another type, as after an edit by hand.
        """
        given = dict(values)
        unknown = sorted(given.keys() - {each.name for each in fields(cls)})
        if unknown:
            raise ValueError(f"{unknown[0]}: unknown key")
        try:
            return TypeAdapter(cls).validate_python(given)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            # Without the value, which may hold an API key.
            raise ValueError(f"{place}: {first['msg']}") from None

    def names(self) -> list[str]:
        """Return a unique name for each file: its stem, numbered if it repeats.

        Their folders and logs are distinct too, where spaces and upper case make no difference.
        """
        names: dict[str, str] = {}
        for file in self.files:
            numbered = (f"{file.stem}-{number}" for number in itertools.count(2))
            for name in itertools.chain([file.stem], numbered):
                path = name.replace(" ", "_").casefold()
                if path not in names:
                    names[path] = name
                    break
        return list(names.values())

    def flags_of(self, name: str) -> tuple[str, ...]:
        return (*self.environment_flags.get("", ()), *self.environment_flags.get(name, ()))


class Machine(NamedTuple):
    """Hardware of a run."""

    gpus: tuple[str, ...]
    """Ids of the GPUs, as in `CUDA_VISIBLE_DEVICES`; empty to run on the CPU."""
    num_cores: int
    gpu_bytes: int = 0
    """Memory of the first GPU; 0 if unknown."""
    has_bfloat16: bool = True
    """Whether the GPUs support bfloat16."""


class GpuPlacement(NamedTuple):
    """Assignment of GPUs to trainer and engine."""

    trainer: tuple[str, ...]
    """GPU of the trainer; empty on a CPU."""
    engine: tuple[str, ...]
    """GPUs of the launched engine; empty on a CPU, or if none is launched."""
    engine_share: float
    """Share of the memory of its GPUs that the engine uses; 0 if none is launched."""
    idle: tuple[str, ...]
    """Unused GPUs."""

    @property
    def is_shared(self) -> bool:
        """Whether trainer and engine use the same GPU."""
        return bool(self.engine) and self.engine == self.trainer

    @property
    def trainer_share(self) -> float:
        """Share of the memory of its GPU that the trainer can use."""
        return 1.0 - self.engine_share if self.is_shared else 1.0

    def describe(self) -> str:
        """Return one line for the log; empty on a CPU."""
        if not self.trainer:
            return ""
        [trainer] = self.trainer
        if self.is_shared:
            return (
                f"GPU {trainer} is shared: the engine uses {self.engine_share:.0%} of its memory "
                "(--gpu-memory-utilization), the trainer the rest"
            )
        if not self.engine:
            return f"trainer on GPU {trainer}"
        text = f"trainer on GPU {trainer}, engine on {_listed(self.engine)}"
        if self.idle:
            text += f"; unused: {_listed(self.idle)} (--engine-args '--tensor-parallel-size N' "
            text += "gives the engine N of them)"
        return text


class Chosen(NamedTuple):
    """The plan of a run, and notes on the choices that the user should know."""

    plan: RunPlan
    notes: list[str]


def make_plan(
    options: TrainOptions,
    paths: RunPaths,
    *,
    model: ModelFacts,
    environments: Sequence[EnvironmentFacts],
    machine: Machine,
    is_resumed: bool = False,
) -> Chosen:
    """Choose every setting that the command line does not give.

    Raises:
        ConfigError: the options do not fit the model.
    """
    if model.context_tokens and (options.context_tokens or 0) > model.context_tokens:
        raise ConfigError(
            f"--context-tokens {options.context_tokens}: {options.model} reads at most "
            f"{model.context_tokens} tokens"
        )
    notes: list[str] = []
    is_tiny = model.num_parameters < TINY_PARAMETERS
    on_gpu = bool(machine.gpus)
    groups = options.groups_per_step or (16 if on_gpu or is_tiny else 4)
    sizes = [facts.group_size for facts in environments]
    sequences = batch_sequences(sizes, groups)
    shares = batch_shares([file.weight for file in options.files], sizes, sequences)
    limits = _token_limits(options, model, environments, machine, notes)
    limits_of_model = [n for n in (options.context_tokens, model.context_tokens) if n]
    context = min([max(limits) + PROMPT_ROOM_TOKENS, *limits_of_model])
    plans = tuple(
        _environment_plan(options, paths, position, facts, limits[position], shares[position])
        for position, facts in enumerate(environments)
    )
    placement = place(options, machine)
    _require_common_start(options, environments, placement)
    plan = RunPlan(
        model=options.model,
        environments=plans,
        steps=options.steps,
        sequences_per_step=sequences,
        context_tokens=context,
        work=_work(sequences, sizes),
        seed=options.seed,
        on_gpu=on_gpu,
        engine=options.engine,
        engine_url=options.engine_url,
        engine_flags=(
            *_engine_flags(options.engine, machine, placement),
            *shlex.split(options.engine_args),
        ),
        engine_variables=_engine_variables(machine, placement, is_tiny=is_tiny),
        trainer_flags=(
            *_trainer_flags(options, context, is_tiny=is_tiny, on_gpu=on_gpu),
            *options.trainer_flags,
        ),
        trainer_variables=_visible(placement.trainer, machine),
        variables=_thread_variables(machine, is_tiny=is_tiny),
        working_folder=Path(options.working_folder),
        starts_together=options.starts_together,
        is_resumed=is_resumed,
        # A step of a large model on a CPU takes long; a dead process is detected independently.
        stall_limit_s=1800.0 if on_gpu or is_tiny else 6 * 3600.0,
    )
    notes += _template_notes(options, model)
    notes += [placement.describe()] if on_gpu else []
    notes += _speed_notes(model, plan, machine, is_tiny=is_tiny)
    return Chosen(plan, notes)


def _require_common_start(
    options: TrainOptions, environments: Sequence[EnvironmentFacts], placement: GpuPlacement
) -> None:
    """Raise `ConfigError` if `--start-together` cannot work."""
    if not options.starts_together:
        return
    if options.evaluates and any(facts.is_evaluated for facts in environments):
        raise ConfigError(
            "--start-together trains from the first moment, but the environments are evaluated "
            "before training: add --no-evaluate"
        )
    if placement.is_shared:
        raise ConfigError(
            "--start-together needs a CPU or separate GPUs: the engine measures the free memory "
            "of its GPU while it starts, and here the trainer would be taking it"
        )


def _template_notes(options: TrainOptions, model: ModelFacts) -> list[str]:
    if model.has_chat_template:
        return []
    return [
        f"{options.model} has no chat template: environments that send messages will fail; choose "
        "an instruction-tuned model for those"
    ]


def _work(sequences: int, sizes: Sequence[int]) -> str:
    if len(set(sizes)) > 1:
        return f"{sequences} tries"
    return f"{sequences // sizes[0]} items x {sizes[0]} tries"


def place(options: TrainOptions, machine: Machine) -> GpuPlacement:
    """Divide the GPUs between trainer and engine.

    One GPU is shared. With several, the trainer uses the first, and the engine the last N that
    `--engine-args` requires, by default one.

    Raises:
        ConfigError: The engine requires more GPUs than are free.
    """
    gpus = machine.gpus
    if options.engine_url is not None or not gpus:
        return GpuPlacement(gpus[:1], (), 0.0, gpus[1:])
    engine_args = shlex.split(options.engine_args)
    wanted = 1
    for names in _PARALLEL_SIZES:
        size = _last_value(engine_args, names)
        wanted *= int(size) if size is not None and size.isdecimal() else 1
    free = max(1, len(gpus) - 1)
    if wanted > free:
        raise ConfigError(
            f"--engine-args '{options.engine_args}' uses {wanted} GPUs; there "
            + (f"are {free} in addition to the trainer's" if len(gpus) > 1 else "is one")
        )
    default = _SHARED_GPU_UTILIZATION if len(gpus) == 1 else _OWN_GPU_UTILIZATION
    share = options.gpu_memory_utilization or default
    with contextlib.suppress(TypeError, ValueError):  # vLLM rejects anything else
        share = float(_last_value(engine_args, ("--gpu-memory-utilization",)))  # type: ignore[arg-type]
    return GpuPlacement(
        trainer=gpus[:1], engine=gpus[-wanted:], engine_share=share, idle=gpus[1:-wanted]
    )


def require_gpu_memory(
    model: ModelFacts, config: TrainingConfig, machine: Machine, placement: GpuPlacement
) -> None:
    """Raise `ConfigError` if weights, gradients and optimizer states exceed the memory.

    Gradients and states of adapters are small, and not counted.
    """
    if not (machine.gpus and machine.gpu_bytes) or config.train_layer_indices is not None:
        return
    weight_bytes = {"float32": 4, "bfloat16": 2}[config.loaded_dtype]
    optimizer = choose_optimizer(config, trains_bfloat16=weight_bytes == 2)
    states = STATE_BYTES[optimizer.name] * (weight_bytes if optimizer.name == "adamw" else 1)
    counted, needed = "weights", float(model.num_parameters * weight_bytes)
    if not config.uses_lora:
        counted = f"weights, gradients and {optimizer.name} states"
        needed += model.num_parameters * (weight_bytes + states)
    available = machine.gpu_bytes * placement.trainer_share
    if needed <= available:
        return
    remedies = ["a smaller model"]
    if placement.is_shared:
        remedies += ["a second GPU", "a smaller --gpu-memory-utilization"]
    if weight_bytes > 2:
        remedies.append("--trainer.train-dtype bfloat16, which needs half")
    if not config.uses_lora:
        remedies.append("--trainer.lora, which trains adapters only")
    raise ConfigError(
        f"{config.model_name} does not fit: {counted} of {model.num_parameters / 1e9:.1f} billion "
        f"parameters need {needed / GIB:.0f} GiB, and "
        f"{available / GIB:.0f} GiB of GPU {placement.trainer[0]} are available to the trainer; "
        "use " + ", or ".join(remedies)
    )


def visible_gpus(variable: str, count: int) -> tuple[str, ...]:
    """Return the ids of the `count` visible GPUs, given the value of `CUDA_VISIBLE_DEVICES`."""
    named = [each.strip() for each in variable.split(",") if each.strip()]
    return tuple(named[:count] if named else map(str, range(count)))


def engine_flag(word: str) -> str:
    """Return the flag of a word of `--engine-args`; vLLM reads underscores as dashes."""
    return word.partition("=")[0].replace("_", "-")


def _last_value(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    found = None
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if engine_flag(flag) in names:
            found = value if equals else next(iter(arguments[position + 1 :]), None)
    return found


def _listed(gpus: Sequence[str]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)}"


def _visible(gpus: Sequence[str], machine: Machine) -> dict[str, str]:
    """Return the variable that restricts a process to its GPUs, unless it uses none or all."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if 0 < len(gpus) < len(machine.gpus) else {}


def _token_limits(
    options: TrainOptions,
    model: ModelFacts,
    environments: Sequence[EnvironmentFacts],
    machine: Machine,
    notes: list[str],
) -> list[int]:
    """Return `max_token_length` of each environment, limited by the context of the model."""
    limits = []
    for name, facts in zip(options.names(), environments, strict=True):
        most = [limit for limit in (model.context_tokens, options.context_tokens) if limit]
        is_typed = any(
            flag.split("=")[0] == "--env.max_token_length" for flag in options.flags_of(name)
        )
        wanted = facts.max_token_length
        fitting = min([wanted, *(n if facts.limits_conversation else n // 2 for n in most)])
        if is_typed:
            if most and wanted > min(most):
                raise ConfigError(
                    f"--env.max_token_length {wanted} of {name} exceeds the context of "
                    f"{min(most)} tokens; choose at most {fitting}"
                )
            fitting = wanted
        elif fitting < wanted:
            notes.append(
                f"{name}: max_token_length is {fitting}, not {wanted}, to fit the context of "
                f"{min(most)} tokens"
            )
        is_slow = not machine.gpus and model.num_parameters >= TINY_PARAMETERS
        if is_slow and not is_typed and fitting > CPU_TOKEN_LIMIT:
            fitting = CPU_TOKEN_LIMIT
            notes.append(
                f"{name}: max_token_length is {fitting}, not {wanted}, on a CPU; "
                "--env.max_token_length sets it"
            )
        limits.append(fitting)
    return limits


def _environment_plan(
    options: TrainOptions,
    paths: RunPaths,
    position: int,
    facts: EnvironmentFacts,
    max_token_length: int,
    share: float,
) -> EnvironmentPlan:
    name = options.names()[position]
    file = options.files[position]
    folder = paths.output / ENVIRONMENTS_NAME / name
    settings: dict[str, Any] = {
        "wandb_name": name,
        "max_token_length": max_token_length,
        "data_dir_to_save_evals": str(folder / "evaluations"),
    }
    if len(options.files) > 1:
        settings["min_batch_allocation"] = share
        settings["inference_weight"] = file.weight
    return EnvironmentPlan(
        program=file.program(Path(options.working_folder)),
        folder=folder,
        name=name,
        settings=settings,
        flags=options.flags_of(name),
        num_servers=facts.num_servers,
        is_evaluated=facts.is_evaluated and options.evaluates,
    )


def _engine_flags(engine: EngineKind, machine: Machine, placement: GpuPlacement) -> tuple[str, ...]:
    if not machine.gpus:
        own = ("--device", "cpu") if engine == "torch" else ("--enforce-eager",)
        return ("--dtype", "float32", *own, "--max-num-seqs", "256")
    # As the trainer's forward passes; the type of the weights on disk may differ.
    dtype = ("--dtype", "bfloat16") if machine.has_bfloat16 else ()
    return (*dtype, "--gpu-memory-utilization", str(placement.engine_share))


def _engine_variables(
    machine: Machine, placement: GpuPlacement, *, is_tiny: bool
) -> dict[str, str]:
    if machine.gpus:
        return _visible(placement.engine, machine)
    return {} if is_tiny else {"VLLM_CPU_KVCACHE_SPACE": "4"}


def _trainer_flags(
    options: TrainOptions, context: int, *, is_tiny: bool, on_gpu: bool
) -> tuple[str, ...]:
    flags: dict[str, Any] = {
        "lr": options.lr or (2e-4 if is_tiny else 1e-6),
        "warmup-steps": options.warmup_steps,
        "microbatch-tokens": max(context, 8192 if on_gpu or is_tiny else 2048),
        "device": "cuda" if on_gpu else "cpu",
    }
    if is_tiny:
        flags |= {"weight-decay": 0.0, "optimizer": "adamw", "pad-multiple": 8}
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    if is_tiny:
        arguments.append("--no-gradient-checkpointing")
    return tuple(arguments)


def _thread_variables(machine: Machine, *, is_tiny: bool) -> dict[str, str]:
    if machine.gpus:
        return {}
    # Several processes share the cores.
    return {"OMP_NUM_THREADS": "1" if is_tiny else str(max(1, machine.num_cores // 2))}


def _speed_notes(model: ModelFacts, plan: RunPlan, machine: Machine, *, is_tiny: bool) -> list[str]:
    if machine.gpus or is_tiny:
        return []
    tokens = plan.sequences_per_step * plan.context_tokens / 2
    work = tokens * model.num_parameters * _FLOPS_PER_PARAMETER_AND_TOKEN
    step_s = work / (machine.num_cores * _FLOPS_PER_CORE)
    return [
        f"no GPU: a step takes about {_duration(step_s)} on {machine.num_cores} cores (a rough "
        f"estimate for {model.num_parameters / 1e6:,.0f} million parameters), all {plan.steps} "
        f"steps {_duration(step_s * plan.steps)}; fewer --steps, --groups-per-step or "
        "--env.max_token_length take less"
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} seconds"
