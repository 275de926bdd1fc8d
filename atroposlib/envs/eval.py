"""Evaluations outside an environment, and the files of evaluation results.

setup_data -> run_item x all, concurrently -> mean per metric -> metrics.json, samples.jsonl
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from atroposlib.envs.evaluation_statistics import pass_at_k
from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError
from atroposlib.utils.command_parser import CommandParser
from atroposlib.utils.display import display_metrics_table
from atroposlib.utils.json_text import to_plain

__all__ = [
    "EvalBase",
    "eval_runner",
    "evaluate_log",
    "logger",
    "pass_at_k",
]

logger = logging.getLogger(__name__)


def evaluate_log(
    metrics: Mapping[str, Any],
    eval_dir: str | Path | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, Any] | None = None,
    samples: Sequence[Any] | None = None,
    verbose: bool = True,
) -> None:
    """Write and print the result of one evaluation.

    `metrics.json` and `samples.jsonl` are the latest result; earlier results are renamed to
    `metrics-1.json`, `samples-1.jsonl`, then `-2` and so on.

    Args:
        metrics: name to value; may be empty.
        eval_dir: folder to write to, created if missing; None only logs a warning.
        task_name: name of the results: `atropos|<task_name>|0`.
        model_name: name of the model.
        start_time: seconds since the epoch; None means now.
        end_time: seconds since the epoch; None means now.
        generation_parameters: sampling settings.
        samples: one JSON value per item; values without a JSON form are converted to text.
        verbose: Whether to print a table of the metrics.
    """
    started = time.time() if start_time is None else start_time
    ended = time.time() if end_time is None else end_time
    if verbose:
        display_metrics_table(task_name, metrics, started, ended)
    if eval_dir is None:
        logger.warning("evaluation results are not saved: no folder given (data_dir_to_save_evals)")
        return

    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _keep_earlier_result(folder)
    report = {
        "config_general": {
            "model_name": model_name,
            "total_evaluation_time_seconds": str(ended - started),
            "generation_parameters": dict(generation_parameters or {}),
        },
        "results": {f"atropos|{task_name}|0": dict(metrics), "all": dict(metrics)},
    }
    text = json.dumps(report, indent=2, default=_as_text)
    (folder / "metrics.json").write_text(text + "\n", encoding="utf-8")
    if samples:
        with (folder / "samples.jsonl").open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(sample, default=_as_text) + "\n")
    logger.info("evaluation results are in %s", folder)


def _keep_earlier_result(folder: Path) -> None:
    number = 1
    while any((folder / f"{stem}-{number}{suffix}").exists() for stem, suffix in _FILES):
        number += 1
    for stem, suffix in _FILES:
        latest = folder / f"{stem}{suffix}"
        if latest.exists():
            latest.rename(folder / f"{stem}-{number}{suffix}")


_FILES = (("metrics", ".json"), ("samples", ".jsonl"))


def _as_text(value: Any) -> Any:
    try:
        return to_plain(value)
    except TypeError:
        return str(value)


class EvalBase(ABC):
    """One evaluation; implement `setup_data` and `run_item`, then call and await an instance.

    `temperature`, `top_p` and `max_tokens` are sent with each request. `eval_dir` and `verbose` are
    those of `evaluate_log`.

    Args:
        pass_at_n: Number of attempts per item.
        pass_at_n_samples: Number of completions per item, if larger; for a better estimate.
        **kwargs: Attributes of this instance.

    Example:
        asyncio.run(eval_runner(Arithmetic(pass_at_n=1, temperature=0.6, eval_dir="results")))
    """

    eval_dir: str | None = None
    verbose: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = -1

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **kwargs: Any) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """Return the items; called once by the constructor, after the attributes are set."""

    @abstractmethod
    async def run_item(self, server: Any, data_item: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Evaluate the model on one item.

        Args:
            server: The argument of the instance's call, usually a `ServerManager`.
            data_item: An item of `setup_data`.

        Returns:
            Metrics by name, with the same names for every item, and a record for `samples.jsonl`.
        """

    def get_generation_params(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "n": max(self.pass_at_n_samples, self.pass_at_n),
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }

    async def chat_completion(self, server: Any, messages: list[Any]) -> Any:
        return await server.chat_completion(messages=messages, **self.get_generation_params())

    async def __call__(self, server_manager: Any) -> dict[str, Any]:
        """Run all items concurrently; write, print and return the averages.

        Raises:
            ConfigError: `setup_data` returned no items.
            Exception: The first exception of an item.
        """
        if not self.data:
            raise ConfigError(f"{type(self).__name__}.setup_data returned no items")
        started = time.time()
        results = await asyncio.gather(*(self.run_item(server_manager, i) for i in self.data))
        metrics = _averages([result[0] for result in results])
        more = f":{self.pass_at_n_samples}" if self.pass_at_n_samples != self.pass_at_n else ""
        evaluate_log(
            metrics,
            eval_dir=self.eval_dir,
            task_name=f"{type(self).__name__}@{self.pass_at_n}{more}",
            model_name=server_manager.servers[0].config.model_name,
            start_time=started,
            end_time=time.time(),
            generation_parameters=self.get_generation_params(),
            samples=[result[1] for result in results],
            verbose=self.verbose,
        )
        print(metrics)  # noqa: T201 - the result of the program
        return metrics


def _averages(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for position, row in enumerate(rows):
        missing = ", ".join(rows[0].keys() - row.keys())
        if missing:
            raise ConfigError(f"item {position} has no metric {missing}, which item 0 has")
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


async def eval_runner(eval_env: EvalBase | Callable[[], EvalBase]) -> dict[str, Any]:
    """Run an evaluation on the server of `--server-url` and `--model-name`; return its metrics.

    Args:
        eval_env: The evaluation; or a class or function that returns it, which is called after the
            flags are read, so that `--help` loads no data.
    """
    makes_it = inspect.isclass(eval_env) or inspect.isfunction(eval_env)
    described = eval_env if makes_it else type(eval_env)
    parser = CommandParser(description=(described.__doc__ or "").partition("\n")[0])
    parser.add_argument("--server-url", default="http://localhost:8000", help="%(default)s")
    parser.add_argument("--model-name", default=None, help="as the server knows it")
    arguments = parser.parse_args()
    config = APIServerConfig(
        api_key="dummy",  # pragma: allowlist secret
        base_url=arguments.server_url,
        model_name=arguments.model_name or "default",
        health_check=False,
    )
    evaluation = cast("EvalBase", eval_env() if makes_it else eval_env)  # type: ignore[call-arg]
    manager = ServerManager([config])
    try:
        return await evaluation(manager)
    finally:
        await manager.close()
