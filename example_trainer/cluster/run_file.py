"""The run file of `atropos-up`: service, engines, environments, trainer and where they run.

    run.yaml ─► read_run_file ─► RunFile ─► plan_parts ─► local, slurm, kubernetes, ray_cluster

Relative paths are relative to `folder`, which is relative to the folder of the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from atroposlib.errors import ConfigError
from atroposlib.utils.text import MASK, inert_line, mask_secrets, near_name
from atroposlib.utils.yaml_text import describe_yaml, read_with_repeats
from example_trainer.cluster.run_secrets import check_secrets, hide_values, references_of

DNS_LABEL = r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?"
MAX_ENGINES = 4096
MAX_ENVIRONMENTS = 1024
MAX_FILE_BYTES = 2**20
_LARGEST_PORT = 65535
_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"

Name = Annotated[str, StringConstraints(pattern=f"^{DNS_LABEL}$")]
Variable = Annotated[str, StringConstraints(pattern=f"^{_VARIABLE}$")]
FlagValue = bool | int | float | str | list[bool | int | float | str] | dict[str, JsonValue] | None
Flags = dict[str, FlagValue]
"""Flags of a program without their dashes. A list gives several values, a mapping JSON, null leaves
a flag out."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class PartResources(_Section):
    """Resources of one process of a part; a placement without limits ignores them."""

    cpus: float | None = Field(None, gt=0, le=4096, description="CPU cores; none: no request.")
    memory_gib: float | None = Field(
        None, gt=0, le=65536, description="Memory in GiB; none: no request."
    )


class RestartFields(_Section):
    """Number and times of the restarts of a part that failed."""

    attempts: int = Field(
        5,
        ge=0,
        le=100_000,
        description="Maximum number of restarts of one part; `healthy_s` without a failure "
        "give all of them back. 0: the run fails with the first part.",
    )
    first_backoff_s: float = Field(
        1.0, ge=0, le=3600, description="Seconds before the first restart; doubles with each."
    )
    longest_backoff_s: float = Field(
        60.0, ge=0, le=86400, description="Maximum seconds before a restart."
    )
    healthy_s: float = Field(
        600.0, gt=0, le=86400, description="Seconds without a failure that reset the attempts."
    )
    unresponsive_s: float = Field(
        120.0,
        gt=0,
        le=86400,
        description="Seconds without an answer after which a service or engine has failed.",
    )


class ServiceSection(PartResources):
    """The trajectory service."""

    port: int | None = Field(
        None,
        ge=1,
        le=_LARGEST_PORT,
        description="Port; none: a free one locally and on Ray, 8000 elsewhere.",
    )
    store: Literal["sqlite", "redis"] = Field(
        "sqlite", description="Store of the run; redis is needed by several replicas."
    )
    data_dir: Path | None = Field(
        None, description="Folder of the sqlite file; none: `service` in the output folder."
    )
    redis_url: str | None = Field(None, description="Address of the Redis server, without secrets.")
    replicas: int = Field(1, ge=1, le=64, description="Services that share one Redis store.")
    token_file: Path | None = Field(
        None, description="File with the tokens of all roles, as the service sees it."
    )
    tokens: dict[Literal["environment", "trainer"], Variable] = Field(
        default_factory=dict,
        description="By role, the name of the variable of `atropos-up` (on Kubernetes, the key of "
        "the secret) that holds the token.",
    )
    flags: Flags = Field(default_factory=dict, description="Further flags of run-api.")

    @model_validator(mode="after")
    def _check_store(self) -> ServiceSection:
        if (self.store == "redis") != (self.redis_url is not None):
            raise ValueError("store: redis and redis_url belong together; give both or neither")
        if self.replicas > 1 and self.store != "redis":
            raise ValueError("replicas above 1 need store: redis and redis_url")
        if self.port is not None and self.port + self.replicas - 1 > _LARGEST_PORT:
            raise ValueError(
                f"replicas have consecutive ports: expected a port up to "
                f"{_LARGEST_PORT + 1 - self.replicas} for {self.replicas} replicas, got {self.port}"
            )
        return self


class EngineSection(PartResources):
    """Inference engines that are alike."""

    name: Name | None = Field(None, description="Name for parts and logs; none: engine.")
    kind: Literal["vllm", "torch", "url"] = Field(
        "vllm", description="Program; url: engines that run already."
    )
    urls: list[str] = Field(
        default_factory=list,
        max_length=MAX_ENGINES,
        description="Addresses of running engines without /v1, for kind url.",
    )
    count: int = Field(1, ge=1, le=MAX_ENGINES, description="Number of engines.")
    tensor_parallel: int = Field(1, ge=1, le=64, description="GPUs of one engine's tensors (vllm).")
    gpus: int | None = Field(
        None, ge=0, le=64, description="GPUs of one engine; none: tensor_parallel, 0 for torch."
    )
    flags: Flags = Field(default_factory=dict, description="Further flags of the engine.")
    variables: dict[Variable, str] = Field(
        default_factory=dict, description="Environment variables; secrets as `${NAME}`."
    )

    @property
    def num_gpus(self) -> int:
        """GPUs of one engine."""
        if self.gpus is not None:
            return self.gpus
        return self.tensor_parallel if self.kind == "vllm" else 0

    @model_validator(mode="after")
    def _check_kind(self) -> EngineSection:
        if (self.kind == "url") != bool(self.urls):
            raise ValueError("kind: url and urls belong together; give both or neither")
        if self.kind == "torch" and self.tensor_parallel > 1:
            raise ValueError("tensor_parallel above 1 needs kind: vllm")
        if self.gpus and self.gpus < self.tensor_parallel:
            raise ValueError(f"gpus is {self.gpus}; expected at least tensor_parallel")
        return self


class EnvironmentSection(PartResources):
    """One environment, in one or several processes."""

    program: str = Field(
        min_length=1,
        max_length=4096,
        description="File of the environment, or KIND:NAME of a task set of another library.",
    )
    name: Name | None = Field(None, description="Name for parts and logs; none: from program.")
    settings: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Settings by section of the environment's YAML file, such as env and openai; "
        "secrets as `${NAME}`, under keys such as `api_key`.",
    )
    flags: Flags = Field(
        default_factory=dict, description="Flags such as env.group_size; precede `settings`."
    )
    variables: dict[Variable, str] = Field(
        default_factory=dict, description="Environment variables; secrets as `${NAME}`."
    )
    count: int = Field(1, ge=1, le=MAX_ENVIRONMENTS, description="Number of processes.")
    weight: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="Share of the inference capacity, relative to the others. The share of a batch "
        "is set by min_share.",
    )
    min_share: float | None = Field(
        None, gt=0, le=1, description="Part of every batch reserved for all its processes."
    )
    gpus: int = Field(0, ge=0, le=64, description="GPUs of one process.")
    servers: int = Field(
        1, ge=1, le=64, description="Inference servers that its own defaults list."
    )
    restarts: RestartFields | None = Field(
        None, description="Restarts of this environment; none: those of the run."
    )

    @property
    def label(self) -> str:
        """Name of its parts without the number."""
        if self.name is not None:
            return self.name
        stem = Path(self.program).stem if self.program.endswith(".py") else self.program
        return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-") or "task"


class TrainerSection(PartResources):
    """The trainer of `example_trainer`, or a program that takes batches itself."""

    program: str | None = Field(
        None,
        pattern=r"\S",
        max_length=4096,
        description="Python file, or module, of another trainer; none: the example trainer.",
    )

    model: str = Field(
        min_length=1, max_length=4096, description="Hub name or folder, for all parts."
    )
    steps: int = Field(ge=1, le=10**9, description="Optimizer steps of the whole run.")
    sequences_per_step: int = Field(64, ge=1, le=10**6, description="Sequences of one step.")
    context_tokens: int = Field(2048, ge=2, le=10**8, description="Tokens of one sequence.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Seed of trainer and engines.")
    gpus: int = Field(0, ge=0, le=64, description="GPUs on each node; 0: one process on the CPU.")
    nodes: int = Field(1, ge=1, le=2048, description="Nodes, under torchrun.")
    stall_limit_s: float | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Seconds without a step (of `program`: a line of its log), its start included, "
        "after which the trainer is started again; none: never. For local and Slurm runs.",
    )
    flags: Flags = Field(
        default_factory=dict,
        description="Further flags of atropos-grpo, or all flags of `program`. In the latter, "
        "`{service_url}`, `{engine_url}`, `{engine_urls}`, `{output}`, `{model}`, `{steps}`, "
        "`{sequences_per_step}`, `{context_tokens}` and `{seed}` stand for values of the run; "
        "`['{engine_urls}']` gives one word per engine.",
    )
    variables: dict[Variable, str] = Field(
        default_factory=dict, description="Environment variables; secrets as `${NAME}`."
    )


class SlurmSection(_Section):
    """Settings of Slurm only."""

    partition: str | None = Field(None, max_length=256, description="Partition of the job.")
    account: str | None = Field(None, max_length=256, description="Account that is charged.")
    time: str | None = Field(
        None, pattern=r"^[0-9:-]{1,32}$", description="Time limit, such as '24:00:00'."
    )
    gpus_per_node: int = Field(8, ge=0, le=64, description="GPUs of a node.")
    inference_nodes: int | None = Field(
        None, ge=1, le=4096, description="Nodes of the engines; none: as few as have the GPUs."
    )
    environment_nodes: int = Field(
        0, ge=0, le=1024, description="Nodes for environments only; 0: on the first trainer node."
    )
    setup: str = Field(
        "", max_length=65536, description="Shell lines before the parts, such as `module load`."
    )
    options: list[str] = Field(
        default_factory=list, max_length=64, description="Further options of sbatch."
    )

    @field_validator("time", mode="before")
    @classmethod
    def _check_time(cls, value: object) -> object:
        if isinstance(value, int):  # YAML reads 24:00:00 as a number of seconds
            raise ValueError("expected a time in quotes, such as '24:00:00'")
        return value


class KubernetesSection(_Section):
    """Settings of Kubernetes only."""

    namespace: Name = Field("default", description="Namespace of all objects.")
    image: str = Field("", max_length=1024, description="Image of the parts, with this package.")
    pull_secret: Name | None = Field(None, description="Secret that pulls the image.")
    token_secret: Name | None = Field(
        None, description="Secret whose keys are the names in service.tokens and in `${NAME}`."
    )
    storage_class: str | None = Field(None, max_length=253, description="Storage class.")
    storage_gib: int = Field(100, ge=1, le=10**6, description="Size of the shared volume in GiB.")
    volume_claim: Name | None = Field(
        None, description="Existing claim for the output folder; none: one is made."
    )
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"] = Field(
        "ReadWriteMany", description="Access mode of the shared volume."
    )
    journal_gib: int = Field(
        20, ge=1, le=10**6, description="Size of the volume of the service's journal in GiB."
    )
    workspaces: bool = Field(
        False, description="Whether environments may make Jobs for their workspaces."
    )
    context: str | None = Field(None, max_length=253, description="Context of kubectl.")
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels of nodes.")
    run_as_user: int = Field(1000, ge=1, le=2**31 - 1, description="User id of the containers.")
    grace_s: int = Field(60, ge=1, le=86400, description="Seconds between SIGTERM and SIGKILL.")


class RaySection(_Section):
    """Settings of Ray only."""

    address: str = Field("auto", max_length=1024, description="Address of the cluster.")
    namespace: Name = Field("atropos", description="Namespace of the actors.")
    resources: dict[str, float] = Field(
        default_factory=dict, description="Further resources that every part asks for."
    )


class RunFile(_Section):
    """One run: what it consists of, and how each placement runs it."""

    name: Name = Field(description="Name of the run: letters, digits and dashes.")
    output: Path = Field(Path("run"), description="Folder of logs, state and checkpoints.")
    folder: Path = Field(Path(), description="Working directory of every part.")
    service: ServiceSection = Field(
        default_factory=ServiceSection, description="The trajectory service."
    )
    engines: list[EngineSection] = Field(
        default_factory=lambda: [EngineSection()],
        min_length=1,
        max_length=64,
        description="Inference engines; none: one vLLM.",
    )
    environments: list[EnvironmentSection] = Field(
        min_length=1, max_length=MAX_ENVIRONMENTS, description="Environments."
    )
    trainer: TrainerSection = Field(description="The trainer, and the model of all parts.")
    variables: dict[Variable, str] = Field(
        default_factory=dict,
        description="Environment variables of every part; secrets as `${NAME}`.",
    )
    restarts: RestartFields = Field(
        default_factory=RestartFields, description="Restarts of every part."
    )
    start_limit_s: float = Field(
        600.0, gt=0, le=86400, description="Maximum seconds for the start of a server."
    )
    slurm: SlurmSection = Field(default_factory=SlurmSection, description="Settings of Slurm only.")
    kubernetes: KubernetesSection = Field(
        default_factory=KubernetesSection, description="Settings of Kubernetes only."
    )
    ray: RaySection = Field(default_factory=RaySection, description="Settings of Ray only.")

    @property
    def secret_names(self) -> list[str]:
        """Names of all secrets that its parts need."""
        names = [*self.service.tokens.values(), *references_of(self.model_dump())]
        return list(dict.fromkeys(names))

    @model_validator(mode="before")
    @classmethod
    def _check_secrets(cls, content: object) -> object:
        check_secrets(content)
        return content

    @model_validator(mode="after")
    def _check_together(self) -> RunFile:
        kinds = {engine.kind for engine in self.engines if engine.kind != "url"}
        if len(kinds) > 1:
            raise ValueError("engines: vllm and torch in one run; expected one kind of program")
        for labels in (
            [engine.name or "engine" for engine in self.engines if engine.kind != "url"],
            [environment.label for environment in self.environments],
        ):
            twice = sorted({label for label in labels if labels.count(label) > 1})
            if twice:
                raise ValueError(f"two entries are named {twice[0]!r}; give each its own name")
        shares = sum(environment.min_share or 0.0 for environment in self.environments)
        if shares > 1:
            raise ValueError(f"the min_share of all environments add up to {shares:g}; at most 1")
        return self


def read_run_file(path: Path) -> RunFile:
    """Read a run file, with `folder` and `output` as absolute paths.

    Raises:
        ConfigError: The file cannot be read, or a key or value is invalid; names file and key.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes; expected a run file")
        content, repeated = read_with_repeats(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected YAML{describe_yaml(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with name, environments and trainer")
    if repeated:
        raise ConfigError(f"{path}: expected each key once, got {', '.join(repeated)}")
    try:
        run = RunFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_problems(error)}") from error
    folder = (path.resolve().parent / run.folder).resolve()
    output = folder / run.output
    if ".." in output.parts:  # other paths keep their links, which may differ between nodes
        output = output.resolve()
    return run.model_copy(update={"folder": folder, "output": output})


def describe_problems(error: ValidationError) -> str:
    """Return one line with the key path of each of the first problems and what was expected."""
    lines = []
    for problem in error.errors()[:5]:
        place = "".join(
            f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"]
        ).lstrip(".")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"is not a key{_suggest(problem['loc'])}"
        elif problem["type"] != "missing" and problem["type"] != "value_error":
            is_named = problem["loc"][:2] == ("service", "tokens")  # may be the token itself
            text = MASK if is_named else hide_values(str(mask_secrets(problem["input"])), ())
            given = inert_line(text, max_characters=60)
            message = f"{message[:1].lower()}{message[1:]}, got {given}"
        elif problem["type"] == "missing":
            message = "is required"
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)


def _suggest(location: tuple[int | str, ...]) -> str:
    """Return a hint with the similar key of the same section."""
    section: type[BaseModel] = RunFile
    for key in location[:-1]:
        field = section.model_fields.get(str(key))
        section = _SECTIONS.get(str(key), section) if field is not None else section
    near = near_name(str(location[-1]), section.model_fields)
    return near or f"; expected one of {', '.join(section.model_fields)}"


_SECTIONS: dict[str, type[BaseModel]] = {
    "service": ServiceSection,
    "engines": EngineSection,
    "environments": EnvironmentSection,
    "trainer": TrainerSection,
    "restarts": RestartFields,
    "slurm": SlurmSection,
    "kubernetes": KubernetesSection,
    "ray": RaySection,
}
