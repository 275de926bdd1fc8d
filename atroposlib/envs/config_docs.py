"""Write `CONFIG.md` from the settings classes: `python -m atroposlib.envs.config_docs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from atroposlib.envs.settings import describe_type, shown_default

__all__ = ["ENVIRONMENT_VARIABLES", "SECTIONS", "Section", "config_page"]


class Section(NamedTuple):
    """One table of the page."""

    title: str
    model: str
    """`module:Class`; a section whose package is not installed is left out."""
    intro: str
    base: str = ""
    """`module:Class` with a table of its own, whose fields are left out of this one."""


SECTIONS = (
    Section(
        "Environment",
        "atroposlib.envs.config:BaseEnvConfig",
        "Flags `--env.<name>` and section `env:` of the YAML file. Environments add fields of "
        "their own and change defaults: `python <environment>.py --help all` lists what holds "
        "there.",
    ),
    Section(
        "Inference server",
        "atroposlib.envs.server_handling.config:APIServerConfig",
        "Flags `--openai.<name>` and section `openai:`. A mapping is one server, a list with "
        "several entries is several servers, which flags cannot change.",
    ),
    Section(
        "Server manager",
        "atroposlib.envs.server_handling.config:ServerManagerConfig",
        "Flags `--<name>` and top-level keys of the YAML file.",
    ),
    Section(
        "Teacher",
        "atroposlib.envs.teacher_distillation_env:TeacherDistillationConfig",
        "Further flags `--env.<name>` of environments that subclass `TeacherDistillationEnv`. The "
        "teacher's servers have the settings of an inference server, as flags `--teacher.<name>` "
        "of `serve` and section `teacher:`.",
        base="atroposlib.envs.config:BaseEnvConfig",
    ),
    Section(
        "Trajectory service",
        "atroposlib.api.settings:ApiSettings",
        "Arguments of `create_app(ApiSettings(...))`; `run-api --help` lists the flags.",
    ),
    Section(
        "Trainer",
        "example_trainer.config:TrainingConfig",
        "Flags `--<name>` of `atropos-grpo`, with hyphens for underscores.",
    ),
)

ENVIRONMENT_VARIABLES = {
    # pragma: allowlist nextline secret
    "OPENAI_API_KEY": "Key of the official OpenAI endpoint, when `api_key` is empty.",
    "OPENAI_BASE_URL": "Address of the inference server, when `base_url` is empty.",
    # pragma: allowlist nextline secret
    "ATROPOS_API_TOKEN": "Token shown to a trajectory service that asks for one, by environments "
    "and by the trainer.",
    "ATROPOS_PROXY_URL": "Managed-server proxy, when `proxy_url` is not given.",
    # pragma: allowlist nextline secret
    "ATROPOS_PROXY_KEY": "Administrator's key of that proxy, where it asks for one.",
    "ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "`1` gives sessions at a server of type openai "
    "placeholder tokens instead of those of its texts: for tests of environments; exports and "
    "trainers refuse them.",
    "ATROPOS_DEBUG_REQUESTS": "`1` logs every request to an inference server.",
    "ATROPOS_SANDBOX": "Kind of sandbox for programs that a model wrote, when no setting names it: "
    "bubblewrap, container or gvisor; bubblewrap when not set.",
    "ATROPOS_SANDBOX_UNBOUNDED_MEMORY": "1 runs such programs where nothing bounds their "
    "memory, too: no control group can be written and system calls cannot be filtered.",
    "SLURM_JOB_NODELIST": "Nodes of the Slurm job, where servers are discovered.",
    "NUM_TRAINING_NODES": "Nodes at the start of that list that train; the others serve inference.",
    "INFER_TP": "GPUs per inference server on those nodes, 1 when not set.",
    "GPUS_PER_NODE": "GPUs of each of those nodes, 8 when not set.",
    "WANDB_MODE": "Read by W&B: `offline` writes to disk only, `disabled` writes nothing.",
    "HF_HUB_OFFLINE": "Read by Hugging Face: `1` uses local files only.",
}
"""Every environment variable the library reads, itself or through the OpenAI client, W&B and
Hugging Face."""

INTRO = """# Configuration

This page is made from the settings classes; change their descriptions, then run
`python -m atroposlib.envs.config_docs > CONFIG.md`.

An environment script takes its settings from four places; later ones win:

1. the defaults below,
2. the environment's own defaults (`config_init`), and what the command itself needs: `process`
   sets `ensure_scores_are_not_same: false`, `include_messages: true`, `use_wandb: true` and an
   output file, `evaluate` sets `use_wandb: true`,
3. the YAML file given with `--config`,
4. flags.

Every flag takes a value, booleans too: `--env.use_wandb false`. Only `--quiet` may stand alone: it
has `serve` and `process` write plain log lines instead of a live view. A list takes several words
or one JSON array, a mapping takes one JSON object, `None` empties an optional setting. Names are
written in full, except that `env.` and `openai.` may be left out where the rest is unambiguous:
`--group_size 8`, `--model_name NAME`; `--tokenizer_name` is the environment's. Unknown flags are
errors, and so are names in the file that resemble a setting;
other names in the file are warned about, and those under `env:` become attributes of the config.

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
    """The whole page as Markdown."""
    parts = [INTRO, *_sections(), _variables()]
    return "\n".join(parts)


def _sections() -> Iterator[str]:
    for section in SECTIONS:
        if find_spec(section.model.partition(".")[0]) is None:
            continue
        model = _model(section.model)
        inherited = _model(section.base).model_fields if section.base else {}
        rows = [
            _row(field_name, field)
            for field_name, field in model.model_fields.items()
            if not field.exclude and field_name not in inherited
        ]
        yield "\n".join(
            [
                f"## {section.title}",
                "",
                f"`{model.__name__}`. {section.intro}",
                "",
                "| name | value | default | bounds | meaning |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
        )


def _model(path: str) -> type[BaseModel]:
    module, _, name = path.partition(":")
    model: type[BaseModel] = getattr(import_module(module), name)
    return model


def _row(name: str, field: FieldInfo) -> str:
    cells = [
        f"`{name}`",
        describe_type(field.annotation),
        _default(name, field),
        _bounds(field),
        # Outside code spans, `<name>` would vanish as an HTML tag.
        (field.description or "").replace("<", r"\<"),
    ]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(name: str, field: FieldInfo) -> str:
    """The default as text; a factory other than an empty container depends on the machine."""
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
