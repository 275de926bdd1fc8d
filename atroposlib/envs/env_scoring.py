"""The scoring workers of an environment: made when first used, ended with the run."""

from __future__ import annotations

import asyncio
from functools import cached_property

from atroposlib.envs.env_hooks import EnvHooks
from atroposlib.utils.score_pool import ScorePool

__all__ = ["ScoringEnv"]


class ScoringEnv(EnvHooks):
    """The scoring half of an environment."""

    @cached_property
    def score_pool(self) -> ScorePool:
        """Workers for scoring functions, as the config asks for; may be assigned.

        `await self.score_pool.run(function, *args, timeout=5, default=0.0)` neither stalls other
        rollouts nor runs for ever; see `ScorePool`.
        """
        return ScorePool(
            num_workers=self.config.num_score_workers,
            timeout_s=self.config.score_timeout_s,
            backend=self.config.score_backend.value,
        )

    def _opened_score_pool(self) -> ScorePool | None:
        pool = vars(self).get("score_pool")  # asking for the attribute would make one
        return pool if isinstance(pool, ScorePool) else None

    def _score_metrics(self) -> dict[str, int]:
        """What became of the calls so far, `score_pool/<count>`; nothing before the first."""
        pool = self._opened_score_pool()
        if pool is None or not pool.counts:
            return {}
        names = ("calls", "timeouts", "crashes", "errors")
        return {f"score_pool/{name}": pool.counts[name] for name in names}

    async def _close_score_pool(self) -> None:
        pool = self._opened_score_pool()
        if pool is not None:
            await asyncio.to_thread(pool.close)
