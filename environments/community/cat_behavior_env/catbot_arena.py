"""Grade-school word problems at the path of the earlier `catbot_arena.py`, without a cat.

That file was a copy of `environments/gsm8k_server.py`, which this one extends; the cat is in
`cat_server.py`. With a vLLM server on port 9001 and without the hub:

    python environments/community/cat_behavior_env/catbot_arena.py process --env.total_steps 4 \
        --env.dataset_path environments/data/gsm8k_sample
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atroposlib.tasks.card import EnvironmentCard
from atroposlib.tasks.siblings import sibling_imports

if TYPE_CHECKING or __package__:
    from environments import gsm8k_server
else:
    with sibling_imports(__file__, "../.."):
        import gsm8k_server

__all__ = ["GSM8kEnv"]

CARD = EnvironmentCard(
    task="grade-school word problems, at the path of an earlier version",
    turns="1",
    reward="+1 right, -1 wrong; by length when all are right",
    data="GSM8K from the hub, or `--env.dataset_path`",
    command="process --env.dataset_path environments/data/gsm8k_sample --env.total_steps 4",
)


class GSM8kEnv(gsm8k_server.GSM8kEnv):
    """The environment of `gsm8k_server.py`, with the same settings."""


if __name__ == "__main__":
    GSM8kEnv.cli()
