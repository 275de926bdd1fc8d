"""smolagents that writes Python instead of tool calls."""

import json
import os

from smolagents import CodeAgent, OpenAIModel, tool

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


@tool
def price(product: str) -> float:
    """Look up the price of a product.

    Args:
        product: Its name.
    """
    return PRICES[product]


model = OpenAIModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = CodeAgent([price], model, verbosity_level=0)
first = agent.run("What do tea, a cup and a pot cost together?")
second = agent.run("And without the pot?", reset=False)
print(json.dumps([str(first), str(second)]))
