"""KernelBench: write a faster version of a PyTorch module; correct and fast is measured in boxes.

                 ┌► box of the reference ─► inputs of hidden seeds, outputs, seconds ─┐
    problem -> G completions ─► box of each ModelNew <─ inputs, outputs ─► seconds ───┴► reward

No code of a problem or of a completion runs in this process. A box is a sandbox without network and
files, with one thread. It is given inputs one at a time and answers with bytes; this process
compares them and measures the time. So a solution can fake neither: `README.md` says why.

    python environments/kernelbench_env/kernelbench_env.py process --env.total_steps 4 \
        --env.dataset_path environments/data/kernelbench_sample --env.problem_id None \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import json
import logging
import os
import re
import secrets
import statistics
import struct
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.dataset_items import hub_rows
from atroposlib.envs.single_turn_env import SingleTurnEnv, SingleTurnEnvConfig
from atroposlib.errors import ConfigError, GroupError, MissingExtraError
from atroposlib.sandbox import SandboxError, SandboxLimits, SandboxResult, SandboxUnavailableError
from atroposlib.sandbox.bubblewrap import Bubblewrap
from atroposlib.tasks.answers import last_code_block
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.single_turn_parts import default_configs
from atroposlib.utils.aio import all_results
from atroposlib.utils.text import inert_line

__all__ = [
    "BoxEndedError",
    "BoxTensorSpec",
    "KernelBenchConfig",
    "KernelBenchEnv",
    "KernelProblem",
    "Measured",
    "TorchBoxes",
    "matches",
    "read_problems",
    "score",
]

logger = logging.getLogger(__name__)

CARD = EnvironmentCard(
    task="rewrite a PyTorch module so that it computes the same in less time",
    turns="1",
    reward="0.3 if it runs, and if it is right its speed-up over the reference, at most 10",
    data="KernelBench from the hub, or `--env.dataset_path`",
    needs="bubblewrap, `pip install '.[trainer]'`",
    command="process --env.dataset_path environments/data/kernelbench_sample "
    "--env.problem_id None --env.total_steps 4",
)

MODEL = "Qwen/Qwen3-4B"
HUB_DATASET = "ScalingIntelligence/KernelBench"
SAMPLE = Path(__file__).parents[1] / "data" / "kernelbench_sample"
MEBIBYTE = 2**20
MAX_CODE_CHARACTERS = 100_000
MAX_HEADER_BYTES = 65_536
SYSTEM_PROMPT = (
    "You are an expert in fast PyTorch programs. You are given a module and write one that "
    "computes the same in less time."
)
PROMPT = """Here is a PyTorch module `Model`, with its inputs:

```python
{code}
```

Write a class `ModelNew` with the same arguments and the same outputs within a tolerance of \
{rtol:g}, for any inputs of these shapes. It is constructed after the same seed as `Model`, so \
create parameters in the same order. It runs on {device} with {threads}. Put the whole program, \
with its imports, into one fenced block:
```python
# your program
```"""
ALLOCATION = ("MALLOC_MMAP_MAX_=0", "MALLOC_TRIM_THRESHOLD_=68719476736")
"""Variables with which freed memory is used again; otherwise times depend on page faults."""
RUNNER = """
import json, os, struct, sys

with open("spec.json", encoding="utf-8") as file:
    spec = json.load(file)
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = str(spec["num_threads"])
sys.path[:0] = ["/box"]
sys.path.extend(spec["paths"])
reading, writing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # prints of a module are not results
import torch

torch.set_num_threads(spec["num_threads"])
import problem


def send(tensors, *, with_specs):
    if with_specs:
        specs = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
        header = json.dumps(specs).encode()
        writing.write(struct.pack("<I", len(header)) + header)
    for tensor in tensors:
        writing.write(tensor.numpy().tobytes())
    writing.flush()


def listed(value):
    values = value if isinstance(value, (list, tuple)) else [value]
    tensors = [v.detach().contiguous() for v in values]
    return [t.float() if t.dtype == torch.bfloat16 else t for t in tensors]


def receive(specs):
    tensors = []
    for dtype, shape in specs:
        kind = getattr(torch, dtype)
        count = 1
        for size in shape:
            count *= size
        data = bytearray(reading.read(count * torch.empty(0, dtype=kind).element_size()))
        tensors.append(torch.frombuffer(data, dtype=kind).reshape(shape))
    return tensors


is_reference = spec["inputs"] is None
torch.manual_seed(spec["seed"])
arguments = problem.get_init_inputs()
if is_reference:
    make = problem.Model
else:
    import solution

    make = solution.ModelNew
torch.manual_seed(spec["seed"])
model = make(*arguments)
input_specs = spec["inputs"]
writing.write(b"R")
writing.flush()
with torch.no_grad():
    while command := reading.read(1):
        if command == b"G":
            torch.manual_seed(struct.unpack("<Q", reading.read(8))[0])
            inputs = listed(problem.get_inputs())
            input_specs = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in inputs]
            send(inputs, with_specs=True)
        else:
            send(listed(model(*receive(input_specs))), with_specs=is_reference)
"""
"""The program of both kinds of boxes. That of a solution runs in one process with it, which may
change it; nothing depends on it except the bytes that arrive, and when."""


class KernelBenchConfig(SingleTurnEnvConfig):
    """Settings of the problems, of the comparison and of the boxes."""

    dataset_path: str | None = Field(
        None,
        description="Folder of problems, level1/1_Name.py and so on; None loads from the hub.",
    )
    dataset_name: str = Field(HUB_DATASET, description="Data set of the hub.")
    level: int = Field(1, ge=1, le=4, description="Level of the problems.")
    problem_id: int | None = Field(1, ge=1, description="Number of the problem; None takes all.")
    device: Literal["cpu"] = Field("cpu", description="Device of the modules: the processor.")
    num_trials: int = Field(
        5, ge=2, le=1000, description="Inputs that are compared, and timed; the best time counts."
    )
    num_threads: int = Field(1, ge=1, le=256, description="Threads that a box may have.")
    compiled_weight: float = Field(
        0.3, ge=0, le=1000, description="Reward of a module that gives outputs of the right sizes."
    )
    max_speedup: float = Field(
        10.0, gt=0, le=1_000_000, description="Limit of the reward of a correct module."
    )
    rtol: float = Field(1e-3, ge=0, le=1, description="Relative tolerance of outputs.")
    atol: float = Field(1e-3, ge=0, le=1, description="Absolute tolerance of outputs.")
    timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="Time limit in seconds of a box, all trials included."
    )
    memory_mib: int = Field(4096, ge=256, le=1_048_576, description="Memory of a box in MiB.")
    max_tensor_mib: int = Field(
        2048, ge=1, le=65_536, description="Limit of all inputs and outputs of a problem in MiB."
    )
    temperature: float = Field(1.0, ge=0, description="Sampling temperature of rollouts.")


class KernelProblem(NamedTuple):
    """One item."""

    level: int
    problem_id: int
    name: str
    code: str
    """Defines `Model`, `get_inputs` and `get_init_inputs`."""


def read_problems(folder: Path, level: int) -> list[KernelProblem]:
    """Return the problems in the files `level<N>/<number>_<name>.py` of a folder, by number.

    Raises:
        ConfigError: there is none, or a file cannot be read.
    """
    found = []
    for path in (folder / f"level{level}").glob("*.py"):
        number = re.match(r"(\d{1,6})_", path.name)
        if number is not None:
            try:
                code = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path} cannot be read ({error})") from error
            found.append(KernelProblem(level, int(number[1]), path.stem, code))
    if not found:
        raise ConfigError(f"no problems in {folder}; expected level{level}/1_NAME.py and so on")
    return sorted(found)


def score(
    *, is_compiled: bool, speedup: float | None, compiled_weight: float, max_speedup: float
) -> dict[str, float]:
    """Return the parts of the reward.

    A solution that does not run earns 0, one with wrong outputs `compiled_weight`, and a correct
    one its speed-up on top. So a slow correct solution is above all wrong ones, and a faster one is
    above a slower one.

    Args:
        is_compiled: whether it gave outputs of the right sizes for all inputs.
        speedup: time of the reference divided by that of the solution; None if it is wrong.
        compiled_weight: reward of a solution that runs.
        max_speedup: limit of the other part.
    """
    return {
        "compiled": compiled_weight * is_compiled,
        "speedup": 0.0 if speedup is None else min(speedup, max_speedup),
    }


DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


class BoxTensorSpec(NamedTuple):
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class BoxTrial(NamedTuple):
    """Inputs of one hidden seed, and the outputs of the reference."""

    inputs: bytes
    outputs: bytes
    seconds: float


class ReferenceRun(NamedTuple):
    """The outputs and times of a problem's `Model`."""

    seed: int
    """Seed before the modules are constructed."""
    inputs: list[BoxTensorSpec]
    outputs: list[BoxTensorSpec]
    trials: list[BoxTrial]
    """The first one is not timed."""

    @property
    def seconds(self) -> float:
        return min(trial.seconds for trial in self.trials[1:])


class Measured(NamedTuple):
    """The result of a solution."""

    is_compiled: bool
    speedup: float | None
    """None if its outputs are wrong, or if it did not run."""
    reason: str = ""


def matches(
    given: bytes, expected: bytes, specs: Sequence[BoxTensorSpec], *, rtol: float, atol: float
) -> bool:
    """Whether tensors are equal: numbers with a fraction within a tolerance, others exactly."""
    position = 0
    for spec in specs:
        end = position + spec.num_bytes
        a = np.frombuffer(given[position:end], dtype=spec.dtype)
        b = np.frombuffer(expected[position:end], dtype=spec.dtype)
        is_float = spec.dtype.startswith("float")
        is_equal = (
            np.allclose(a.astype("float64"), b.astype("float64"), rtol=rtol, atol=atol)
            if is_float
            else np.array_equal(a, b)
        )
        if not is_equal:
            return False
        position = end
    return position == len(given) == len(expected)


def is_finite(outputs: bytes, specs: Sequence[BoxTensorSpec]) -> bool:
    """Whether all numbers are finite."""
    position = 0
    for spec in specs:
        end = position + spec.num_bytes
        if spec.dtype.startswith("float"):
            values = np.frombuffer(outputs[position:end], dtype=spec.dtype)
            if not np.isfinite(values).all():
                return False
        position = end
    return True


def _checked_spec(dtype: str, shape: Sequence[int]) -> BoxTensorSpec:
    if dtype not in DTYPES or not all(isinstance(size, int) and size > 0 for size in shape):
        raise ValueError(f"a tensor of type {dtype!r:.40} and shape {shape!r:.80}")
    return BoxTensorSpec(dtype, tuple(shape))


class BoxEndedError(RuntimeError):
    """The program of a box ended, or its answers did, before they were complete."""


class BoxSession:
    """A running box: a message goes in, bytes come out, and the time between is measured here."""

    def __init__(self) -> None:
        self.running: asyncio.Task[SandboxResult] | None = None
        self.pipe: asyncio.WriteTransport | None = None
        self._received = bytearray()
        self._wanted = 0
        self._arrived: asyncio.Future[float] | None = None

    def receive(self, stream: int, piece: bytes, _seconds: float) -> None:
        """Take a piece of output; that of the error stream is not an answer."""
        if stream != 1:
            return
        self._received += piece
        self._note_arrival()

    def _note_arrival(self) -> None:
        arrived = self._arrived
        if arrived and not arrived.done() and len(self._received) >= self._wanted:
            arrived.set_result(time.perf_counter())

    async def read(self, num_bytes: int) -> tuple[bytes, float]:
        """Return the next bytes, and the time at which the last one arrived.

        Raises:
            BoxEndedError: the program ended before.
            SandboxError: the box could not be set up.
        """
        self._wanted = num_bytes
        arrived: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._arrived = arrived
        self._note_arrival()
        assert self.running is not None
        waited_for: set[asyncio.Future[Any]] = {self.running, arrived}
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if not arrived.done():
            result = self.running.result()
            last_line = result.stderr.strip().rpartition("\n")[2]
            raise BoxEndedError(
                f"{result.ended_by} {result.exit_code}: {inert_line(last_line, max_characters=200)}"
            )
        taken = bytes(self._received[:num_bytes])
        del self._received[:num_bytes]
        return taken, arrived.result()

    async def exchange(self, message: bytes, num_bytes: int) -> tuple[bytes, float]:
        """Send a message and return the answer, and the seconds until it was complete."""
        if self._received:
            raise BoxEndedError("it answered before it was asked")
        started_at = time.perf_counter()
        self.send(message)
        answer, arrived_at = await self.read(num_bytes)
        return answer, arrived_at - started_at

    def send(self, message: bytes) -> None:
        assert self.pipe is not None
        self.pipe.write(message)

    async def read_specs(self) -> list[BoxTensorSpec]:
        """Read a list of types and shapes, which only the box of a reference sends.

        Raises:
            GroupError: a tensor has a type that cannot be exchanged, or the list is too long.
        """
        (length,) = struct.unpack("<I", (await self.read(4))[0])
        if length > MAX_HEADER_BYTES:
            raise GroupError(f"the problem has tensors whose list takes {length} bytes")
        header, _ = await self.read(length)
        try:
            return [_checked_spec(dtype, shape) for dtype, shape in json.loads(header)]
        except (ValueError, TypeError) as error:
            raise GroupError(f"the problem has other values than tensors ({error})") from error


class TorchBoxes:
    """Boxes in which PyTorch can be imported; created by `open`.

    Args:
        sandbox: sandbox that shows the folders of the packages.
        python: interpreter in it.
        paths: folders of packages.
        config: settings of the environment.
    """

    def __init__(
        self,
        sandbox: Bubblewrap,
        python: str,
        paths: Sequence[str],
        config: KernelBenchConfig,
    ) -> None:
        self._sandbox, self._python, self._paths = sandbox, python, list(paths)
        self._config = config

    @classmethod
    async def open(cls, config: KernelBenchConfig) -> TorchBoxes:
        """Find an interpreter that imports PyTorch in a box: that of this process, or the system's.

        Raises:
            MissingExtraError: PyTorch is not installed.
            SandboxUnavailableError: neither interpreter can.
        """
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            raise MissingExtraError("torch", extra="trainer")
        packages = str(Path(found.origin).parents[1])
        own = {sys.prefix, sys.base_prefix, packages}
        reasons = []
        for python, folders in ((sys.executable, own), ("/usr/bin/python3", {packages})):
            shown = sorted(f for f in folders if not Path(f).is_relative_to("/usr"))
            sandbox = Bubblewrap(read_only=shown, max_parallel=1)
            boxes = cls(sandbox, python, [packages], config)
            try:
                result = await boxes.probe()
            except SandboxError as error:
                reasons.append(f"{python}: {error}")
                continue
            if result.is_success:
                return boxes
            last_line = result.stderr.strip().rpartition("\n")[2]
            reasons.append(f"{python}: {result.ended_by} {result.exit_code}, {last_line:.200}")
        raise SandboxUnavailableError(
            f"PyTorch cannot be imported in a sandbox ({'; '.join(reasons)}); install it for an "
            "interpreter in a folder that other users can read"
        )

    async def probe(self) -> SandboxResult:
        source = f"import sys\nsys.path.extend({self._paths!r})\nimport numpy, torch\n"
        return await self._sandbox.run(
            [self._python, "-I", "-B", "main.py"],
            files={"main.py": source},
            limits=self._limits(MEBIBYTE, num_threads=16),
        )

    @contextlib.asynccontextmanager
    async def session(
        self,
        problem: KernelProblem,
        *,
        seed: int,
        inputs: Sequence[BoxTensorSpec] | None = None,
        solution: str | None = None,
        output_bytes: int,
    ) -> AsyncIterator[BoxSession]:
        """Run a box until the context ends; that of the reference if there is no solution."""
        config = self._config
        spec = {
            "num_threads": config.num_threads,
            "paths": self._paths,
            "seed": seed,
            "inputs": None if inputs is None else [list(each) for each in inputs],
        }
        files = {"main.py": RUNNER, "spec.json": json.dumps(spec), "problem.py": problem.code}
        if solution is not None:
            files["solution.py"] = solution
        session = BoxSession()
        with contextlib.ExitStack() as held:
            reading, writing = os.pipe()
            held.callback(os.close, reading)
            pipe = os.fdopen(writing, "wb", buffering=0)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
            held.callback(transport.abort)
            running = asyncio.create_task(
                self._sandbox.run(
                    ["/usr/bin/env", *ALLOCATION, self._python, "-I", "-B", "main.py"],
                    files=files,
                    stdin=reading,
                    limits=self._limits(output_bytes, num_threads=config.num_threads),
                    on_output=session.receive,
                )
            )
            session.running, session.pipe = running, transport
            try:
                yield session
            finally:
                running.cancel()
                await asyncio.wait({running})

    def _limits(self, output_bytes: int, *, num_threads: int) -> SandboxLimits:
        config = self._config
        return SandboxLimits(
            wall_s=config.timeout_s,
            cpu_s=max(1, round(config.timeout_s * config.num_threads)),
            memory_bytes=config.memory_mib * MEBIBYTE,
            max_processes=num_threads,
            output_bytes=output_bytes,
        )

    async def run_reference(self, problem: KernelProblem) -> ReferenceRun:
        """Run a problem's `Model` on inputs of fresh seeds.

        Raises:
            GroupError: it fails, is too large, or its outputs do not depend on its inputs.
        """
        config = self._config
        limit, seed = config.max_tensor_mib * MEBIBYTE, secrets.randbits(32)
        trials: list[BoxTrial] = []
        inputs: list[BoxTensorSpec] = []
        outputs: list[BoxTensorSpec] = []
        try:
            async with self.session(problem, seed=seed, output_bytes=limit) as box:
                await box.read(1)
                for _ in range(config.num_trials + 1):
                    box.send(b"G" + struct.pack("<Q", secrets.randbits(63)))
                    inputs = await box.read_specs()
                    given, _ = await box.read(sum(spec.num_bytes for spec in inputs))
                    started_at = time.perf_counter()
                    box.send(b"X" + given)
                    outputs = await box.read_specs()
                    size = sum(spec.num_bytes for spec in outputs)
                    answer, arrived_at = await box.read(size)
                    trials.append(BoxTrial(given, answer, arrived_at - started_at))
        except BoxEndedError as error:
            raise GroupError(
                f"problem {problem.name}: its Model does not run, {error}; the limits are "
                f"max_tensor_mib {config.max_tensor_mib} for output, memory_mib "
                f"{config.memory_mib} and timeout_s {config.timeout_s:g}"
            ) from error
        reference = ReferenceRun(seed, inputs, outputs, trials)
        reason = await asyncio.to_thread(self._unfit, reference)
        if reason:
            raise GroupError(f"problem {problem.name}: {reason}")
        return reference

    def _unfit(self, reference: ReferenceRun) -> str:
        """Return why a problem cannot be used; empty if it can."""
        trials, specs = reference.trials, reference.outputs
        if not all(is_finite(trial.outputs, specs) for trial in trials):
            return "its outputs are not finite"
        if len({(len(trial.inputs), len(trial.outputs)) for trial in trials}) > 1:
            return "its shapes vary"
        for one, other in itertools.pairwise(trials):
            # A constant between them must not match either.
            if self._matches(one.outputs, other.outputs, specs, factor=4.0):
                return "its outputs for other inputs are the same within the tolerance"
        return ""

    async def run_solution(
        self, problem: KernelProblem, solution: str, reference: ReferenceRun
    ) -> Measured:
        """Run a `ModelNew` on the inputs of the reference, and compare and time its answers."""
        size = sum(spec.num_bytes for spec in reference.outputs)
        limit = size * len(reference.trials) + MEBIBYTE
        answers, seconds = [], []
        try:
            async with self.session(
                problem,
                seed=reference.seed,
                inputs=reference.inputs,
                solution=solution,
                output_bytes=limit,
            ) as box:
                await box.read(1)
                for trial in reference.trials:
                    answer, taken = await box.exchange(b"X" + trial.inputs, size)
                    answers.append(answer)
                    seconds.append(taken)
        except BoxEndedError as error:
            return Measured(False, None, str(error))
        is_right = await asyncio.to_thread(self._are_right, answers, reference)
        speedup = reference.seconds / max(min(seconds[1:]), 1e-9)
        return Measured(True, speedup if is_right else None, "" if is_right else "wrong outputs")

    def _are_right(self, answers: Sequence[bytes], reference: ReferenceRun) -> bool:
        return all(
            self._matches(answer, trial.outputs, reference.outputs)
            for answer, trial in zip(answers, reference.trials, strict=True)
        )

    def _matches(
        self,
        given: bytes,
        expected: bytes,
        specs: Sequence[BoxTensorSpec],
        *,
        factor: float = 1.0,
    ) -> bool:
        rtol, atol = factor * self._config.rtol, factor * self._config.atol
        return matches(given, expected, specs, rtol=rtol, atol=atol)


class KernelBenchEnv(SingleTurnEnv):
    """Modules to speed up; an item is a `KernelProblem`."""

    name = "kernelbench_parallel"
    env_config_cls = KernelBenchConfig
    config: KernelBenchConfig
    check_settings: ClassVar[dict[str, Any]] = {
        "dataset_path": str(SAMPLE),
        "problem_id": None,
        "num_trials": 2,
        "max_speedup": 0.01,  # scores are then the same in every run
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.problems: list[KernelProblem] = []

    @classmethod
    def config_init(cls) -> tuple[KernelBenchConfig, APIServerConfig]:
        return default_configs(
            KernelBenchConfig,
            MODEL,
            group_size=2,
            max_token_length=16384,
            wandb_name="kernelbench_parallel",
        )

    async def setup(self) -> None:
        """Read the problems, and find an interpreter for the boxes."""
        self.problems = await asyncio.to_thread(self._read)
        self.boxes = await TorchBoxes.open(self.config)

    def _read(self) -> list[KernelProblem]:
        config = self.config
        if config.dataset_path is not None:
            found = read_problems(Path(config.dataset_path), config.level)
        else:
            rows = hub_rows(config.dataset_name, split=f"level_{config.level}")
            found = sorted(_problem_of(row, config.level) for row in rows)
        chosen = [p for p in found if config.problem_id in (None, p.problem_id)]
        if not chosen:
            numbers = ", ".join(str(problem.problem_id) for problem in found[:20])
            raise ConfigError(
                f"level {config.level} has no problem {config.problem_id}; it has {numbers}"
            )
        return chosen

    async def get_next_item(self) -> KernelProblem:
        problem = self.problems[self.iter % len(self.problems)]
        self.iter += 1
        return problem

    def eval_items(self) -> Sequence[KernelProblem]:
        return self.problems

    def prompt(self, item: KernelProblem) -> list[dict[str, str]]:
        num_threads = self.config.num_threads
        content = PROMPT.format(
            code=item.code.strip(),
            rtol=self.config.rtol,
            device=self.config.device,
            threads="one thread" if num_threads == 1 else f"{num_threads} threads",
        )
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]

    async def score(self, item: KernelProblem, answer: str) -> Mapping[str, float]:
        [scored] = await self.score_all(item, [answer])
        return scored

    async def score_all(
        self, item: KernelProblem, answers: Sequence[str]
    ) -> list[Mapping[str, float]]:
        """Return the scores of answers, all on the same fresh inputs."""
        programs = [last_code_block(answer) for answer in answers]
        are_tried = [
            p is not None and len(p) <= MAX_CODE_CHARACTERS and "ModelNew" in p for p in programs
        ]
        reference = await self.boxes.run_reference(item) if any(are_tried) else None
        measured = await all_results(
            self._measured(item, program if is_tried else None, reference)
            for program, is_tried in zip(programs, are_tried, strict=True)
        )
        return [
            score(
                is_compiled=each.is_compiled,
                speedup=each.speedup,
                compiled_weight=self.config.compiled_weight,
                max_speedup=self.config.max_speedup,
            )
            for each in measured
        ]

    async def _measured(
        self, item: KernelProblem, program: str | None, reference: ReferenceRun | None
    ) -> Measured:
        if program is None or reference is None:
            return Measured(False, None, "no program")
        measured = await self.boxes.run_solution(item, program, reference)
        logger.debug("%s: %s", item.name, measured)
        return measured

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        return {**super().train_metrics(scores), **self._metrics(scores, "train")}

    def evaluation_metrics(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        scores = [sample["score"] for sample in samples]
        return {**super().evaluation_metrics(samples), **self._metrics(scores, "eval")}

    def _metrics(self, scores: Sequence[float], area: str) -> dict[str, float]:
        weight = self.config.compiled_weight
        speedups = [value - weight for value in scores if value > weight]
        metrics = {
            f"{area}/fraction_compiled": statistics.fmean(value > 0 for value in scores),
            f"{area}/fraction_correct": len(speedups) / len(scores),
            f"{area}/fraction_faster": sum(value > 1 for value in speedups) / len(scores),
        }
        if speedups:
            metrics[f"{area}/speedup_of_correct"] = statistics.fmean(speedups)
        return metrics

    def is_correct(self, record: Mapping[str, Any]) -> bool:
        return float(record["score"]) > self.config.compiled_weight

    def check_gold_answer(self, item: KernelProblem) -> str:
        renamed = re.sub(r"\bModel\b", "ModelNew", item.code)
        return f"<think>The same module is correct.</think>\n```python\n{renamed}\n```"

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


def _problem_of(row: Mapping[str, Any], level: int) -> KernelProblem:
    try:
        return KernelProblem(level, int(row["problem_id"]), str(row["name"]), str(row["code"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"a row has no {error}; expected the columns problem_id, name and code"
        ) from error


if __name__ == "__main__":
    KernelBenchEnv.cli()
