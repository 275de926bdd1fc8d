"""The environment of agents on tasks: its defaults, and its example of two agents."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from atroposlib.adapters.env import AdapterEnvConfig
from atroposlib.adapters.registry import read_args
from atroposlib.adapters.tasks import TasksArgs
from atroposlib.agent_tasks.folder import load_tasks
from atroposlib.envs.commands import load_yaml, serve_command
from environments.agent_tasks.agent_tasks_server import TASKS, AgentTasksEnv

CONFIG = Path(__file__).parents[2] / "environments/agent_tasks/configs/two_agents.yaml"


def test_defaults_name_the_tasks_of_the_folder() -> None:
    config, _ = AgentTasksEnv.config_init()

    assert isinstance(config, AdapterEnvConfig)
    assert config.adapter == f"tasks:{TASKS}"
    assert CONFIG.parents[1] / "tasks" == TASKS
    AgentTasksEnv.check_inputs(config)


def test_example_sets_two_agents_with_weights() -> None:
    content = load_yaml(str(CONFIG))

    settings = serve_command(AgentTasksEnv)().layered(content)

    assert isinstance(settings.env, AdapterEnvConfig)
    args = read_args(TasksArgs, settings.env.adapter_args)
    assert isinstance(args, TasksArgs)
    assert [(a.agent, a.weight) for a in args.agent_settings] == [
        ("shell", 1.0),
        ("mini-swe-agent", 3.0),
    ]
    names = [task.name for task in load_tasks(TASKS)]
    assert all(fnmatch.filter(names, pattern) for pattern in args.eval_tasks)
    assert settings.env.adapter == f"tasks:{TASKS}"
    assert settings.env.max_token_length == 16_384
