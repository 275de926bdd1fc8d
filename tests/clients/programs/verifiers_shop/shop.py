"""One task, which an OpenAI chat loop solves behind the interception of verifiers."""

import sys
from pathlib import Path

import verifiers.v1 as vf

AGENT = Path(__file__).parents[1] / "openai_chat.py"


class ShopData(vf.TaskData):
    """A question."""


class ShopTask(vf.Task[ShopData]):
    """Two questions about prices."""

    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        """Reward the right end."""
        return float("11.75" in str(trace.last_reply))


class ShopConfig(vf.TasksetConfig):
    """No settings."""


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    """One task."""

    def load(self) -> list[ShopTask]:
        """Return the task."""
        return [ShopTask(ShopData(prompt="What do they cost?"), self.config.task)]


class ShopHarnessConfig(vf.HarnessConfig):
    """No settings."""


class ShopHarness(vf.Harness[ShopHarnessConfig]):
    """Runs the agent's program."""

    NEEDS_CONTAINER = False

    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_
    ) -> vf.ProgramResult:
        """Point the agent at the interception."""
        env = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret}
        return await runtime.run_program([sys.executable, str(AGENT)], env)
