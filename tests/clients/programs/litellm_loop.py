"""A chat loop of LiteLLM; its argument is the provider it takes the address for."""

import json
import sys

import litellm

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up the price of a product.",
        "parameters": {
            "type": "object",
            "properties": {"product": {"type": "string"}},
            "required": ["product"],
        },
    },
}

messages = [{"role": "system", "content": "You sell tea."}]
answers = []
for question in ("What do tea, a cup and a pot cost together?", "And without the pot?"):
    messages.append({"role": "user", "content": question})
    while True:
        answer = litellm.completion(
            model=f"{sys.argv[1]}/policy", messages=messages, tools=[TOOL], max_tokens=4096
        )
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            price = PRICES[json.loads(call.function.arguments)["product"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(price)})
    answers.append(message.content)
print(json.dumps(answers))
