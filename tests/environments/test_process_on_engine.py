"""`process` of every environment of text, as its card tells it, on one real vLLM.

The model is of random weights: what it writes is noise that ends by itself. So nothing here is
about scores; the groups must be well-formed, the page must show them, and noise must raise nothing.
"""

from __future__ import annotations

import json
import math
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.envs import offline as env_offline
from atroposlib.scored_data import check_group
from environments.card_table import PAGE, find_cards
from tests.end_to_end.conftest import EngineWithModel, serve_with_vllm
from tests.environments.offline import read_groups

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(600),  # the first one starts the engine
    pytest.mark.filterwarnings("default"),  # commands and the packages they load warn users
]

ENVIRONMENTS = PAGE.parent
NEED_RIGHT_ANSWERS = (
    "answer_format_environment/answer_format_environment.py",
    "community/goofy_math/goofy_math_env.py",
    "community/humor_generation/humor_generation_env.py",
    "community/meteorology_forecast/meteorology_forecast_env.py",
    "letter_counting_environment/letter_counting_environment.py",
    "math_server.py",
    "math_server_zero.py",
    "pydantic_schema_following_environment/pydantic_schema_following_environment.py",
    "rlaif_server.py",
    "tool_use_turnlevel_advantage_server.py",
)
"""They make no group where no answer is right, or no judge gives a verdict; noise does neither."""
BY_CHANCE = ("community/philosophical_rlaif_env.py",)
"""An empty answer loses without a judge, so that noise makes a group or not."""
SEVERAL_SERVERS = (
    "game_environments/diplomacy_environment/diplomacy_env_minimal.py",
    "mcp_env.py",
)
BOTH_SIDES_HOT = ("--env.chosen_temperature", "1", "--env.rejected_temperature", "1")
EXTRA_WORDS = {
    "community/conversational_style_dpo/conversational_style_dpo_env.py": BOTH_SIDES_HOT,
    "community/conversational_style_dpo/gsm8k_conversational_style_dpo_env.py": BOTH_SIDES_HOT,
}
"""At a low temperature the noise ends at its first token, and a pair needs two texts."""
NEED_IMAGES = ("community/ufc_prediction_env/ufc_image_env.py", "multimodal_dpo/")
"""The model reads text alone."""
PATHS = [
    path
    for path, card in find_cards().items()
    if path not in NEED_RIGHT_ANSWERS + BY_CHANCE
    and not path.startswith(NEED_IMAGES)
    # Their defaults have several servers, which one tokenizer flag cannot set.
    and path not in SEVERAL_SERVERS
    if card.command.startswith("process ")
]
EVALUATIONS = [path for path, card in find_cards().items() if card.command.startswith("evaluate ")]

JUDGED_METRICS = ("avg_score", "overall_winrate", "overall_refusal_rate", "scored_rate")

MAX_TOKENS = 8192
GROUP_SIZE, NUM_GROUPS = 3, 2
TOKENS_PER_TURN = 20


@pytest.fixture(scope="module")
def noisy_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineWithModel]:
    folder = tmp_path_factory.mktemp("noisy_model")
    _save_noisy_model(folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    with serve_with_vllm(folder, tokenizer, max_model_len=2 * MAX_TOKENS) as engine:
        yield engine


def _save_noisy_model(folder: Path) -> None:
    """Save a random model that ends a turn after `TOKENS_PER_TURN` tokens on average."""
    import torch

    from example_trainer.demo.settings import (
        TinyModelShape,
        build_model,
        save_tiny_model,
        train_tokenizer,
    )

    # The prompts are constants of the modules.
    texts = [path.read_text(encoding="utf-8") for path in sorted(ENVIRONMENTS.rglob("*.py"))]
    lines = [[{"role": "user", "content": line}] for text in texts for line in text.splitlines()]
    tokenizer = train_tokenizer(lines, max_length=2 * MAX_TOKENS)
    shape = TinyModelShape(hidden_size=64, num_layers=2, num_heads=2, max_length=2 * MAX_TOKENS)
    model = build_model(tokenizer, shape, seed=0)
    with torch.no_grad():
        # One number of the residual stream outweighs the others and is the same at every
        # position: after the last norm it is sqrt(64) = 8, so its output weight acts as a bias.
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        odds = len(tokenizer) / (TOKENS_PER_TURN - 1)
        model.lm_head.weight[tokenizer.eos_token_id, 0] = math.log(odds) / 8
    save_tiny_model(model, tokenizer, folder)


@pytest.mark.parametrize("path", PATHS)
def test_process_of_a_card_writes_groups_and_their_page(
    path: str,
    noisy_engine: EngineWithModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "bubblewrap" in find_cards()[path].needs and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    for package in ("diplomacy", "smolagents", "textworld", "verifiers"):
        if package in find_cards()[path].needs:
            pytest.importorskip(package)

    code = _run(path, _words(path, noisy_engine, tmp_path), monkeypatch)

    output = capsys.readouterr()
    assert code == 0, output.err
    assert "Traceback" not in output.err
    groups = read_groups(tmp_path / "groups.jsonl")
    # An episode of several turns may be several groups.
    assert len(groups) >= NUM_GROUPS, output.err
    for group in groups:
        check_group(group)
        assert len(group["messages"]) == len(group["tokens"])
    assert output.out.splitlines()[-1].startswith(f"wrote {len(groups)} groups to ")
    page = (tmp_path / "groups.html").read_text(encoding="utf-8")
    assert page.count('<details class="group"') == len(groups)


@pytest.mark.parametrize("path", NEED_RIGHT_ANSWERS)
def test_process_of_a_card_without_a_right_answer_says_so_alone(
    path: str,
    noisy_engine: EngineWithModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(env_offline, "MAX_EMPTY_GROUPS_IN_A_ROW", 2)

    code = _run(path, _words(path, noisy_engine, tmp_path), monkeypatch)

    output = capsys.readouterr()
    assert code == 1, output.err
    assert "error: 2 items in a row gave no data" in output.err.splitlines()[-1]
    assert output.out == ""
    assert not (tmp_path / "groups.html").exists()


@pytest.mark.parametrize("path", EVALUATIONS)
def test_evaluate_of_a_card_counts_noise_as_wrong(
    path: str,
    noisy_engine: EngineWithModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = _words(path, noisy_engine, tmp_path)
    words += ["--env.data_dir_to_save_evals", str(tmp_path), "--env.eval_max_tokens", "200"]
    words += ["--env.eval_samples_per_item", "2", "--openai.server_type", "openai"]

    code = _run(path, words, monkeypatch)

    output = capsys.readouterr()
    assert code == 0, output.err
    assert "Traceback" not in output.err
    metrics = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    # Evaluations name their metrics with or without the prefix.
    metrics = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    assert metrics["total_evaluated"] == len(read_groups(tmp_path / "samples.jsonl")) >= 10
    if "total_correct" in metrics:
        # A letter may be right by chance.
        assert metrics["total_correct"] <= metrics["total_evaluated"] / 2
    else:
        # Noise as a judge gives no verdict, and noise has no phrase of a refusal.
        assert [metrics[name] for name in JUDGED_METRICS if name in metrics] == [0.0]
    assert 0 <= metrics["pass_at_2"] <= 1


def _run(path: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Run a script as its command line would; returns the exit code.

    In this process, which has loaded what takes seconds to load.
    """
    script = ENVIRONMENTS / path
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.chdir(ENVIRONMENTS.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code


def _words(path: str, engine: EngineWithModel, folder: Path) -> list[str]:
    """What to type for the smallest run of an environment."""
    return [
        *shlex.split(find_cards()[path].command),
        *("--env.total_steps", str(NUM_GROUPS), "--env.group_size", str(GROUP_SIZE)),
        *("--env.max_token_length", str(MAX_TOKENS), "--env.use_wandb", "false"),
        *("--env.tokenizer_name", str(engine.folder)),
        *("--env.data_path_to_save_groups", str(folder / "groups.jsonl")),
        *("--env.metrics_path", str(folder / "metrics.jsonl")),
        *("--openai.base_url", engine.base_url, "--openai.model_name", engine.model_name),
        *("--openai.server_type", "vllm", "--openai.tokenizer_name", str(engine.folder)),
        *EXTRA_WORDS.get(path, ()),
    ]
