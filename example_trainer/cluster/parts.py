"""The processes of a run file: names, commands, resources and order; pure.

    service ──► engines ──► environments, trainer        (`Part.after`)

Every placement chooses `Addresses`, calls `plan_parts` and starts the parts where it runs. The
same command starts a part and starts it again: the service continues its `--run`, the trainer its
checkpoints (`--resume-or-start`), and an environment registers again. A trainer of another program
has the flags of the file only, and resumes by its own means.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from atroposlib.adapters.registry import KINDS
from atroposlib.errors import ConfigError
from example_trainer.cluster.run_file import (
    EngineSection,
    EnvironmentSection,
    Flags,
    PartResources,
    RestartFields,
    RunFile,
)
from example_trainer.cluster.run_secrets import PROGRAM as FILLING_PROGRAM
from example_trainer.cluster.run_secrets import reference_in, references_of
from example_trainer.launch.options import EnvironmentPlan, RunPaths, RunPlan
from example_trainer.launch.stack import (
    engine_arguments,
    engine_variables,
    environment_sections,
    trainer_flags,
)

Role = Literal["service", "engine", "environment", "trainer"]
SERVICE_RUN = "run"
"""Name of the run in the service's own folder."""
TOKEN_VARIABLE = "ATROPOS_API_TOKEN"
TRAINER_MODULE = "example_trainer.grpo"
CHECKING_MODULE = "example_trainer.launch.check_trainer"
DESCRIBING_MODULE = "atroposlib.envs.describe_script"
RENDEZVOUS_PORT = 29500
_OWN_VALUES = {"model", "steps", "sequences_per_step", "context_tokens", "seed"}
"""Settings of the trainer that flags of another program may name."""
ENVIRONMENT_EXPIRY_S = 30.0
"""Seconds without a request after which the service counts an environment as disconnected: its next
process registers as another one, and batches would wait for groups of the former."""


@dataclass(frozen=True)
class Resources:
    """Resources of one process; `nodes` hosts with these resources each."""

    gpus: int = 0
    cpus: float | None = None
    memory_gib: float | None = None
    nodes: int = 1


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts of one part."""

    attempts: int
    first_backoff_s: float
    longest_backoff_s: float
    healthy_s: float
    unresponsive_s: float = 120.0

    def backoff_s(self, attempt: int) -> float:
        """Return the seconds before restart number `attempt`, from 0."""
        return min(self.longest_backoff_s, self.first_backoff_s * 2.0 ** min(attempt, 32))


@dataclass(frozen=True)
class Part:
    """One process of a run, for any placement."""

    name: str
    """Unique, a DNS label, such as `engine-0` or `environment-gsm8k`."""
    role: Role
    command: tuple[str, ...]
    """Program and arguments; the same for a start and a restart."""
    variables: Mapping[str, str]
    """Environment variables in addition to those of the placement; no secrets."""
    resources: Resources
    ready_url: str | None
    """Address that answers 200 once the part serves; None for parts that serve nothing."""
    after: tuple[str, ...]
    """Names of the parts that have to be ready before its start."""
    restarts: RestartPolicy
    secrets: Mapping[str, str] = field(default_factory=dict)
    """By variable, the name of the secret; the placement looks its value up."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of the settings files in `Addresses.settings` by name; secrets as `${NAME}`."""
    port: int | None = None
    """Port that it listens on."""
    progress_file: Path | None = None
    """File that grows with its work, on a disk of the supervisor."""
    stall_limit_s: float | None = None
    """Seconds without growth of that file after which the part has failed."""
    check: tuple[str, ...] = ()
    """Arguments of `command[0]` that check the settings and start nothing; () if none can."""


@dataclass(frozen=True)
class Addresses:
    """Where the parts of a run are, chosen by a placement."""

    hosts: Mapping[str, str]
    """Host by part name, as the other parts reach it; services and engines are required."""
    ports: Mapping[str, int]
    """Port by part name, of services and engines."""
    output: Path
    """Output folder, as every part sees it; checkpoints and weights for engines are there."""
    settings: Path
    """Folder of `Part.files`, as their part sees it."""
    bind: str = "127.0.0.1"
    """Address that services and engines listen on."""
    python: str = "python"
    """Python program of the parts."""

    def url(self, part: str) -> str:
        return f"http://{self.hosts[part]}:{self.ports[part]}"


def service_names(run: RunFile) -> list[str]:
    """Return the names of the services."""
    return _numbered("service", run.service.replicas)


def engine_names(run: RunFile) -> list[str]:
    """Return the names of the engines to start, in the order of the file."""
    return [name for name, _ in _engines(run)]


def environment_names(run: RunFile) -> list[str]:
    """Return the names of the environments, in the order of the file."""
    return [name for name, _ in _environments(run)]


def part_names(run: RunFile) -> list[str]:
    """Return the names of all parts."""
    return [*service_names(run), *engine_names(run), *environment_names(run), "trainer"]


def plan_parts(run: RunFile, addresses: Addresses) -> tuple[Part, ...]:
    """Return the parts of a run in the order of their start; the trainer is the last.

    Raises:
        ConfigError: Two parts have one name.
    """
    paths = RunPaths(addresses.output)
    services = [_service(run, paths, addresses, name) for name in service_names(run)]
    engines = [_engine(run, addresses, name, section) for name, section in _engines(run)]
    servers = tuple(part.name for part in [*services, *engines])
    environments = [
        _environment(run, paths, addresses, number, servers)
        for number in range(len(_environments(run)))
    ]
    parts = (*services, *engines, *environments, _trainer(run, paths, addresses, servers))
    counts = Counter(part.name for part in parts)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(
            f"two parts are named {twice[0]}; change the name of an engine or environment"
        )
    return parts


def flag_words(flags: Flags, *, booleans: Literal["values", "switches"]) -> list[str]:
    """Return flags as words of a command line.

    `booleans`: `--name=true`, as environments take them, or `--name` and `--no-name`.
    """
    words: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, bool) and booleans == "switches":
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(_word, value)]
        else:
            words.append(f"--{name}={_word(value)}")
    return words


def shell_command(part: Part) -> str:
    """Return the command with its variables as one line for a shell."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in part.variables.items()]
    secrets = [f'{name}="${{{secret}}}"' for name, secret in part.secrets.items()]
    return " ".join([*variables, *secrets, shlex.join(part.command)])


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _numbered(label: str, count: int) -> list[str]:
    return [label] if count == 1 else [f"{label}-{number}" for number in range(count)]


def _engines(run: RunFile) -> list[tuple[str, EngineSection]]:
    return [
        (f"{section.name or 'engine'}-{number}", section)
        for section in run.engines
        if section.kind != "url"
        for number in range(section.count)
    ]


def _environments(run: RunFile) -> list[tuple[str, EnvironmentSection]]:
    return [
        (name, section)
        for section in run.environments
        for name in _numbered(f"environment-{section.label}", section.count)
    ]


def _engine_urls(run: RunFile, addresses: Addresses) -> list[str]:
    running = [url for section in run.engines if section.kind == "url" for url in section.urls]
    return [*(addresses.url(name) for name in engine_names(run)), *running]


def _plan(run: RunFile, section: EngineSection | None = None) -> RunPlan:
    """Return the run in the form of `atropos-train`, whose commands it shares."""
    trainer = run.trainer
    kinds = {each.kind for each in run.engines if each.kind != "url"}
    return RunPlan(
        model=trainer.model,
        environments=(),
        steps=trainer.steps,
        sequences_per_step=trainer.sequences_per_step,
        context_tokens=trainer.context_tokens,
        seed=trainer.seed,
        on_gpu=section is not None and section.num_gpus > 0,
        engine="torch" if kinds == {"torch"} else "vllm",
        engine_flags=() if section is None else tuple(_engine_words(section)),
        engine_variables={} if section is None else section.variables,
    )


def _engine_words(section: EngineSection) -> list[str]:
    parallel = ["--tensor-parallel-size", str(section.tensor_parallel)]
    words = parallel if section.tensor_parallel > 1 else []
    return [*words, *flag_words(section.flags, booleans="switches")]


def _resources(section: PartResources, gpus: int = 0, nodes: int = 1) -> Resources:
    return Resources(gpus=gpus, cpus=section.cpus, memory_gib=section.memory_gib, nodes=nodes)


def _restarts(fields: RestartFields) -> RestartPolicy:
    return RestartPolicy(**fields.model_dump())


def _variables(run: RunFile, own: Mapping[str, str]) -> dict[str, str]:
    # Logs are read while they are written.
    return {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **run.variables,
        **own,
    }


def _tokens(run: RunFile, role: Literal["environment", "trainer"]) -> dict[str, str]:
    secret = run.service.tokens.get(role)
    return {} if secret is None else {TOKEN_VARIABLE: secret}


def _with_secrets(part: Part, secrets: Mapping[str, str]) -> Part:
    """Return the part with its references and `secrets` as secrets instead of variables."""
    found = {name: reference_in(value) for name, value in part.variables.items()}
    references = {name: secret for name, secret in found.items() if secret is not None}
    every = {**references, **secrets}
    plain = {name: value for name, value in part.variables.items() if name not in every}
    return replace(part, variables=plain, secrets=every)


def _service(run: RunFile, paths: RunPaths, addresses: Addresses, name: str) -> Part:
    section = run.service
    port = addresses.ports[name]
    store = ["--data-dir", str(section.data_dir or paths.service_data)]
    if section.redis_url is not None:
        store = ["--store", section.redis_url]
    # Redis is shared with other runs, a folder is not.
    run_name = SERVICE_RUN if section.redis_url is None else run.name
    words = ["--host", addresses.bind, "--port", str(port), *store]
    words += ["--run", run_name]
    words += ["--new-run"] if section.redis_url else []
    words += ["--token-file", str(section.token_file)] if section.token_file else []
    words += ["--allowed-host", addresses.hosts[name]] if addresses.bind != "127.0.0.1" else []
    # The share of an environment that was killed is free before the next one has started.
    flags = {"env-expiry-s": ENVIRONMENT_EXPIRY_S, **section.flags}
    words += flag_words(flags, booleans="switches")
    part = Part(
        name=name,
        role="service",
        command=(addresses.python, "-m", "atroposlib.cli.run_api", *words),
        variables=_variables(run, {}),
        resources=_resources(section),
        ready_url=f"{addresses.url(name)}/health/ready",
        after=(),
        restarts=_restarts(run.restarts),
        port=port,
    )
    return _with_secrets(part, {})


def _engine(run: RunFile, addresses: Addresses, name: str, section: EngineSection) -> Part:
    plan = _plan(run, section)
    port = addresses.ports[name]
    words = engine_arguments(plan, port=port, host=addresses.bind)
    if section.kind == "torch" and addresses.bind != "127.0.0.1":
        words.append("--allow-remote-updates")
    part = Part(
        name=name,
        role="engine",
        command=(addresses.python, *words),
        variables=_variables(run, engine_variables(plan, run.variables)),
        resources=_resources(section, section.num_gpus),
        ready_url=f"{addresses.url(name)}/health",
        after=(),
        restarts=_restarts(run.restarts),
        port=port,
    )
    return _with_secrets(part, {})


def _environment(
    run: RunFile, paths: RunPaths, addresses: Addresses, number: int, servers: Sequence[str]
) -> Part:
    name, section = _environments(run)[number]
    file = f"{name}.yaml"
    sections = _environment_settings(run, paths, addresses, number)
    place = str(addresses.settings / file)
    program = _program(section.program)
    flags = ["--config", place, *flag_words(section.flags, booleans="values")]
    references = references_of(sections)
    filling = ["-m", FILLING_PROGRAM, place] if references else []
    part = Part(
        name=name,
        role="environment",
        command=(addresses.python, *filling, *program, "serve", *flags),
        variables=_variables(run, section.variables),
        resources=_resources(section, section.gpus),
        ready_url=None,
        after=tuple(servers),
        restarts=_restarts(section.restarts or run.restarts),
        files={file: yaml.safe_dump(sections, sort_keys=False)},
        check=(*filling, "-m", DESCRIBING_MODULE, *program, *flags),
    )
    secrets = {name: name for name in references}
    return _with_secrets(part, {**secrets, **_tokens(run, "environment")})


def _program(program: str) -> tuple[str, ...]:
    return ("-m", "atroposlib.cli.env", program) if is_task_set(program) else (program,)


def is_task_set(program: str) -> bool:
    """Whether a program is KIND:NAME of a task set, instead of the file of an environment."""
    return program.partition(":")[0] in KINDS and not program.endswith(".py")


def is_file(program: str) -> bool:
    """Whether the program of a trainer is a file, instead of a module."""
    return program.endswith(".py")


def _environment_settings(
    run: RunFile, paths: RunPaths, addresses: Addresses, number: int
) -> dict[str, object]:
    name, section = _environments(run)[number]
    services, engines = service_names(run), _engine_urls(run, addresses)
    plan = EnvironmentPlan(
        program=_program(section.program),
        folder=paths.output / name,
        name=name,
        settings={"rollout_grace_s": 10.0, **_share(section)},
        sections=section.settings,
    )
    sections = environment_sections(
        _plan(run),
        plan,
        engine_url=engines[0],
        service_url=addresses.url(services[number % len(services)]),
    )
    copies = max(len(engines), section.servers)
    if copies > 1:
        sections["openai"] = [
            {**sections["openai"], "base_url": f"{engines[copy % len(engines)]}/v1"}
            for copy in range(copies)
        ]
    return sections


def _share(section: EnvironmentSection) -> dict[str, float]:
    """Return the settings of an environment's weight and its processes' reserved share."""
    settings = {"inference_weight": section.weight / section.count}
    if section.min_share is not None:
        settings["min_batch_allocation"] = section.min_share / section.count
    return settings


def _trainer(run: RunFile, paths: RunPaths, addresses: Addresses, servers: Sequence[str]) -> Part:
    section = run.trainer
    is_other = section.program is not None
    words = _own_words(run, addresses) if is_other else _grpo_words(run, paths, addresses)
    part = Part(
        name="trainer",
        role="trainer",
        command=(addresses.python, *_launcher(run, addresses), *words),
        variables=_variables(run, section.variables),
        resources=_resources(section, section.gpus, section.nodes),
        ready_url=None,
        after=tuple(servers),
        restarts=_restarts(run.restarts),
        progress_file=paths.logs / "trainer.log" if is_other else paths.trainer_metrics,
        stall_limit_s=section.stall_limit_s,
        check=() if is_other else ("-m", CHECKING_MODULE, *words),
    )
    return _with_secrets(part, _tokens(run, "trainer"))


def _grpo_words(run: RunFile, paths: RunPaths, addresses: Addresses) -> list[str]:
    flags = trainer_flags(_plan(run), paths, service_url=addresses.url(service_names(run)[0]))
    words = [f"--{name}={value}" for name, value in flags.items()]
    words += ["--engine-urls", *_engine_urls(run, addresses), "--resume-or-start", "--replace-run"]
    return [*words, "--quiet", *flag_words(run.trainer.flags, booleans="switches")]


def _own_words(run: RunFile, addresses: Addresses) -> list[str]:
    """Return the flags of another trainer, with the values of the run for names in braces."""
    urls = _engine_urls(run, addresses)
    values = run.trainer.model_dump(include=_OWN_VALUES) | {
        "service_url": addresses.url(service_names(run)[0]),
        "engine_url": urls[0],
        "engine_urls": ",".join(urls),
        "output": addresses.output,
    }
    words: list[str] = []
    for word in flag_words(run.trainer.flags, booleans="switches"):
        filled = re.sub(
            r"(?<!\$)\{(\w+)\}", lambda found: str(values.get(found[1], found[0])), word
        )
        words += urls if word == "{engine_urls}" else [filled]
    return words


def _launcher(run: RunFile, addresses: Addresses) -> list[str]:
    """Return the program of the trainer: under torchrun if it has several processes."""
    section = run.trainer
    program = section.program or TRAINER_MODULE
    start = [program] if is_file(program) else ["-m", program]
    if section.nodes == 1 and section.gpus <= 1:
        return start
    words = ["-m", "torch.distributed.run", f"--nnodes={section.nodes}"]
    words.append(f"--nproc-per-node={max(1, section.gpus)}")
    if section.nodes == 1:
        words.append("--standalone")
    else:
        endpoint = f"{addresses.hosts['trainer']}:{RENDEZVOUS_PORT}"
        words += ["--rdzv-backend=c10d", f"--rdzv-id={run.name}", f"--rdzv-endpoint={endpoint}"]
    return [*words, *start]
