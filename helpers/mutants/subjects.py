"""The pure rules whose mutants are tested: modules, the parts of them, and the tests of each."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SUBJECTS", "Part", "Subject"]


class Part(NamedTuple):
    """A module, or some classes and functions of it."""

    path: str
    """Relative to the repository."""
    only: tuple[str, ...] = ()
    """Classes and functions; empty: all."""
    without: tuple[str, ...] = ()

    def holds(self, where: str) -> bool:
        """Return whether a class or function belongs to this part."""
        if any(_is_in(where, name) for name in self.without):
            return False
        return not self.only or any(_is_in(where, name) for name in self.only)


class Subject(NamedTuple):
    """One subject, its modules, and the tests that must notice a change of them."""

    name: str
    parts: tuple[Part, ...]
    tests: tuple[str, ...]
    """Arguments of pytest; the test that fails most often comes first."""


_QUEUE = "atroposlib/api/queue.py"
_BATCH = "example_trainer/batch.py"
_SESSION = "atroposlib/envs/service_session.py"
_SHARES = ("queue_view", "scaled_needs")
_CAPACITY = (
    "QueueStatus", "CapacityLimits", "crossed_boundary", "is_run_finished", "derived_batch_size",
    "is_queue_full", "_has_unfilled_share", "_reserved_packs", "own_share_groups", "worker_limit",
    "failure_pause_s",
)  # fmt: skip
_MATCHING = (
    "RecordedReply", "RecordedTurns", "matched_length", "earlier_turns", "message_key", "digest",
    "_key", "_hashed", "_calls_text", "continue_ids", "make_node", "_common_length", "NodeRecord",
    "NodeRecords", "continue_chat", "_cut_reply", "_rest_of_prompt",
)  # fmt: skip
_PACKS_OF_GROUPS = (
    "pack_exact", "pack_with_minimums", "_num_packable", "_PackReader", "_SizesAndOwners",
    "oldest_combination", "_oldest_of_each_size", "is_reachable",
)  # fmt: skip
_PACKS_OF_ROWS = (
    "balanced_bins", "plan_microbatches", "make_packed_microbatch", "_split_rows", "_padded_starts",
    "_is_worth_sharing", "_tree_microbatches", "split_batch", "_empty_microbatch",
)  # fmt: skip

SUBJECTS = (
    Subject(
        "loss",
        (Part("example_trainer/loss.py"),),
        (
            "tests/trainer/losses/test_bounds.py",
            "tests/trainer/losses/test_grpo_loss.py",
            "tests/trainer/losses/test_oracle.py",
            "tests/trainer/losses/test_traps.py",
            "tests/trainer/losses/test_extra_parts.py",
            "tests/trainer/losses/test_idle_settings.py",
            "tests/trainer/losses/test_choice.py",
        ),
    ),
    Subject(
        "batch",
        (Part(_BATCH, without=_PACKS_OF_ROWS),),
        (
            "tests/trainer/test_batch.py",
            "tests/trainer/test_batch_tensors.py",
            "tests/trainer/test_row_packs.py",
        ),
    ),
    Subject(
        "queue",
        (Part(_QUEUE, without=(*_SHARES, *_PACKS_OF_GROUPS)),),
        (
            "tests/api/test_queue_rules.py",
            "tests/api/test_queue_plans.py",
            "--deselect=tests/api/test_queue_plans.py::test_every_plan_equals_the_rules_on_the_whole_queue",
            "tests/api/test_queue.py",
        ),
    ),
    Subject(
        "allocation",
        (Part("atroposlib/api/environments.py"), Part(_QUEUE, only=_SHARES)),
        ("tests/api/test_allocation.py", "tests/api/test_environments.py"),
    ),
    Subject(
        "capacity",
        (Part(_SESSION, only=_CAPACITY), Part("atroposlib/api/concurrency.py")),
        (
            "tests/envs/test_capacity.py",
            "tests/api/test_concurrency.py",
            "--deselect=tests/api/test_concurrency.py::test_adaptive_limit_is_close_to_the_best_fixed_one",
        ),
    ),
    Subject(
        "matching",
        (Part("atroposlib/envs/server_handling/turn_recording.py", only=_MATCHING),),
        (
            "tests/server_handling/test_turn_matching.py",
            "tests/server_handling/test_turn_recording.py",
            "tests/server_handling/proxy/dialects/test_begun_replies.py",
        ),
    ),
    Subject(
        "packing",
        (Part(_QUEUE, only=_PACKS_OF_GROUPS), Part(_BATCH, only=_PACKS_OF_ROWS)),
        (
            "tests/api/test_queue_rules.py",
            "tests/trainer/test_row_packs.py",
            "tests/api/test_queue.py",
        ),
    ),
)


def _is_in(where: str, name: str) -> bool:
    return where == name or where.startswith(f"{name}.")
