"""Agents left as they are on tasks in folders: `tasks:FOLDER` of `atropos-env`, with 20 tasks.

    task folder ─► fork of its workspace ─► agent's command ─► verifier in a second fork ─► reward
                                                 └─► requests to the agent proxy ─► exact tokens

The tasks are in `tasks/`. The default agent, `shell`, needs nothing but bubblewrap. With a vLLM
server on port 9001:

    python environments/agent_tasks/agent_tasks_server.py process --env.total_steps 4 \
        --env.tokenizer_name NAME --openai.model_name NAME
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from atroposlib.adapters.env import AdapterEnv
from atroposlib.adapters.tasks import TasksAdapter
from atroposlib.tasks.card import EnvironmentCard

__all__ = ["AgentTasksEnv"]

CARD = EnvironmentCard(
    task="20 tasks in a shell, worked on by any command-line agent, left as it is",
    turns="up to 30",
    reward="0 to 1, written by the task's verifier in a box that the agent never touched",
    data="`tasks/` in its folder, or `--env.adapter tasks:FOLDER`",
    needs="bubblewrap",
    command="process --env.total_steps 4",
)

TASKS = Path(__file__).with_name("tasks")


class AgentTasksEnv(AdapterEnv):
    """The tasks of this folder; `--env.adapter_args` has the arguments of the adapter."""

    name = "agent_tasks"
    default_settings: ClassVar[dict[str, Any]] = {
        **TasksAdapter.default_settings,
        "adapter": f"tasks:{TASKS}",
    }


if __name__ == "__main__":
    AgentTasksEnv.cli()
