"""smolagents with tool calls; a second task goes on in the agent's memory."""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


@tool
def price(product: str) -> str:
    """Look up the price of a product.

    Args:
        product: Its name.
    """
    return str(PRICES[product])


model = OpenAIModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent([price], model, verbosity_level=0)
first = agent.run("What do tea, a cup and a pot cost together?")
second = agent.run("And without the pot?", reset=False)
print(json.dumps([first, second]))
