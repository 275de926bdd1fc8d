"""LangChain's agent, a LangGraph graph that keeps its thread; its argument chooses the API."""

import json
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

PRICES = {"tea": 3.5, "cup": 8.25, "pot": 12.75}


@tool
def price(product: str) -> str:
    """Look up the price of a product."""
    return str(PRICES[product])


model = ChatOpenAI(model="policy", use_responses_api=sys.argv[1] == "responses")
agent = create_agent(model, [price], system_prompt="You sell tea.", checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
answers = []
for question in ("What do tea, a cup and a pot cost together?", "And without the pot?"):
    state = agent.invoke({"messages": [{"role": "user", "content": question}]}, thread)
    answers.append(state["messages"][-1].text)
print(json.dumps(answers))
