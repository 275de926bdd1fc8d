from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.check import check_environment
from atroposlib.errors import ConfigError, GroupError, MissingExtraError
from atroposlib.sandbox import SandboxUnavailableError
from atroposlib.scored_data import check_group
from environments.kernelbench_env.kernelbench_env import (
    SAMPLE,
    BoxTensorSpec,
    KernelBenchConfig,
    KernelBenchEnv,
    KernelProblem,
    TorchBoxes,
    matches,
    read_problems,
    score,
)
from tests.environments.offline import make_env
from tests.fakes import ScriptedEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
needs_boxes = pytest.mark.usefixtures("boxes_run")


@pytest.fixture(scope="module")
def boxes_run() -> None:
    """Skip without bubblewrap or PyTorch, or if no interpreter can be read in a box."""
    try:
        asyncio.run(TorchBoxes.open(config_of()))
    except (MissingExtraError, SandboxUnavailableError) as error:
        pytest.skip(str(error))


DOUBLE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size))
    def forward(self, x, y):
        return 2 * x * self.weight, y + 1
def get_inputs():
    return [torch.randn(3, 50), torch.randint(0, 99, (7,))]
def get_init_inputs():
    return [50]
"""
HEAD = "import os, sys, time, torch\nfrom problem import Model\n"
SOLUTIONS = {
    "copy": f"{HEAD}class ModelNew(Model): pass",
    "prints": f"{HEAD}print('x' * 1000)\nclass ModelNew(Model): pass",
    "sleeps behind patched clocks": f"""{HEAD}
sleep = time.sleep
time.perf_counter = time.time = time.monotonic = lambda: 0.0
class ModelNew(Model):
    def forward(self, x, y):
        sleep(0.3)
        return super().forward(x, y)
""",
    "zeros behind patched comparisons": f"""{HEAD}
torch.allclose = torch.equal = lambda *a, **k: True
class ModelNew(Model):
    def forward(self, x, y):
        return torch.zeros(3, 50), torch.zeros(7, dtype=torch.int64)
""",
    "first answer again": f"""{HEAD}
known = []
class ModelNew(Model):
    def forward(self, x, y):
        known.append(super().forward(x, y))
        return known[0]
""",
    "one integer wrong": f"""{HEAD}
class ModelNew(Model):
    def forward(self, x, y):
        a, b = super().forward(x, y)
        b[0] += 1
        return a, b
""",
    "not a number": f"""{HEAD}
class ModelNew(Model):
    def forward(self, x, y):
        a, b = super().forward(x, y)
        return a * float("nan"), b
""",
    "answers before it is asked": f"""{HEAD}
for fd in range(3, 10):
    try:
        os.write(fd, b"R" + bytes(100_000))
    except OSError:
        pass
class ModelNew(Model): pass
""",
    "fewer numbers": f"""{HEAD}
class ModelNew(Model):
    def forward(self, x, y):
        return super().forward(x, y)[0]
""",
    "more threads": f"""{HEAD}
import threading
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
class ModelNew(Model): pass
""",
    "ends": f"{HEAD}os._exit(0)",
    "no class": "print(1)",
    "no program": "class ModelNew(",
}
WRONG = {"zeros behind patched comparisons", "first answer again", "one integer wrong"}
WRONG |= {"not a number"}
RIGHT = {"copy", "prints", "sleeps behind patched clocks"}


def config_of(**settings: Any) -> KernelBenchConfig:
    return KernelBenchConfig(tokenizer_name="none", num_trials=2, timeout_s=30.0, **settings)


def problem_of(code: str) -> KernelProblem:
    return KernelProblem(1, 1, "1_Double", code)


@pytest.mark.parametrize(
    ("is_compiled", "speedup", "expected"),
    [
        (False, None, 0.0),
        (True, None, 0.3),
        (True, 0.25, 0.55),
        (True, 1.0, 1.3),
        (True, 2.0, 2.3),
        (True, 50.0, 10.3),
    ],
)
def test_failures_are_below_slow_solutions_and_those_below_fast_ones(
    is_compiled: bool, speedup: float | None, expected: float
) -> None:
    parts = score(is_compiled=is_compiled, speedup=speedup, compiled_weight=0.3, max_speedup=10.0)

    assert sum(parts.values()) == pytest.approx(expected)


FLOATS, INTEGERS = BoxTensorSpec("float32", (2,)), BoxTensorSpec("int64", (1,))


@pytest.mark.parametrize(
    ("given", "expected", "is_match"),
    [
        ((1.0005, 2.0, 5), (1.0, 2.0, 5), True),
        ((1.01, 2.0, 5), (1.0, 2.0, 5), False),
        ((1.0, 2.0, 6), (1.0, 2.0, 5), False),
        ((float("nan"), 2.0, 5), (1.0, 2.0, 5), False),
        ((float("inf"), 2.0, 5), (1.0, 2.0, 5), False),
    ],
)
def test_outputs_match_within_the_tolerance(
    given: tuple[Any, ...], expected: tuple[Any, ...], is_match: bool
) -> None:
    a, b = (struct.pack("<ffq", *values) for values in (given, expected))
    specs = [FLOATS, INTEGERS]

    assert matches(a, b, specs, rtol=1e-3, atol=0.0) is is_match
    assert not matches(a + b"\0", b, specs, rtol=1e-3, atol=0.0)


def test_problems_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "level2").mkdir()
    for name in ("10_b.py", "9_a.py", "notes.py"):
        (tmp_path / "level2" / name).write_text("x")

    assert [p.problem_id for p in read_problems(tmp_path, 2)] == [9, 10]
    assert len(read_problems(SAMPLE, 1)) == 4
    with pytest.raises(ConfigError, match=r"level1/1_NAME\.py"):
        read_problems(tmp_path, 1)


@needs_boxes
@pytest.mark.long
async def test_solutions_can_fake_neither_outputs_nor_times() -> None:
    boxes = await TorchBoxes.open(config_of())
    problem = problem_of(DOUBLE)
    reference = await boxes.run_reference(problem)

    measured = {
        name: await boxes.run_solution(problem, code, reference) for name, code in SOLUTIONS.items()
    }

    assert {name for name, each in measured.items() if each.speedup is not None} == RIGHT
    assert {name for name, each in measured.items() if each.is_compiled} == RIGHT | WRONG
    sleeping = measured["sleeps behind patched clocks"].speedup
    assert sleeping is not None
    assert sleeping < reference.seconds / 0.3  # its time is at least that of the sleep
    assert "class" not in measured["no class"].reason
    assert "ModelNew" in measured["no class"].reason


UNFIT = {
    "x.sum() * 0 + 5": "are the same",
    "x.mean() * 1e-6": "are the same",
    "x / 0": "not finite",
    "1 / None": "does not run",
    "x.to(torch.complex64)": "complex64",
}
"""Outputs of a problem, and why it is refused."""


@needs_boxes
async def test_problem_that_a_constant_solves_or_that_fails_is_refused() -> None:
    boxes = await TorchBoxes.open(config_of())

    for output, reason in UNFIT.items():
        code = DOUBLE.replace("2 * x * self.weight, y + 1", output)
        with pytest.raises(GroupError, match=reason):
            await boxes.run_reference(problem_of(code))


@needs_boxes
@pytest.mark.long
async def test_box_that_does_not_end_is_stopped() -> None:
    boxes = await TorchBoxes.open(config_of())
    problem = problem_of(DOUBLE)
    reference = await boxes.run_reference(problem)
    boxes = await TorchBoxes.open(config_of().model_copy(update={"timeout_s": 8.0}))
    endless = (
        f"{HEAD}class ModelNew(Model):\n    def forward(self, x, y):\n        while True: pass"
    )

    measured = await boxes.run_solution(problem, endless, reference)

    assert (measured.is_compiled, measured.speedup) == (False, None)
    assert re.match("wall_time|cpu_time", measured.reason)


@needs_boxes
async def test_group_has_the_parts_of_its_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    program = re.sub(r"\bModel\b", "ModelNew", read_problems(SAMPLE, 1)[0].code)
    replies = [f"```python\n{program}\n```", "```python\nprint(1)\n```"]
    async with ScriptedEngine(["ok", *replies]) as engine:
        env = make_env(
            KernelBenchEnv,
            engine,
            monkeypatch,
            dataset_path=str(SAMPLE),
            num_trials=2,
            group_size=2,
        )
        await env.setup()
        item = await env.get_next_item()
        group, _ = await env.collect_trajectories(item)
        metrics = env.train_metrics(group["scores"])
        await env.close()
        await env.server.close()

    check_group(group)
    right, failed = group["scores"]
    assert item.problem_id == 1
    assert right > 0.3
    assert failed == 0.0
    assert (metrics["train/fraction_compiled"], metrics["train/fraction_correct"]) == (0.5, 0.5)
    assert metrics["train/speedup_of_correct"] == pytest.approx(right - 0.3)


def test_config_init_gives_the_published_settings() -> None:
    config, _ = KernelBenchEnv.config_init()

    assert KernelBenchEnv.name == "kernelbench_parallel"
    assert (config.tokenizer_name, config.group_size) == ("Qwen/Qwen3-4B", 2)
    assert (config.level, config.problem_id, config.compiled_weight) == (1, 1, 0.3)
    assert config.temperature > 0  # with 0, the rollouts of a group are the same


@needs_boxes
@pytest.mark.long
def test_environment_passes_the_check() -> None:
    report = check_environment(KernelBenchEnv)

    assert report.passed, report.text
