"""Code execution: programming problems; the program of an answer is run on tests in a sandbox.

    problem -> [system, user] -> G completions -> last fenced block -> sandbox -> +1 or -1

`atroposlib/tasks/code_tests.py` reads the problems and runs programs on their tests,
`SingleTurnEnv` samples; this page defines the prompt, the score and the metrics.

Needs a sandbox, by default bubblewrap (`atroposlib/sandbox/README.md`). With a vLLM server on
port 9001 and without the hub:

    python environments/code_execution_server/code_execution_server.py process \
        --env.dataset_path environments/data/code_execution_sample --env.total_steps 4
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from atroposlib.envs.base import EvalHandlingEnum
from atroposlib.envs.eval import pass_at_k
from atroposlib.envs.single_turn_env import (
    SingleTurnEnv,
    SingleTurnEnvConfig,
    Trajectory,
    ask,
    completion_budget,
)
from atroposlib.sandbox import SandboxLimits, open_sandbox
from atroposlib.tasks.answers import last_code_block
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.code_tests import (
    CodeProblem,
    arguments_of,
    expected_values,
    load_problems,
    passes_all_tests,
)
from atroposlib.utils.aio import all_results

__all__ = [
    "CodeConfig",
    "CodingEnv",
    "ProgramAnswer",
    "eval_metrics",
    "lookup_program",
    "train_metrics",
]

logger = logging.getLogger("environments.code_execution_server")


def lookup_program(problem: CodeProblem) -> str:
    """Return a program that passes all tests of a problem by looking up the answers."""
    if problem.kind == "stdin_stdout":
        known = {str(test.input).strip(): str(test.output) for test in problem.tests}
        return f"import sys\nprint({known!r}[sys.stdin.read().strip()])"
    values = {json.dumps(arguments_of(test)): expected_values(test)[-1] for test in problem.tests}
    return (
        f"import json\ndef {problem.function}(*given):\n"
        f"    return {values!r}[json.dumps(list(given))]"
    )


DIFFICULTIES = ("easy", "medium", "hard")


class ProgramAnswer(NamedTuple):
    """One completion."""

    passes: bool
    is_cut: bool
    length: int
    """Number of tokens."""


def train_metrics(groups: Sequence[Sequence[ProgramAnswer]]) -> dict[str, float]:
    """Return the metrics `train_rewards/*` of [N][G] answers; empty without groups."""
    if not any(groups):
        return {}
    answers = [answer for group in groups for answer in group]
    metrics = {
        "rewards": statistics.fmean(1.0 if answer.passes else -1.0 for answer in answers),
        "pass@group_size": statistics.fmean(any(a.passes for a in group) for group in groups),
        **_shares_and_lengths(answers),
    }
    return {f"train_rewards/{name}": value for name, value in metrics.items()}


def eval_metrics(
    groups: Sequence[Sequence[ProgramAnswer]], difficulties: Sequence[str], *, group_size: int
) -> dict[str, float]:
    """Return the metrics `eval/*`; empty without groups.

    Args:
        groups: [N] answers to each problem.
        difficulties: [N] `easy`, `medium`, `hard` or any other text.
        group_size: k of `pass@group_size`.
    """
    if not any(groups):
        return {}
    metrics = {"pass_1": statistics.fmean(_pass_at(group, 1) for group in groups)}
    for difficulty in DIFFICULTIES:
        rates = [
            _pass_at(group, 1)
            for group, other in zip(groups, difficulties, strict=True)
            if other.lower() == difficulty
        ]
        if rates:
            metrics[f"{difficulty}_pass_1"] = statistics.fmean(rates)
    metrics["pass@group_size"] = statistics.fmean(_pass_at(group, group_size) for group in groups)
    metrics |= _shares_and_lengths([answer for group in groups for answer in group])
    return {f"eval/{name}": value for name, value in metrics.items()}


def _pass_at(group: Sequence[ProgramAnswer], k: int) -> float:
    return pass_at_k(len(group), sum(answer.passes for answer in group), min(k, len(group)))


def _shares_and_lengths(answers: Sequence[ProgramAnswer]) -> dict[str, float]:
    lengths = {
        "completion_length": [answer.length for answer in answers],
        "correct_completion_length": [answer.length for answer in answers if answer.passes],
        "incorrect_completion_length": [answer.length for answer in answers if not answer.passes],
    }
    means = {name: statistics.fmean(values) for name, values in lengths.items() if values}
    return {"overlong_ratio": statistics.fmean(answer.is_cut for answer in answers), **means}


CARD = EnvironmentCard(
    task="programming problems with tests",
    turns="1",
    reward="+1 when all tests pass, else -1",
    data="RLVR coding problems or code contests from the hub, or `--env.dataset_path`",
    needs="a sandbox: `apt-get install bubblewrap`",
    command="process --env.dataset_path environments/data/code_execution_sample "
    "--env.total_steps 4",
)

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "code_execution_sample"
NUM_EVAL_SAMPLES = 16
SYSTEM_PROMPT = (
    "You are an expert Python programmer. You are given a programming problem and write a correct "
    "Python program that solves it and passes all of its tests."
)
STDIN_NOTE = (
    "Read the input from standard input and write the answer to standard output; do not run the "
    "program on inputs of your own. Put the whole program into one fenced block:\n"
    "```python\n# your program\n```"
)
STARTER_NOTE = (
    "Complete the code below and keep its names. Put the whole program into one fenced block:\n"
    "```python\n{starter_code}\n```"
)


class CodeConfig(SingleTurnEnvConfig):
    """Settings of the data set, of sampling and of the sandbox."""

    dataset_name: Literal["normal", "deepmind"] = Field(
        "normal",
        description="Training problems of the hub: RLVR coding problems, or code contests.",
    )
    dataset_path: str | None = Field(
        None,
        description="JSONL, JSON or Parquet file, or folder with a train and a test file, with the "
        "columns problem and tests; None loads from the hub.",
    )
    temperature: float = Field(0.6, ge=0, description="Sampling temperature of rollouts.")
    eval_temperature: float = Field(0.6, ge=0, description="Sampling temperature of evaluations.")
    top_p: float = Field(0.95, gt=0, le=1, description="Nucleus of rollouts.")
    eval_top_p: float = Field(0.95, gt=0, le=1, description="Nucleus of evaluations.")
    mute_truncated: bool = Field(
        True, description="Whether truncated completions are excluded from the policy update."
    )
    start_idx: int = Field(0, ge=0, description="Index of the first training problem.")
    max_eval_token_length: int = Field(
        40960, ge=1, description="Maximum tokens of prompt and completion in evaluations."
    )
    sandbox: str | None = Field(
        None,
        description="Kind of sandbox: bubblewrap, container or gvisor; None takes the kind in "
        "ATROPOS_SANDBOX, or bubblewrap if it is not set.",
    )
    test_timeout_s: float = Field(
        6.0, gt=0, description="Timeout in seconds of one test of a program."
    )


class CodingEnv(SingleTurnEnv):
    """Programming problems; an item is a `CodeProblem`.

    Attributes:
        iter: problems handed out so far; kept in checkpoints.
        answers: groups of answers since the last log.
    """

    env_config_cls = CodeConfig
    config: CodeConfig
    default_model = "Qwen/Qwen3-14B"
    default_settings: ClassVar[dict[str, Any]] = {
        "group_size": 8,
        "total_steps": 600,
        "batch_size": -1,
        "steps_per_eval": 10,
        "max_batches_offpolicy": 2,
        "max_eval_workers": 128,
        "eval_handling": EvalHandlingEnum.STOP_TRAIN,
        "max_token_length": 32768,
        "min_items_sent_before_logging": 0,
        "worker_timeout": 7200,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    check_settings: ClassVar[dict[str, Any]] = {"dataset_path": str(SAMPLE)}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.answers: list[list[ProgramAnswer]] = []

    async def setup(self) -> None:
        self.sandbox = open_sandbox(self.config.sandbox)
        seconds = self.config.test_timeout_s
        self.limits = SandboxLimits(wall_s=seconds + 1, cpu_s=max(1, round(seconds)))
        self.eval_slots = asyncio.Semaphore(max(1, self.config.max_eval_workers))
        self.train, self.test = await asyncio.to_thread(
            load_problems, self.config.dataset_path, self.config.dataset_name
        )
        logger.info("%d training and %d test problems", len(self.train), len(self.test))

    async def get_next_item(self) -> CodeProblem:
        problem = self.train[(self.config.start_idx + self.iter) % len(self.train)]
        self.iter += 1
        return problem

    def prompt(self, item: CodeProblem) -> list[dict[str, str]]:
        note = STDIN_NOTE
        if item.kind == "func":
            note = STARTER_NOTE.format(starter_code=item.starter_code or f"def {item.function}")
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": f"{item.question}\n\n{note}"},
        ]

    def sampling(self) -> dict[str, Any]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}

    async def score(self, item: CodeProblem, answer: str) -> float:
        program = last_code_block(answer)
        if program is None:
            return -1.0
        passes = await passes_all_tests(self.sandbox, program, item, limits=self.limits)
        return 1.0 if passes else -1.0

    def note_group(
        self, item: CodeProblem, trajectories: Sequence[Trajectory], scores: Sequence[float]
    ) -> None:
        self.answers.append(
            [
                ProgramAnswer(score > 0, trajectory.is_truncated, trajectory.num_completion_tokens)
                for trajectory, score in zip(trajectories, scores, strict=True)
            ]
        )

    def train_metrics(self, scores: Sequence[float]) -> dict[str, float]:
        groups, self.answers = self.answers, []
        return train_metrics(groups)

    def check_gold_answer(self, item: CodeProblem) -> str | None:
        return f"<think>Look them up.</think>\n```python\n{lookup_program(item)}\n```"

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        started_at = time.time()
        evaluated = await all_results(self.evaluate_problem(problem) for problem in self.test)
        difficulties = [problem.difficulty for problem in self.test]
        groups = [answers for answers, _ in evaluated]
        metrics = eval_metrics(groups, difficulties, group_size=self.config.group_size)
        await self.evaluate_log(
            metrics=metrics,
            samples=[sample for _, samples in evaluated for sample in samples],
            start_time=started_at,
            end_time=time.time(),
            generation_parameters={
                "temperature": self.config.eval_temperature,
                "top_p": self.config.eval_top_p,
                "max_tokens": self.config.max_eval_token_length,
            },
        )
        await self.wandb_log(metrics)

    async def evaluate_problem(
        self, problem: CodeProblem
    ) -> tuple[list[ProgramAnswer], list[dict[str, Any]]]:
        messages = self.prompt(problem)
        budget = completion_budget(
            self.tokenizer, messages, max_token_length=self.config.max_eval_token_length
        )
        async with self.eval_slots:
            replies = await ask(
                self.server,
                self.tokenizer,
                messages,
                n=NUM_EVAL_SAMPLES,
                max_tokens=budget,
                temperature=self.config.eval_temperature,
                top_p=self.config.eval_top_p,
                split="eval",
            )
        is_cut = [reply.finish_reason == "length" for reply in replies]
        scores = await self.weighed_scores(
            problem,
            [
                self._shown(reply.completion, is_cut=cut)
                for reply, cut in zip(replies, is_cut, strict=True)
            ],
        )
        answers, samples = [], []
        for (text, _), cut, score in zip(replies, is_cut, scores, strict=True):
            answers.append(ProgramAnswer(score.total > 0, cut, len(self.tokenizer.encode(text))))
            chat = [*messages, {"role": "assistant", "content": text}]
            samples.append({"messages": chat, "score": score.total})
        return answers, samples

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})


if __name__ == "__main__":
    CodingEnv.cli()
