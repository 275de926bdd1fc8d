"""Evaluations outside of an environment."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.envs import eval as module
from atroposlib.envs.eval import EvalBase, eval_runner, evaluate_log, pass_at_k
from atroposlib.errors import ConfigError


@pytest.mark.parametrize(
    ("m", "c", "k", "chance"),
    [
        (5, 2, 1, 0.4),  # one try, two of five are right
        (5, 5, 2, 1.0),
        (5, 0, 5, 0.0),
        (10, 3, 4, 5 / 6),  # 1 - C(7,4)/C(10,4) = 1 - 35/210
        (1, 1, 1, 1.0),
        (3, 2, 2, 1.0),  # only one is wrong, so two tries always hit
    ],
)
def test_pass_at_k_table(m: int, c: int, k: int, chance: float) -> None:
    assert pass_at_k(m, c, k) == pytest.approx(chance)


class Arithmetic(EvalBase):
    """Sums of small numbers."""

    def setup_data(self) -> list[Any]:
        return [{"a": 1}, {"a": 2}]

    async def run_item(self, server: Any, data_item: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        reply = await self.chat_completion(server, [{"role": "user", "content": "?"}])
        return {"eval/acc": data_item["a"] - 1, "eval/a": data_item["a"]}, [data_item["a"], reply]


class Servers:
    """Stands in for a manager; notes what is asked."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.servers = [SimpleNamespace(config=SimpleNamespace(model_name="m"))]

    async def chat_completion(self, **kwargs: Any) -> str:
        self.asked.append(kwargs)
        return "reply"


async def test_call_averages_writes_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = Servers()
    evaluation = Arithmetic(pass_at_n=2, pass_at_n_samples=8, temperature=0.6, eval_dir=tmp_path)

    metrics = await evaluation(servers)

    parameters = {"temperature": 0.6, "n": 8, "top_p": 1.0, "max_tokens": -1}
    messages = [{"role": "user", "content": "?"}]
    assert metrics == {"eval/acc": 0.5, "eval/a": 1.5}
    assert servers.asked == [{"messages": messages, **parameters}] * 2
    report = json.loads((tmp_path / "metrics.json").read_text())
    assert report["results"] == {"atropos|Arithmetic@2:8|0": metrics, "all": metrics}
    assert report["config_general"]["model_name"] == "m"
    assert report["config_general"]["generation_parameters"] == parameters
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[1, "reply"], [2, "reply"]]
    assert capsys.readouterr().out == f"{metrics}\n"


async def test_call_as_many_samples_as_tries_leaves_them_out_of_the_name(tmp_path: Path) -> None:
    await Arithmetic(pass_at_n=4, pass_at_n_samples=4, eval_dir=tmp_path)(Servers())

    report = json.loads((tmp_path / "metrics.json").read_text())
    assert "atropos|Arithmetic@4|0" in report["results"]


async def test_call_without_a_folder_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert await Arithmetic()(Servers()) == {"eval/acc": 0.5, "eval/a": 1.5}
    assert "not saved" in caplog.text


async def test_call_verbose_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await Arithmetic(eval_dir=tmp_path, verbose=True)(Servers())

    assert "Arithmetic@1" in capsys.readouterr().out


async def test_call_without_items_says_so() -> None:
    class Empty(Arithmetic):
        def setup_data(self) -> list[Any]:
            return []

    with pytest.raises(ConfigError, match=r"Empty\.setup_data returned no items"):
        await Empty()(Servers())


async def test_call_item_without_a_metric_is_named() -> None:
    class Uneven(Arithmetic):
        async def run_item(self, server: Any, data_item: Any) -> Any:
            return {f"m{i}": 1 for i in range(3 - data_item["a"])}, []

    with pytest.raises(ConfigError, match="item 1 has no metric m1"):
        await Uneven()(Servers())


def test_constructor_sets_attributes_before_the_data_is_made() -> None:
    class Sized(Arithmetic):
        def setup_data(self) -> list[Any]:
            return [{}] * self.size  # type: ignore[attr-defined]

    evaluation = Sized(size=3, max_tokens=5, top_p=0.5)

    assert len(evaluation.data) == 3
    assert evaluation.get_generation_params() == {
        "temperature": 0.0,
        "n": 1,
        "top_p": 0.5,
        "max_tokens": 5,
    }


def test_abstract_methods_are_exactly_two() -> None:
    assert EvalBase.__abstractmethods__ == {"setup_data", "run_item"}
    assert list(inspect.signature(EvalBase.run_item).parameters) == ["self", "server", "data_item"]


@pytest.mark.parametrize(
    ("words", "url", "model"),
    [
        ([], "http://localhost:8000", "default"),
        (["--server-url", "http://x/v1", "--model-name", "big"], "http://x/v1", "big"),
    ],
)
async def test_eval_runner_builds_one_server(
    monkeypatch: pytest.MonkeyPatch, words: list[str], url: str, model: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", *words])
    seen: list[Any] = []

    class Looking(Arithmetic):
        async def __call__(self, server_manager: Any) -> dict[str, Any]:
            seen.extend(server.config for server in server_manager.servers)
            return {"eval/acc": 1.0}

    assert await eval_runner(Looking()) == {"eval/acc": 1.0}

    [config] = seen
    assert (config.base_url, config.model_name, config.health_check) == (url, model, False)
    assert config.api_key == "dummy"  # pragma: allowlist secret


async def test_eval_runner_help_describes_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["arithmetic.py", "--help"])

    with pytest.raises(SystemExit) as ended:
        await eval_runner(Arithmetic())

    assert ended.value.code == 0
    assert "Sums of small numbers." in capsys.readouterr().out


def test_evaluate_log_is_the_one_of_environments() -> None:
    from atroposlib.envs import eval as eval_log

    assert evaluate_log is eval_log.evaluate_log
    assert list(inspect.signature(evaluate_log).parameters) == [
        *("metrics", "eval_dir", "task_name", "model_name", "start_time", "end_time"),
        *("generation_parameters", "samples", "verbose"),
    ]
    assert module.logger.name == "atroposlib.envs.eval"
