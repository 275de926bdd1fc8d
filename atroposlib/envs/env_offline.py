"""Running an environment without a trajectory service: `process` and `evaluate`.

process: item -> rollouts -> group with gold answer -> JSONL, until enough; then a page of them
"""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from numbers import Real
from types import TracebackType
from typing import Any

from atroposlib.envs.env_hooks import settle
from atroposlib.envs.env_serving import ServingEnv
from atroposlib.envs.group_assembly import as_pair
from atroposlib.envs.recent_errors import RecentErrors
from atroposlib.errors import NoDataError
from atroposlib.utils.short_score import short_score

__all__ = ["OfflineEnv"]

logger = logging.getLogger(__name__)

MAX_EMPTY_GROUPS_IN_A_ROW = 100
"""`process` gives up after so many items without data; without a limit it would never end."""


class OfflineEnv(ServingEnv):
    """The offline half of an environment; the `process` command sets its attributes.

    Attributes:
        process_mode: True under `process`, absent otherwise.
        n_groups_to_process: groups to make.
        group_size_to_process: trajectories per group.
    """

    process_mode: bool
    n_groups_to_process: int
    group_size_to_process: int

    async def process_manager(self) -> None:
        """Make `n_groups_to_process` groups without a service, write them and a page of them.

        An exception of a hook ends the run; what was made until then is on disk, with its page.

        Raises:
            NoDataError: `collect_trajectories` keeps giving nothing.
        """
        reasons = RecentErrors()
        async with AsyncExitStack() as ending:  # runs from the last line to the first
            logging.getLogger().addHandler(reasons)
            ending.callback(logging.getLogger().removeHandler, reasons)
            ending.push(self._write_group_page)
            ending.callback(self._close_records)
            ending.push_async_callback(self._run_close_hook)
            await settle(self.setup())
            self._start_local_run()
            self.curr_step = 0
            self._processed_scores: list[list[Any]] = []
            self.run_figures.begin()
            await self._process_all_groups(reasons)
            self._report_scores()

    async def _process_all_groups(self, reasons: RecentErrors) -> None:
        num_empty = 0
        while self.curr_step < self.n_groups_to_process:
            item = await settle(self.get_next_item())
            if item is None:
                logger.info("no items left after %d groups", self.curr_step)
                return
            self.run_figures.begin_item()
            self.config.group_size = self.group_size_to_process
            started_at = time.monotonic()
            collected, _ = as_pair(await settle(self.collect_trajectories(item)))
            if collected:
                collected = await settle(self.postprocess_histories(collected))
            if not collected:
                num_empty += 1
                logger.info(
                    "an item gave no group, %.1f s; %d in a row",
                    time.monotonic() - started_at,
                    num_empty,
                )
                if num_empty >= MAX_EMPTY_GROUPS_IN_A_ROW:
                    raise NoDataError(
                        f"{num_empty} items in a row gave no data; {self._why_no_data(reasons)}"
                    )
                continue
            num_empty = 0
            await self._add_gold_answer(collected, item)
            num_unusable = self._num_unusable_groups()
            await settle(
                self.handle_send_to_api(
                    collected, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False
                )
            )
            await settle(self.wandb_log({}))
            self.curr_step += 1
            if not self._is_unusable(collected, before=num_unusable):
                self._report_processed_groups(collected, duration_s=time.monotonic() - started_at)
        if not self._processed_scores and self._num_unusable_groups():
            raise NoDataError(
                f"all {self.curr_step} groups were dropped; {self._why_no_data(reasons)}"
            )

    async def _add_gold_answer(self, collected: Any, item: Any) -> None:
        """Write the gold answer of an item into its groups: whoever looks at scores needs it."""
        try:
            gold = await settle(self.check_gold_answer(item))
        except Exception:  # a hook of the author's; the groups are worth having without it
            logger.warning("check_gold_answer failed; the group has no gold answer", exc_info=True)
            return
        if gold is None:
            return
        answer = gold if isinstance(gold, str) else list(gold)
        for group in collected if isinstance(collected, list) else [collected]:
            if isinstance(group, MutableMapping):
                group.setdefault("gold_answer", answer)

    def _why_no_data(self, reasons: RecentErrors) -> str:
        if not reasons.lines:
            return f"look at what {type(self).__name__}.collect_trajectories returns"
        commonest = max(reasons.lines, key=lambda line: line.count)
        return f"most of them with: {commonest.text}"

    def _report_processed_groups(self, collected: Any, *, duration_s: float) -> None:
        groups = collected if isinstance(collected, list) else [collected]
        scores = [s for group in groups if group is not None for s in group.get("scores") or []]
        self._processed_scores.append(scores)
        logger.info(
            "group %d of %d: %d trajectories, scores %s, %.1f s",
            self.curr_step,
            self.n_groups_to_process,
            len(scores),
            [short_score(score) for score in scores],
            duration_s,
        )

    def _report_scores(self) -> None:
        """Log the mean score, and how many groups give a trainer nothing to compare."""
        numbers = [s for scores in self._processed_scores for s in scores if isinstance(s, Real)]
        if not numbers:
            return
        num_equal = sum(all(s == scores[0] for s in scores) for scores in self._processed_scores)
        logger.info(
            "mean score %.3g of %d trajectories; all scores are equal in %d of %d groups",
            sum(map(float, numbers)) / len(numbers),
            len(numbers),
            num_equal,
            len(self._processed_scores),
        )

    def _write_group_page(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the page; a run that failed before its first group leaves neither page nor file."""
        if self.jsonl_writer is None:
            return
        path = self.jsonl_writer.path
        if error is not None and path.stat().st_size == 0:
            path.unlink()  # or the next run would have to take another name
            return
        from atroposlib.frontend.jsonl2html import generate_html

        logger.info("the groups are in %s", path)
        generate_html(path)

    async def _run_evaluate(self) -> None:
        """Set up and evaluate once, without a service."""
        async with AsyncExitStack() as ending:  # runs from the last line to the first
            ending.callback(self._close_records)
            ending.push_async_callback(self._run_close_hook)
            await settle(self.setup())
            self._start_local_run()
            await settle(self.evaluate())
