"""A chat loop of the OpenAI client: the first question in one piece, the second streamed."""

import json

import openai

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

client = openai.OpenAI()
messages = [{"role": "system", "content": "You sell tea."}]


def ask(question, stream):
    messages.append({"role": "user", "content": question})
    while True:
        if stream:
            with client.chat.completions.stream(
                model="policy", messages=messages, tools=[TOOL]
            ) as events:
                message = events.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            price = PRICES[json.loads(call.function.arguments)["product"]]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(price)})


first = ask("What do tea, a cup and a pot cost together?", stream=False)
second = ask("And without the pot?", stream=True)
print(json.dumps([first, second]))
