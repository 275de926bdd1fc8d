"""LlamaIndex's function agent with its memory."""

import asyncio
import json
import os

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import Memory
from llama_index.llms.openai_like import OpenAILike

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


def price(product: str) -> str:
    """Look up the price of a product."""
    return str(PRICES[product])


async def main():
    llm = OpenAILike(
        model="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=100_000,
    )
    agent = FunctionAgent(tools=[price], llm=llm, system_prompt="You sell tea.")
    memory = Memory.from_defaults(session_id="shop", token_limit=100_000)
    first = await agent.run("What do tea, a cup and a pot cost together?", memory=memory)
    second = await agent.run("And without the pot?", memory=memory)
    print(json.dumps([str(first), str(second)]))


asyncio.run(main())
