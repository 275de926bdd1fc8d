"""An agent of Pydantic AI; its argument is the API it uses."""

import json
import sys

from pydantic_ai import Agent

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}

# openai-chat:policy, openai-responses:policy, anthropic:policy
agent = Agent(f"{sys.argv[1]}:policy", instructions="You sell tea.")


@agent.tool_plain
def price(product: str) -> str:
    """Look up the price of a product."""
    return str(PRICES[product])


first = agent.run_sync("What do tea, a cup and a pot cost together?")
second = agent.run_sync("And without the pot?", message_history=first.all_messages())
print(json.dumps([first.output, second.output]))
