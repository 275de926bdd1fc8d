"""The example of an evaluation without an environment, on a scripted engine."""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path

import pytest

from atroposlib.envs.base import APIServerConfig, ServerManager
from environments.eval_environments.aime24_hermes_example import AIME24, SYSTEM_PROMPT, main
from tests.fakes import ScriptedEngine

pytestmark = pytest.mark.slow


async def test_completions_are_counted_as_pass_at_k(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    rows = [{"problem": "What is 6 times 7?", "answer": "42"}, {"problem": "Add.", "answer": 7}]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    # Two of the four completions are 42, none is 7.
    texts = cycle(["\\boxed{42}", "<think>\\boxed{42}</think>", "$\\boxed{42}$", "\\boxed{1}"])
    evaluation = AIME24(
        pass_at_n=2,
        pass_at_n_samples=4,
        temperature=0.6,
        use_system_prompt=True,
        dataset_path=str(data),
        eval_dir=str(tmp_path / "results"),
    )
    async with ScriptedEngine(lambda _: next(texts)) as engine:
        config = APIServerConfig(
            base_url=engine.base_url, model_name="scripted", api_key="x", health_check=False
        )
        manager = ServerManager([config])
        metrics = await evaluation(manager)
        await manager.close()
        bodies = [request.body for request in engine.requests]

    assert metrics["accuracy"] == 0.25  # 2 of 4, 0 of 4
    assert metrics["pass@2"] == pytest.approx((1 - 1 / 6) / 2)  # 1 - C(2,2) / C(4,2)
    assert [body["n"] for body in bodies] == [4, 4]
    assert {body["messages"][0]["content"] for body in bodies} == {SYSTEM_PROMPT}
    report = json.loads((tmp_path / "results" / "metrics.json").read_text())
    assert "atropos|AIME24@2:4|0" in report["results"]
    samples = (tmp_path / "results" / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["gold"] for line in samples] == ["42", "7"]


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--server-ur", 2)])
def test_flags_are_read_before_the_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, code: int
) -> None:
    monkeypatch.setattr(AIME24, "setup_data", lambda _: pytest.fail("the data was loaded"))
    monkeypatch.setattr(sys, "argv", ["aime24_hermes_example.py", word])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == code
    said = capsys.readouterr()
    assert "--server-url" in said.out + said.err
    assert code or "Evaluate a model on AIME 2024." in said.out
