"""The rules an environment is checked against, in the order of the report."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RULES", "Rule"]


class Rule(NamedTuple):
    """One rule."""

    title: str
    """What is looked at, as the table shows it."""
    rule: str
    """What must hold."""
    remedy: str
    """What to do when it does not."""


RULES: dict[str, Rule] = {
    "config": Rule(
        "settings",
        "config_init gives settings that the environment can be built from",
        "correct config_init, or the arguments the constructor takes",
    ),
    "setup": Rule(
        "setup",
        "setup loads the data and ends without raising",
        "run setup on a small local data set: --dataset-path, or check_settings of the class",
    ),
    "network": Rule(
        "no network",
        "nothing but the inference servers is reached over the network",
        "load data and models from local files: --dataset-path here, and a setting for the path",
    ),
    "rollout": Rule(
        "rollouts",
        "an item becomes at least one group",
        "return (group, backlog) from collect_trajectories, or a trajectory from "
        "collect_trajectory",
    ),
    "shape": Rule(
        "group shape",
        "a group has group_size trajectories; tokens, masks, scores and logprobs line up",
        "give every trajectory one entry in each field, and one mask and logprob per token",
    ),
    "masks": Rule(
        "masks",
        "a mask is -100, or the token where the model wrote it",
        "take node.masked_tokens of managed_server, or masks of tokenize_for_trainer",
    ),
    "logprobs": Rule(
        "logprobs",
        "inference_logprobs[t] is what the engine reported for tokens[t]; 1.0 where masked",
        "take node.logprobs of managed_server as they are; the trainer shifts, not the environment",
    ),
    "context": Rule(
        "prefix continuity",
        "the tokens before each trained reply are those the model read when it wrote it",
        "keep one managed_server session per rollout and take its tokens; do not encode the "
        "conversation again",
    ),
    "finite": Rule(
        "finite numbers",
        "scores, advantages and logprobs are finite numbers",
        "find the division by zero or the log of zero, and give such trajectories a real score",
    ),
    "spread": Rule(
        "scores differ",
        "answers of different worth get different scores",
        "a group of equal scores trains nothing; look at what the scoring function compares",
    ),
    "wrong": Rule(
        "wrong answers",
        "an empty and a meaningless answer score less than the gold answer",
        "score the answer, not its form, and compare with the gold answer of this very item",
    ),
    "truncated": Rule(
        "truncated answers",
        "an answer that was cut before its end scores less than the gold answer, or is muted",
        'look at finish_reason: "length" is no finished answer; read answers only behind </think>',
    ),
    "determinism": Rule(
        "determinism",
        "two runs with the same seed and the same replies give the same prompts and scores, and "
        "the same answer scores the same under another seed",
        "draw from random.Random(seed) of your own, sort sets, leave clock and uuid out of prompts",
    ),
    "items": Rule(
        "items unchanged",
        "a rollout does not change its item",
        "copy what you change: messages = list(item['messages'])",
    ),
    "siblings": Rule(
        "failed rollouts",
        "when one rollout fails, the others of its group run to their end",
        "gather with return_exceptions=True, or write collect_trajectory and let the base class "
        "gather",
    ),
    "swallowed": Rule(
        "visible failures",
        "an exception inside a rollout is raised, logged or counted",
        "remove the except clause, or call logger.exception and self.count_failure in it",
    ),
    "cancel": Rule(
        "cancelled rollouts",
        "a cancelled rollout ends at once, and its item can be rolled out again",
        "do not catch CancelledError or BaseException without raising it again",
    ),
    "evaluation": Rule(
        "evaluation",
        "evaluate ends, and its results are written",
        "call self.evaluate_log(metrics, samples=...) or add the metrics in wandb_log",
    ),
    "blocking": Rule(
        "event loop",
        "no call holds the event loop for more than 100 ms",
        "await it in a thread (asyncio.to_thread) or in the score pool; await asyncio.sleep, never "
        "time.sleep",
    ),
    "leftovers": Rule(
        "nothing left running",
        "tasks, threads and processes end with close()",
        "keep what you start, and cancel, join or close it in close()",
    ),
}
