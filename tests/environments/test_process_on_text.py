"""`process` of every shipped environment on a provider of chats that reports no token ids."""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.scored_data import IGNORE_INDEX, check_group
from atroposlib.utils.aio import settle
from environments.card_table import PAGE, find_cards
from tests.environments.offline import read_groups, run_process
from tests.fakes import CharTokenizer, ScriptedEngine

pytestmark = pytest.mark.slow

CARDS = find_cards()
FEW = ("gsm8k_server.py", "mcqa_thinking_env.py", "tool_calling_server.py", "rlaif_server.py")
"""One each with a number, a choice, a tool call and a judge."""
WITHOUT_A_MODEL = ("sft_loader_server.py",)
REST = [path for path in CARDS if path not in FEW + WITHOUT_A_MODEL]
GROUP_SIZE = 4
WRONG = "I do not know."


def env_class(path: str) -> type[BaseEnv]:
    """The environment that a script runs."""
    source = (PAGE.parent / path).read_text(encoding="utf-8")
    name = re.findall(r"^\s+(\w+)\.cli\(\)", source, re.MULTILINE)[-1]
    module = importlib.import_module("environments." + path.removesuffix(".py").replace("/", "."))
    found: type[BaseEnv] = getattr(module, name)
    return found


def flags_of(path: str) -> dict[str, Any]:
    """The settings of the environment in the command of its card."""
    words = shlex.split(CARDS[path].command)[1:]
    pairs = zip(words[::2], words[1::2], strict=True)
    return {
        name.removeprefix("--env."): None if value == "None" else value for name, value in pairs
    }


class Player:
    """Writes the gold answer and a wrong one by turns, and verdicts where it is the judge."""

    def __init__(self) -> None:
        self.env: Any = None
        self.gold: Any = None
        self.said: set[str] = set()
        self._count = itertools.count()

    def watch(self, env: Any) -> None:
        """Look up the gold answer of every item that the environment takes."""
        self.env = env
        take = env.get_next_item

        async def get_next_item() -> Any:
            item = await settle(take())
            self.gold = await settle(env.check_gold_answer(item))
            return item

        env.get_next_item = get_next_item

    def __call__(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        text = self._verdict(body) or self._answer(body)
        self.said.add(text.strip())
        return {"content": text}

    def _verdict(self, body: Mapping[str, Any]) -> str | None:
        judge = getattr(self.env, "check_judge_reply", None)
        verdict: str | None = judge(body["messages"]) if judge is not None else None
        return verdict

    def _answer(self, body: Mapping[str, Any]) -> str:
        if self.gold is None or next(self._count) % 2:
            return WRONG
        turns = [self.gold] if isinstance(self.gold, str) else list(self.gold)
        num_turns = sum(message["role"] == "assistant" for message in body["messages"])
        return str(turns[min(num_turns, len(turns) - 1)])


@pytest.mark.parametrize("path", [*FEW, *(pytest.param(p, marks=pytest.mark.long) for p in REST)])
async def test_groups_hold_the_text_of_the_provider_and_say_so(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "bubblewrap" in CARDS[path].needs and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    for package in ("diplomacy", "smolagents", "textworld", "verifiers"):
        if package in CARDS[path].needs:
            pytest.importorskip(package)
    from transformers import AutoTokenizer

    load = AutoTokenizer.from_pretrained

    def load_tokenizer(name: str, **options: Any) -> Any:
        # A reward model on disk has a tokenizer of its own.
        return load(name, **options) if Path(name).is_dir() else CharTokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load_tokenizer)
    monkeypatch.chdir(PAGE.parents[1])  # the commands of the cards name files from there
    player = Player()
    async with ScriptedEngine(messages=player, offers_completions=False) as provider:
        env = make_environment(path, provider, tmp_path)
        player.watch(env)
        await run_process(env, num_groups=1, group_size=GROUP_SIZE)
        await env.server.close()

    groups = read_groups(tmp_path / "groups.jsonl")
    assert groups
    for group in groups:
        check_group(group)
        assert group["tokenized_from_text"] is True
        assert group.get("inference_logprobs") is None
        for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
            assert _trained(tokens, masks) <= player.said
            assert any(mask != IGNORE_INDEX for mask in masks)


def make_environment(path: str, provider: ScriptedEngine, folder: Path) -> Any:
    """The environment of a card with the settings of its command, on a provider of chats."""
    kind = env_class(path)
    defaults, _ = kind.config_init()
    settings: dict[str, Any] = {
        **getattr(kind, "check_settings", {}),
        **flags_of(path),
        "use_wandb": False,
        "num_score_workers": 1,
        "max_token_length": 60_000,
        "ensure_scores_are_not_same": False,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
        "metrics_path": str(folder / "metrics.jsonl"),
        "include_messages": True,
    }
    for name, value in settings.items():  # a list of one name, on the command line
        if isinstance(getattr(defaults, name, None), list) and isinstance(value, str):
            settings[name] = [value]
    server = APIServerConfig(base_url=provider.base_url, model_name="any-model", health_check=False)
    assert server.server_type == "openai"
    return kind(config=type(defaults)(**{**dict(defaults), **settings}), server_configs=[server])


def _trained(tokens: list[int], masks: list[int]) -> set[str]:
    """The replies that are trained on."""
    runs: list[list[int]] = [[]]
    for token, mask in zip(tokens, masks, strict=True):
        if mask == IGNORE_INDEX:
            runs.append([])
        else:
            runs[-1].append(token)
    texts = (CharTokenizer().decode(run, skip_special_tokens=True).strip() for run in runs)
    return {text for text in texts if text}
