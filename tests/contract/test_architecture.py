"""Imports point down: entry point, composition, service, pure rule, vocabulary."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import sys
from collections import Counter

import pytest

from helpers.pure_rules import PURE_RULES
from tests.contract.import_graph import REPOSITORY, find_circle, import_graph

pytestmark = pytest.mark.slow

VOCABULARY = ("atroposlib.type_definitions", "atroposlib.errors", "atroposlib.scored_data")

# importer pattern -> what it must never import, with the reason
FORBIDDEN = [
    ("atroposlib.api.*", "atroposlib.envs*", "the service serves environments in any language"),
    ("atroposlib.*", "example_trainer*", "any trainer may use the library"),
    ("atroposlib.*", "environments*", "environments build on the library"),
    ("atroposlib.envs*", "atroposlib.tasks*", "the framework knows none of the tasks"),
    ("atroposlib.api.*", "atroposlib.tasks*", "the service serves environments in any language"),
    ("example_trainer*", "atroposlib.envs*", "a trainer speaks to environments over HTTP only"),
    ("atroposlib.*", "atroposlib.tests*", "test helpers are for tests"),
    ("atroposlib.utils.*", "atroposlib.envs*", "utilities are leaves"),
    ("atroposlib.utils.*", "atroposlib.api*", "utilities are leaves"),
    ("atroposlib.frontend.*", "atroposlib.envs*", "pages are made from files"),
]

IMPURE = {"os", "time", "random", "socket", "subprocess", "aiohttp", "httpx", "asyncio", "datetime"}


@pytest.fixture(scope="module")
def complete() -> dict[str, set[str]]:
    return import_graph(lazy=True)


def test_imports_have_no_circle(complete: dict[str, set[str]]) -> None:
    assert find_circle(complete) is None


@pytest.mark.parametrize(("importer", "forbidden", "reason"), FORBIDDEN)
def test_imports_point_down(
    complete: dict[str, set[str]], importer: str, forbidden: str, reason: str
) -> None:
    upward = [
        f"{name} imports {target}"
        for name, targets in complete.items()
        if fnmatch.fnmatch(name, importer) and not fnmatch.fnmatch(name, forbidden)
        for target in targets
        if fnmatch.fnmatch(target, forbidden)
    ]

    assert not upward, f"{reason}: {upward}"


def test_environment_side_reaches_the_service_through_its_client_only(
    complete: dict[str, set[str]],
) -> None:
    others = [
        f"{name} imports {target}"
        for name, targets in complete.items()
        if name.startswith(("atroposlib.envs", "example_trainer", "environments"))
        for target in targets
        if target.startswith("atroposlib.api.") and target != "atroposlib.api.client"
    ]

    assert not others


@pytest.mark.parametrize("module", VOCABULARY)
def test_vocabulary_imports_only_vocabulary(complete: dict[str, set[str]], module: str) -> None:
    assert {t for t in complete[module] if t != "atroposlib"} <= set(VOCABULARY)


def test_only_doors_and_tests_import_doors(complete: dict[str, set[str]]) -> None:
    upward = [
        f"{name} imports {target}"
        for name, targets in complete.items()
        if not name.startswith("atroposlib.cli")
        for target in targets
        if target.startswith("atroposlib.cli.")
    ]

    assert not upward


SHARED_CLASS_NAMES = {
    "GSM8kEnv": "names of the earlier gsm8k_server_axolotl.py and of the two about cats",
    "MathEnv": "names of the earlier math_server and math_server_zero",
    "RSConfig": "names of the earlier math_server and math_server_zero",
    "MultiTurnEnvConfig": "name of the earlier tool_use_multiturn_server",
    "SingleToolCallingEnv": "mcp_tool_calling is the earlier script of the same environment",
    "SigmaRuleEnv": "names of the two earlier environments of Sigma rules",
    "ToolCall": "a call as the chat APIs have it, and as tools receive it",
    "Output": "a place to which groups are exported, and a piece of what a command prints",
    "RunFile": "the file of the dataset environment's programs, and the file of `atropos-up`",
    "Policy": "the body of POST /policy, as OpenAPI names it, and what plays a conversation",
}
"""Class names that stand for two classes, and why."""
TASKS_OF_AGENTS = REPOSITORY / "environments" / "agent_tasks" / "tasks"
"""Programs in workspaces, each complete in the folder of its task."""
PROBLEMS_OF_KERNELBENCH = REPOSITORY / "environments" / "data" / "kernelbench_sample"
"""Modules in the format of KernelBench, in which each is called `Model`."""


def test_a_class_name_stands_for_one_class() -> None:
    defined: Counter[str] = Counter()
    for folder in ("atroposlib", "example_trainer", "environments"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            if path.is_relative_to(TASKS_OF_AGENTS) or path.is_relative_to(PROBLEMS_OF_KERNELBENCH):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            defined.update(node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))

    assert {name for name, count in defined.items() if count > 1} == set(SHARED_CLASS_NAMES)


@pytest.mark.parametrize("module", PURE_RULES)
def test_pure_rules_import_nothing_impure(module: str) -> None:
    path = REPOSITORY / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            imported.add((node.module or "").split(".")[0])

    assert not imported & IMPURE


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("atroposlib.api.client", ["fastapi", "torch", "transformers", "wandb", "openai"]),
        ("atroposlib.api.trainers.trl", ["fastapi", "torch", "transformers", "trl"]),
        ("atroposlib.api.trainers.verl", ["fastapi", "torch", "verl"]),
        ("atroposlib.api.trainers.skyrl", ["fastapi", "torch", "skyrl"]),
        ("atroposlib.cli.trainer_check", ["fastapi", "torch", "transformers"]),
        ("atroposlib.scored_data", ["fastapi", "torch", "transformers", "numpy"]),
        ("atroposlib.wire", ["fastapi", "numpy", "zstandard"]),
        (
            "atroposlib.envs.base",
            ["torch", "transformers", "wandb", "datasets", "fastapi", "openai"],
        ),
        ("atroposlib.cli.sft", ["torch", "transformers", "datasets", "fastapi", "openai"]),
        ("atroposlib.cli.env", ["torch", "transformers", "datasets", "openai"]),
        ("atroposlib.envs.multi_turn_env", ["atroposlib.workspaces", "atroposlib.sandbox"]),
        ("example_trainer.cli", ["torch", "transformers", "wandb"]),
        ("example_trainer.weights.cli", ["torch", "transformers", "wandb", "fsspec", "numpy"]),
        ("example_trainer.demo.cli", ["torch", "transformers", "wandb", "matplotlib"]),
    ],
)
def test_importing_a_light_module_stays_light(module: str, heavy: list[str]) -> None:
    script = f"import {module}, sys; print(*(m for m in {heavy!r} if m in sys.modules))"

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
