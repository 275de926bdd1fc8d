"""A loop of the Anthropic client: the first question streamed with thinking, the second by its
tool runner."""

import json

import anthropic

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


@anthropic.beta_tool
def price(product: str) -> str:
    """Look up the price of a product.

    Args:
        product: Its name.
    """
    return str(PRICES[product])


client = anthropic.Anthropic()
messages = [{"role": "user", "content": "What do tea, a cup and a pot cost together?"}]
while True:
    with client.messages.stream(
        model="policy",
        max_tokens=4096,
        system="You sell tea.",
        thinking={"type": "enabled", "budget_tokens": 1024},
        messages=messages,
        tools=[price.to_dict()],
    ) as events:
        reply = events.get_final_message()
    messages.append({"role": "assistant", "content": reply.content})
    if reply.stop_reason != "tool_use":
        break
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": price.call(block.input)}
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages.append({"role": "user", "content": results})
first = next(block.text for block in reply.content if block.type == "text")

messages.append({"role": "user", "content": "And without the pot?"})
runner = client.beta.messages.tool_runner(
    model="policy", max_tokens=4096, system="You sell tea.", messages=messages, tools=[price]
)
reply = runner.until_done()
second = next(block.text for block in reply.content if block.type == "text")
print(json.dumps([first, second]))
