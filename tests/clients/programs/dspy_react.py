"""DSPy's ReAct, which writes a new prompt for each step."""

import json
import os

import dspy

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


def price(product: str) -> str:
    """Look up the price of a product."""
    return str(PRICES[product])


lm = dspy.LM(
    "openai/policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    cache=False,
)
dspy.configure(lm=lm)
agent = dspy.ReAct("question -> answer", tools=[price])
first = agent(question="What do tea, a cup and a pot cost together?")
print(json.dumps([first.answer]))
