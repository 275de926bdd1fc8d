"""Deep research: questions answered from pages that are searched, opened and cited.

    question -> search, open, find ... -> answer with citations -> right? borne out? how many calls?

Pages come from a corpus on disk, or from a search service. Rules and reward: README.md beside this
file. Without a hub, with a vLLM server on port 9001:

    python environments/deep_research/deep_research_environment.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from atroposlib.envs.local_items import LocalItems, LocalItemsConfig
from atroposlib.envs.multi_turn import Limits, Rollout
from atroposlib.envs.multi_turn_env import MultiTurnEnv, MultiTurnEnvConfig
from environments.deep_research.research import ResearchConversation
from environments.deep_research.scoring import Question, Verdict
from environments.deep_research.search import LocalCorpus, SearchSource
from environments.shared.card import EnvironmentCard

__all__ = ["DeepResearchEnv", "DeepResearchEnvConfig"]

CARD = EnvironmentCard(
    task="answer questions from pages that are searched, opened and cited",
    turns="up to 10",
    reward="0.4 right, 0.4 borne out by citations, 0.2 few calls; a false citation -0.2",
    data="40 pages and 16 questions of this repository, or local files; the web by configuration",
    needs="`atroposlib[examples]`",
    command="process --env.total_steps 4",
)

SAMPLE = Path(__file__).parents[1] / "data" / "deep_research_sample"


class DeepResearchEnvConfig(LocalItemsConfig, MultiTurnEnvConfig):
    """Where questions and pages come from, and the limits of the research."""

    dataset_path: str = Field(
        str(SAMPLE),
        description="JSONL, JSON or Parquet file, or folder with a train and a test file, with the "
        "columns question, answers, pages, quotes.",
    )
    search_provider: Literal["local", "tavily"] = Field(
        "local", description="Search the corpus, or the web with the key in TAVILY_API_KEY."
    )
    corpus_path: str = Field(
        str(SAMPLE / "corpus.jsonl"),
        description="JSONL, JSON or Parquet file of pages, with the columns id, title, text.",
    )
    search_url: str = Field("https://api.tavily.com", description="Address of the search service.")
    blocked_domains: list[str] = Field(
        default_factory=list, description="Domains whose pages are neither found nor opened."
    )
    max_steps: int = Field(10, ge=1, description="Turns of the policy in one rollout.")
    tool_timeout: float = Field(15.0, gt=0, description="Seconds one tool call may take.")
    thinking_active: bool = Field(True, description="Tell the policy that it may think in tags.")
    eval_topics: int = Field(30, ge=0, description="Questions of an evaluation at most.")
    temperature: float = Field(0.7, ge=0, description="Sampling temperature of rollouts.")


class DeepResearchEnv(LocalItems, MultiTurnEnv):
    """Questions and a source of pages.

    Attributes:
        source: where pages come from; set by `setup`.
    """

    name = "deep_research"
    columns: ClassVar[Sequence[str]] = ("question", "answers", "pages", "quotes")
    env_config_cls = DeepResearchEnvConfig
    config: DeepResearchEnvConfig  # type: ignore[assignment]
    default_model = "Qwen/Qwen3-0.6B"
    default_settings: ClassVar[dict[str, Any]] = {"group_size": 8, "max_token_length": 16384}
    source: SearchSource | None = None

    async def setup(self) -> None:
        """Read the questions and make the source ready."""
        await super().setup()
        if self.config.search_provider == "local":
            self.source = await asyncio.to_thread(LocalCorpus.load, Path(self.config.corpus_path))
            return
        from environments.deep_research.web_search import TavilySearch

        self.source = TavilySearch(
            os.environ,
            base_url=self.config.search_url,
            timeout_s=self.config.tool_timeout,
            blocked_domains=self.config.blocked_domains,
        )

    def eval_items(self) -> Sequence[dict[str, Any]]:
        """Return the first test questions."""
        return super().eval_items()[: self.config.eval_topics]

    def start_conversation(self, item: dict[str, Any]) -> ResearchConversation:
        """Ask a question."""
        if self.source is None:
            raise RuntimeError("setup has not been awaited: there is no source of pages")
        return ResearchConversation(
            Question(**item),
            self.source,
            max_steps=self.config.max_steps,
            tool_timeout_s=self.config.tool_timeout,
            is_thinking=self.config.thinking_active,
        )

    def limits(self) -> Limits:
        """Return the limits, with that of this environment on turns."""
        return dataclasses.replace(super().limits(), max_turns=self.config.max_steps)

    def metrics_of(self, rollouts: Sequence[Rollout], area: str) -> dict[str, float]:
        """Add how the research went."""
        if not rollouts:
            return {}
        played = [
            r.conversation for r in rollouts if isinstance(r.conversation, ResearchConversation)
        ]
        verdicts = [conversation.verdict or Verdict(0.0) for conversation in played]
        return {
            **super().metrics_of(rollouts, area),
            f"{area}/percent_correct": statistics.fmean(v.is_right for v in verdicts),
            f"{area}/avg_support": statistics.fmean(v.support for v in verdicts),
            f"{area}/avg_false_citations": statistics.fmean(v.num_fakes for v in verdicts),
            f"{area}/avg_calls": statistics.fmean(len(c.results) for c in played),
            f"{area}/avg_steps": statistics.fmean(len(r.rewards) for r in rollouts),
            f"{area}/completion_rate": statistics.fmean(c.verdict is not None for c in played),
        }

    def check_gold_answer(self, item: dict[str, Any]) -> Sequence[str]:
        """Return the turns of a straight way: search and open each page, then answer."""
        turns = []
        for page in item["pages"]:
            turns.append(_call("search", query=page.replace("-", " ")))
            turns.append(_call("open", page=page))
        cited = [
            f'<cite page="{page}">{quote}</cite>'
            for page, quote in zip(item["pages"], item["quotes"], strict=True)
        ]
        return [*turns, "\n".join([f"<answer>{item['answers'][0]}</answer>", *cited])]

    async def close(self) -> None:
        """Close the source."""
        if self.source is not None:
            await self.source.close()
        await super().close()


def _call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


if __name__ == "__main__":
    DeepResearchEnv.cli()
