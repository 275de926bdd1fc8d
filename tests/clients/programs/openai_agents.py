"""An agent of the OpenAI Agents SDK; its argument is the API it uses."""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


@function_tool
def price(product: str) -> str:
    """Look up the price of a product."""
    return str(PRICES[product])


async def main():
    set_tracing_disabled(True)  # traces go to OpenAI
    set_default_openai_api(sys.argv[1])
    agent = Agent(name="Shop", instructions="You sell tea.", model="policy", tools=[price])
    first = await Runner.run(agent, "What do tea, a cup and a pot cost together?")
    history = [*first.to_input_list(), {"role": "user", "content": "And without the pot?"}]
    events = Runner.run_streamed(agent, history)
    async for _ in events.stream_events():
        pass
    print(json.dumps([first.final_output, events.final_output]))


asyncio.run(main())
