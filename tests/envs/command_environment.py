"""A stand-in for an environment: the class methods and coroutines that the commands use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.envs import commands
from atroposlib.envs.check import check_command
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.config import APIServerConfig


class StandInConfig(BaseEnvConfig):
    tags: list[str] = Field(default_factory=list, description="Labels.")
    limits: dict[str, int] = Field(default_factory=dict, description="Largest value by name.")
    levels: list[int] | None = None


class StandInEnv:
    """Records what a command did to the instance it built."""

    name = "stand_in"
    env_config_cls: ClassVar[type[BaseEnvConfig]] = StandInConfig
    servers: ClassVar[Any] = [APIServerConfig(model_name="m", base_url="http://inference:9001/v1")]
    built: ClassVar[list[StandInEnv]] = []

    def __init__(
        self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False
    ) -> None:
        self.config = config
        self.server_configs = server_configs
        self.slurm = slurm
        self.testing = testing
        self.server = SimpleNamespace(max_n_completions=8, proxy_url=None, use_proxy=False)
        self.ran: list[str] = []
        type(self).built.append(self)

    @classmethod
    def config_init(cls) -> tuple[Any, Any]:
        return cls.env_config_cls(group_size=7, use_wandb=False), cls.servers

    @classmethod
    def get_cli_serve_config_cls(cls) -> Any:
        return commands.serve_command(cls)

    @classmethod
    def get_cli_process_config_cls(cls) -> Any:
        return commands.process_command(cls)

    @classmethod
    def get_cli_evaluate_config_cls(cls) -> Any:
        return commands.evaluate_command(cls)

    @classmethod
    def get_cli_check_config_cls(cls) -> Any:
        return check_command(cls)

    @classmethod
    def check_inputs(cls, config: Any) -> None:
        """It reads nothing."""

    async def env_manager(self) -> None:
        self.ran.append("serve")

    async def process_manager(self) -> None:
        self.ran.append("process")

    async def _run_evaluate(self) -> None:
        self.ran.append("evaluate")


def stand_in(**attributes: Any) -> type[StandInEnv]:
    """A fresh class, so that what one test builds is not seen by another."""
    return type("StandIn", (StandInEnv,), {"built": [], **attributes})
