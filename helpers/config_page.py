"""Write `CONFIG.md` from the settings classes: `python -m helpers.config_page > CONFIG.md`."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from typing import NamedTuple

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atroposlib.api.settings import ApiSettings
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.evaluation import EvaluationConfig
from atroposlib.envs.server_handling.config import APIServerConfig, ServerManagerConfig
from atroposlib.envs.settings import describe_type, shown_default
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig
from example_trainer.cluster.run_file import (
    EngineSection,
    EnvironmentSection,
    KubernetesSection,
    RaySection,
    RestartFields,
    RunFile,
    ServiceSection,
    SlurmSection,
    TrainerSection,
)
from example_trainer.config import TrainingConfig

__all__ = ["ENVIRONMENT_VARIABLES", "SECTIONS", "Section", "config_page"]


class Section(NamedTuple):
    """One table of the page."""

    title: str
    model: type[BaseModel]
    intro: str
    base: type[BaseModel] = BaseModel
    """Class with a table of its own, whose fields are left out of this one."""


SECTIONS = (
    Section(
        "Environment",
        BaseEnvConfig,
        "Flags `--env.<name>` and section `env:` of the YAML file. Environments add fields and "
        "change defaults: `python <environment>.py --help all` lists those of one environment.",
    ),
    Section(
        "Inference server",
        APIServerConfig,
        "Flags `--openai.<name>` and section `openai:`. A mapping is one server, a list with "
        "several entries configures several servers, which flags cannot change.",
    ),
    Section(
        "Server manager",
        ServerManagerConfig,
        "Flags `--<name>` and top-level keys of the YAML file.",
    ),
    Section(
        "Evaluation",
        EvaluationConfig,
        "Additional flags `--env.<name>` of environments that subclass `SingleTurnEnv` or "
        "`MultiTurnEnv`; see [evaluations.md](docs/evaluations.md).",
        base=BaseEnvConfig,
    ),
    Section(
        "Teacher",
        TeacherDistillationConfig,
        "Additional flags `--env.<name>` of environments that subclass `TeacherDistillationEnv`. "
        "The teacher's servers have the settings of an inference server, as flags "
        "`--teacher.<name>` of `serve` and section `teacher:`.",
        base=BaseEnvConfig,
    ),
    Section(
        "Trajectory service",
        ApiSettings,
        "Arguments of `create_app(ApiSettings(...))`; `run-api --help` lists the flags.",
    ),
    Section(
        "Trainer",
        TrainingConfig,
        "Flags `--<name>` of `atropos-grpo`, with hyphens for underscores.",
    ),
    Section("Run file", RunFile, "The file of `atropos-up`; see [SLURM.md](SLURM.md)."),
    Section("Run file: service", ServiceSection, "Section `service:`."),
    Section("Run file: engines", EngineSection, "Each entry of the list `engines:`."),
    Section(
        "Run file: environments", EnvironmentSection, "Each entry of the list `environments:`."
    ),
    Section("Run file: trainer", TrainerSection, "Section `trainer:`."),
    Section(
        "Run file: restarts", RestartFields, "Section `restarts:`, of a run or an environment."
    ),
    Section("Run file: Slurm", SlurmSection, "Section `slurm:`."),
    Section("Run file: Kubernetes", KubernetesSection, "Section `kubernetes:`."),
    Section("Run file: Ray", RaySection, "Section `ray:`."),
)

ENVIRONMENT_VARIABLES = {
    # pragma: allowlist nextline secret
    "OPENAI_API_KEY": "Key of the official OpenAI endpoint, if `api_key` is empty; key of the "
    "server of the shipped evaluations, and of their judge.",
    # pragma: allowlist nextline secret
    "ANTHROPIC_API_KEY": "Key of the judge of Arena-Hard (`judge_api_key_env`).",
    "OPENAI_BASE_URL": "Address of the inference server, if `base_url` is empty.",
    # pragma: allowlist nextline secret
    "ATROPOS_API_TOKEN": "Token that environments and the trainer send to a trajectory service "
    "that requires one.",
    "ATROPOS_PROXY_URL": "Managed-server proxy, when `proxy_url` is not given.",
    # pragma: allowlist nextline secret
    "ATROPOS_PROXY_KEY": "Administrator's key of that proxy, if it requires one.",
    "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "`1` gives sessions at a server of type openai "
    "placeholder tokens instead of those of its texts: for tests of environments; exports and "
    "trainers reject them.",
    "ATROPOS_DEBUG_REQUESTS": "`1` logs every request to an inference server.",
    "ATROPOS_SANDBOX": "Kind of sandbox for programs written by a model, if no setting names it: "
    "bubblewrap, container or gvisor. The default is bubblewrap.",
    "ATROPOS_SANDBOX_UNBOUNDED_MEMORY": "`1` also runs such programs if their memory cannot be "
    "limited: no control group can be written and system calls cannot be filtered.",
    "ATROPOS_TRACING": "Destination of the spans of a program (docs/telemetry.md): `otlp`, "
    "`file:PATH` or `console`. The default is `off`.",
    "ATROPOS_TRACE_URL": "Address at which `view-run` links a group to its trace, with "
    "`{trace_id}` in it.",
    "XDG_CACHE_HOME": "Folder of caches instead of `~/.cache`: bases of workspaces, and the last "
    "published weights.",
    "NO_PROXY": "Hosts that are reached without the proxy of `HTTP_PROXY`, `HTTPS_PROXY` or "
    "`ALL_PROXY`; commands add this machine.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "Address of the collector for `ATROPOS_TRACING=otlp`; "
    "`http://localhost:4318` by default.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "Address of its route for traces, if that is not "
    "`/v1/traces`.",
    # pragma: allowlist nextline secret
    "OTEL_EXPORTER_OTLP_HEADERS": "Further headers for it, as `name=value,name=value`.",
    # pragma: allowlist nextline secret
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "The same for traces only; takes precedence.",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "`grpc` is refused: spans are sent over HTTP.",
    "OTEL_SERVICE_NAME": "Name of the program in its spans.",
    "OTEL_RESOURCE_ATTRIBUTES": "Further attributes of the program in its spans, as "
    "`rl.run.name=first,deployment.environment.name=lab`.",
    "OTEL_TRACES_SAMPLER": "`always_on`, `always_off` or `traceidratio`, which records a fraction "
    "of all items; by default all, up to 200 spans per second of each program.",
    "OTEL_TRACES_SAMPLER_ARG": "That fraction, from 0 to 1.",
    "OTEL_SDK_DISABLED": "`true` turns spans off.",
    "ATROPOS_TASK_VARIABLES": "Names of variables of this machine, separated by commas, that "
    "`task.toml` may name as `${NAME}`; none by default.",
    "ATROPOS_WORKSPACES_DIR": "Folder of prepared workspaces of agents, on a local disk; "
    "`~/.cache/atropos/workspaces` by default.",
    "SLURM_JOB_NODELIST": "Nodes of the Slurm job, where servers are discovered.",
    "NUM_TRAINING_NODES": "Number of nodes at the start of that list that train; the others serve "
    "inference.",
    "INFER_TP": "GPUs per inference server on those nodes; 1 by default.",
    "GPUS_PER_NODE": "GPUs of each of those nodes; 8 by default.",
    "WANDB_MODE": "Read by W&B: `offline` writes to disk only, `disabled` writes nothing.",
    "HF_HUB_OFFLINE": "Read by Hugging Face: `1` uses local files only. Set to that if the hub's "
    "host is not found, for this process and those it starts; `0` prevents it.",
    "HF_ENDPOINT": "Read by Hugging Face: address of the hub; `https://huggingface.co` by default.",
}
"""Every environment variable the library reads, itself or through the OpenAI client, W&B and
Hugging Face."""

INTRO = """# Configuration

This page is generated from the settings classes; change their descriptions, then run
`python -m helpers.config_page > CONFIG.md`.

An environment script takes its settings from four places; later ones take precedence:

1. the defaults below,
2. the environment's own defaults (`config_init`) and those of the command: `process`
   sets `ensure_scores_are_not_same: false`, `include_messages: true`, `use_wandb: true` and an
   output file, `evaluate` sets `use_wandb: true`,
3. the YAML file given with `--config`,
4. flags.

Every flag takes a value, booleans too: `--env.use_wandb false`. Only `--quiet` needs none: with it,
`serve` and `process` write plain log lines instead of a live view. A list takes several words or
one JSON array, a mapping takes one JSON object, `None` clears an optional setting. Names
are written in full, except that `env.` and `openai.` may be omitted if the rest is unambiguous:
`--group_size 8`, `--model_name NAME`; `--tokenizer_name` is the environment's. Unknown flags are
errors, and so are names in the file that resemble a setting. Other names in the file cause a
warning, and those under `env:` become attributes of the config.

```yaml
env:
  group_size: 8
  tokenizer_name: Qwen/Qwen3-0.6B
openai:
  - model_name: Qwen/Qwen3-0.6B
    base_url: http://localhost:9001/v1
    server_type: vllm
slurm: false
testing: false
```
"""


def config_page() -> str:
    """Return the page as Markdown."""
    return "\n".join([INTRO, *_sections(), _variables()])


def _sections() -> Iterator[str]:
    for section in SECTIONS:
        rows = [
            _row(field_name, field)
            for field_name, field in section.model.model_fields.items()
            if not field.exclude and field_name not in section.base.model_fields
        ]
        yield "\n".join(
            [
                f"## {section.title}",
                "",
                f"`{section.model.__name__}`. {section.intro}",
                "",
                "| name | value | default | bounds | meaning |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
        )


def _row(name: str, field: FieldInfo) -> str:
    cells = [
        f"`{name}`",
        _type(field),
        _default(name, field),
        _bounds(field),
        # Outside code spans, `<name>` would be an HTML tag.
        (field.description or "").replace("<", r"\<"),
    ]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _type(field: FieldInfo) -> str:
    return "section" if _is_section(field) else describe_type(field.annotation)


def _is_section(field: FieldInfo) -> bool:
    """Whether a field is a section, or a list of them, with a table of its own."""
    kinds = [field.annotation, *typing.get_args(field.annotation)]
    tables = {section.model for section in SECTIONS}
    return any(isinstance(kind, type) and kind in tables for kind in kinds)


def _default(name: str, field: FieldInfo) -> str:
    if _is_section(field):
        return "required" if field.is_required() else "its defaults"
    # A factory other than that of an empty container depends on the machine.
    if field.default_factory not in (None, list, dict, set, tuple):
        return "found at start"
    shown = shown_default(name, field.get_default(call_default_factory=True))
    return "required" if shown is None else f"`{shown}`"


def _bounds(field: FieldInfo) -> str:
    parts = []
    for limit in field.metadata:
        if isinstance(limit, annotated_types.Ge):
            parts.append(f"≥ {limit.ge}")
        elif isinstance(limit, annotated_types.Gt):
            parts.append(f"> {limit.gt}")
        elif isinstance(limit, annotated_types.Le):
            parts.append(f"≤ {limit.le}")
        elif isinstance(limit, annotated_types.Lt):
            parts.append(f"< {limit.lt}")
        elif isinstance(limit, annotated_types.MinLen) and limit.min_length == 1:
            parts.append("not empty")
    return ", ".join(parts)


def _variables() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in ENVIRONMENT_VARIABLES.items()]
    return "\n".join(["## Environment variables", "", "| name | meaning |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(config_page())
