"""A loop of the OpenAI client over Responses: first the whole history, then by the earlier id."""

import json

import openai

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}
TOOL = {
    "type": "function",
    "name": "price",
    "description": "Look up the price of a product.",
    "parameters": {
        "type": "object",
        "properties": {"product": {"type": "string"}},
        "required": ["product"],
        "additionalProperties": False,
    },
    "strict": True,
}

client = openai.OpenAI()


def results_of(response):
    return [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": str(PRICES[json.loads(item.arguments)["product"]]),
        }
        for item in response.output
        if item.type == "function_call"
    ]


history = [{"role": "user", "content": "What do tea, a cup and a pot cost together?"}]
while True:
    with client.responses.stream(
        model="policy", instructions="You sell tea.", input=history, tools=[TOOL]
    ) as events:
        response = events.get_final_response()
    history += response.output
    results = results_of(response)
    if not results:
        break
    history += results
first = response.output_text

response = client.responses.create(
    model="policy",
    instructions="You sell tea.",
    previous_response_id=response.id,
    input="And without the pot?",
    tools=[TOOL],
)
while results := results_of(response):
    response = client.responses.create(
        model="policy",
        instructions="You sell tea.",
        previous_response_id=response.id,
        input=results,
        tools=[TOOL],
    )
print(json.dumps([first, response.output_text]))
