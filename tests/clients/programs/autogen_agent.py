"""AutoGen's assistant, which keeps its model context between tasks."""

import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


async def price(product: str) -> str:
    """Look up the price of a product."""
    return str(PRICES[product])


async def main():
    client = OpenAIChatCompletionClient(
        model="policy",
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": False,
            "structured_output": False,
            "family": ModelFamily.UNKNOWN,
        },
    )
    agent = AssistantAgent(
        "shop",
        client,
        tools=[price],
        system_message="You sell tea.",
        max_tool_iterations=5,
        reflect_on_tool_use=False,
    )
    first = await agent.run(task="What do tea, a cup and a pot cost together?")
    second = await agent.run(task="And without the pot?")
    print(json.dumps([first.messages[-1].content, second.messages[-1].content]))


asyncio.run(main())
