"""Try a YAML file: roll out a few rows and print their scores, without a service.

python environments/dataset_environment/dataset_local_server.py --config dataset_local
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atroposlib.errors import AtroposError
from atroposlib.tasks.siblings import sibling_imports
from atroposlib.utils.text import inert_line

if TYPE_CHECKING or __package__:
    from environments.dataset_environment.dataset_env import DatasetEnv, RunFile, read_run_file
else:
    with sibling_imports(__file__):
        from dataset_env import DatasetEnv, RunFile, read_run_file

__all__ = ["main", "roll_out_items"]

NUM_ITEMS = 5
SHOWN_CHARACTERS = 100


async def roll_out_items(run: RunFile, *, num_items: int) -> list[str]:
    """Wait for the groups of the first rows and return a line for each."""
    env = DatasetEnv(run.env, run.servers)
    lines = []
    try:
        await env.setup()
        for _ in range(num_items):
            item = await env.get_next_item()
            group, _ = await env.collect_trajectories(item)
            question = inert_line(str(item[run.env.prompt_field]), max_characters=SHOWN_CHARACTERS)
            scores = [f"{score:.3f}" for score in group["scores"]] if group else []
            lines.append(f"{question}\n    {'  '.join(scores) or 'no room for a completion'}")
    finally:
        await env.close()
        await env.server.close()
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exit with 2 for invalid settings."""
    parser = argparse.ArgumentParser(description="Roll out a few rows of a YAML file.")
    parser.add_argument("--config", default="dataset_local", help="path, or name under configs/")
    parser.add_argument("--num-items", type=int, default=NUM_ITEMS, help="number of rows")
    arguments = parser.parse_args(argv)
    try:
        run = read_run_file(arguments.config, os.environ)
        run.env.use_wandb = False
        lines = asyncio.run(roll_out_items(run, num_items=arguments.num_items))
    except AtroposError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        sys.exit(2)
    sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
