"""Blackjack with thinking: each decision is sampled G times, and the best reply is played.

    seed ─► hand ─► G replies ─► Q* - V* + form ─► a group ─┐
              ▲                       best reply ─► table ──┴─► next hand, until the game is over

Each decision is a group, scored against the exact value of the hand (`atroposlib.tasks.blackjack`).
Only the reply is trained. The thinking of earlier replies is shortened in the chat. Needs
gymnasium, no data:

    python environments/game_environments/gymnasium/blackjack/blackjack_env_thinking.py process \
        --env.total_steps 4 --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from atroposlib.envs.base import APIServerConfig, BaseEnv, ScoredDataGroup
from atroposlib.envs.single_turn_env import Answer, complete
from atroposlib.tasks.blackjack import (
    PREFILL,
    BlackjackEnvConfig,
    GameRecord,
    PlayedGame,
    Prompt,
    ScoredReply,
    Table,
    best_action,
    evaluation_metrics,
    fit_prompt,
    score_reply,
    training_metrics,
)
from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.games import NUM_TRAINING_SEEDS, evaluation_seeds, load_gymnasium
from atroposlib.tasks.single_turn_parts import deep_hermes_settings
from atroposlib.utils.aio import all_results
from atroposlib.utils.best_of_n_selection import select_best_index

__all__ = ["BlackjackEnv", "BlackjackEnvConfig"]

logger = logging.getLogger("environments.blackjack")

CARD = EnvironmentCard(
    task="play blackjack, one call of a tool per decision",
    turns="up to 5",
    reward="per decision, its value minus that of the best one; form, up to 0.4 either way",
    data="made on the spot",
    needs="`pip install '.[examples]'`",
    command="process --env.total_steps 4",
)


class Replies(NamedTuple):
    """The G replies to a hand."""

    group: ScoredDataGroup
    texts: list[str]
    """[G] texts, prefill included."""
    scored: list[ScoredReply]
    """[G]"""
    best: int
    """Index of the reply that is played."""


class BlackjackEnv(BaseEnv):
    """Games of blackjack; an item is `(seed, 0)`.

    Attributes:
        iter: training games started; kept in checkpoints.
        games_since_log: games finished since the last log.
    """

    env_config_cls = BlackjackEnvConfig
    config: BlackjackEnvConfig
    check_settings: ClassVar[dict[str, Any]] = {"max_turns": 1, "eval_episodes": 4}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.iter = 0
        self.games_since_log: list[GameRecord] = []

    @classmethod
    def config_init(cls) -> tuple[BlackjackEnvConfig, APIServerConfig]:
        return deep_hermes_settings(
            BlackjackEnvConfig,
            max_num_workers=128,
            total_steps=2000,
            steps_per_eval=20,
            max_token_length=16384,
        )

    async def setup(self) -> None:
        await asyncio.to_thread(load_gymnasium)

    async def get_next_item(self) -> tuple[int, int]:
        seed = self.iter % NUM_TRAINING_SEEDS
        self.iter += 1
        return seed, 0

    async def collect_trajectories(
        self, item: tuple[int, int]
    ) -> tuple[list[ScoredDataGroup], list[Any]]:
        game = PlayedGame(self.config, seed=item[0])
        groups: list[ScoredDataGroup] = []
        while game.goes_on:
            prompt = self._prompt(game)
            if prompt is None:
                logger.warning("game of seed %d ended: no room for a reply", item[0])
                break
            replies = await self._sample(game.table, prompt)
            groups.append(replies.group)
            game.play(replies.texts[replies.best], replies.scored[replies.best])
        self.games_since_log.append(game.record())
        return groups, []

    async def _sample(self, table: Table, prompt: Prompt) -> Replies:
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answers = await complete(
                managed,
                prompt.text,
                prefill=PREFILL if self.config.thinking_active else "",
                chat=prompt.messages,
                n=self.config.group_size,
                max_tokens=prompt.budget,
                **self._sampling(),
            )
            nodes = managed.get_state()["nodes"]
        pairs = [
            self._score(table, answer, num_tokens=len(node.tokens) - prompt.num_tokens)
            for answer, node in zip(answers, nodes, strict=True)
        ]
        texts, scored = [text for text, _ in pairs], [score for _, score in pairs]
        scores = [reply.score for reply in scored]
        group: ScoredDataGroup = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": scores,
            "generation_params": self._sampling(),
        }
        if self.config.include_messages:
            group["messages"] = [
                [*prompt.chat, {"role": "agent", "content": text}] for text in texts
            ]
        best = select_best_index(scores, [len(node.tokens) for node in nodes])
        return Replies(group, texts, scored, best)

    def _score(self, table: Table, answer: Answer, *, num_tokens: int) -> tuple[str, ScoredReply]:
        reply = answer.completion
        scored = score_reply(
            table.hand,
            reply,
            rules=table.rules,
            thinking_active=self.config.thinking_active,
            is_cut=answer.finish_reason == "length",
            length_share=num_tokens / self.config.max_token_length,
            tiebreak_factor=self.config.tiebreak_token_factor,
        )
        return reply, scored

    def _prompt(self, game: PlayedGame) -> Prompt | None:
        limit = min(self.config.max_token_length, self.config.max_trajectory_tokens)
        if self.max_token_len > 0:
            limit = min(limit, self.max_token_len)
        return fit_prompt(
            game.chat,
            self.tokenizer,
            limit=limit,
            thinking_active=self.config.thinking_active,
        )

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        started_at = time.time()
        seeds = evaluation_seeds(self.config.eval_episodes)
        games = await all_results(self._play_for_evaluation(seed) for seed in seeds)
        if not games:
            return
        metrics = evaluation_metrics(games)
        await self.evaluate_log(
            metrics=metrics,
            samples=[
                {"messages": game.messages, "score": game.reward, "num_turns": game.num_turns}
                for game in games
            ],
            start_time=started_at,
            end_time=time.time(),
            generation_parameters=self._sampling(),
        )
        await self.wandb_log(metrics)

    async def _play_for_evaluation(self, seed: int) -> GameRecord:
        game = PlayedGame(self.config, seed=seed)
        while game.goes_on:
            prompt = self._prompt(game)
            if prompt is None:
                break
            [answer] = await complete(
                self.server,
                prompt.text,
                prefill=PREFILL if self.config.thinking_active else "",
                chat=prompt.messages,
                n=1,
                max_tokens=prompt.budget,
                split="eval",
                **self._sampling(),
            )
            game.play(*self._score(game.table, answer, num_tokens=0))
        return game.record()

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {} if wandb_metrics is None else wandb_metrics
        games, self.games_since_log = self.games_since_log, []
        # The base class prefixes every name with `wandb_prepend` and an underscore.
        area = "train" if self.wandb_prepend is not None else "blackjack_train"
        latest = training_metrics(games)
        metrics.update({f"{area}/{name}": value for name, value in latest.items()})
        await super().wandb_log(metrics)

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        super().save_checkpoint(step, {**(data or {}), "iter": self.iter})

    def check_gold_answer(self, item: tuple[int, int]) -> str:
        table = Table(self.config.env_name, seed=item[0])
        action = best_action(table.hand, table.rules)
        thinking = "The dealer's card decides.\n</think>\n" if self.config.thinking_active else ""
        call = f'{{"name": "take_action", "arguments": {{"action": "{action}"}}}}'
        return f"{thinking}<tool_call>\n{call}\n</tool_call>"

    def _sampling(self) -> dict[str, float]:
        return {"temperature": self.config.temperature, "top_p": self.config.top_p}


if __name__ == "__main__":
    BlackjackEnv.cli()
