"""Three turns with tools on a real engine: its own ids, and the logprobs of a forward pass."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.server_handling.config import APIServerConfig
from atroposlib.envs.server_handling.managed_server import SequenceNode
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.tool_formats import FunctionCall, registry
from atroposlib.scored_data import IGNORE_INDEX
from tests.end_to_end.conftest import EngineWithModel, RecordingServer, serve_with_vllm
from tests.end_to_end.test_vllm_exact_tokens import TOLERANCE, assert_aligned, worst_difference
from tests.templates.make_tokenizers import FAMILIES, load_tokenizer

pytestmark = pytest.mark.slow

TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MAX_MODEL_LEN = 1024


def save_model(family: str, folder: Path) -> Any:
    """Save a random model of a family behind its test tokenizer; return the tokenizer."""
    import torch
    import transformers as tf

    kinds: dict[str, tuple[type[Any], type[Any]]] = {
        "llama3": (tf.LlamaConfig, tf.LlamaForCausalLM),
        "qwen2_5": (tf.Qwen2Config, tf.Qwen2ForCausalLM),
        "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM),
    }
    make_config, make_model = kinds[family]
    tokenizer = load_tokenizer(family)
    torch.manual_seed(0)
    model = make_model(
        make_config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=MAX_MODEL_LEN,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)  # far from uniform, so that mix-ups show
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def one_call(tool_parser: str) -> str:
    """Return an expression for a call: an untrained model makes none by itself."""
    tool_format = registry.find(tool_parser)
    assert tool_format is not None
    text = tool_format.render([FunctionCall(name="f", arguments='{"a": 7}')])
    for mark in r"\{}[]().|":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("7", "[0-9]")


async def converse(engine: EngineWithModel, tool_parser: str) -> tuple[SequenceNode, list[Any]]:
    """Let the model call, answer, and answer again; return the node and the engine's answers."""
    config = APIServerConfig(
        base_url=engine.base_url,
        server_type="vllm",
        model_name=engine.model_name,
        tokenizer_name=str(engine.folder),
    )
    manager = ServerManager([config], server_class=RecordingServer, tool_parser=tool_parser)
    eos = {str(engine.tokenizer.eos_token_id): 6.0}
    messages: list[Any] = [{"role": "user", "content": "go"}]
    try:
        async with manager.managed_server(tokenizer=engine.tokenizer) as session:
            called = await session.chat_completion(
                messages=messages,
                tools=[TOOL],
                max_tokens=90,
                extra_body={"structured_outputs": {"regex": one_call(tool_parser)}},
            )
            (call,) = called.choices[0].message.tool_calls or ()
            arguments = call["function"]["arguments"].replace(" ", "")
            respelt = {**call, "function": {"name": "f", "arguments": arguments}}
            messages += [
                {"role": "assistant", "content": None, "tool_calls": [respelt]},
                {"role": "tool", "tool_call_id": call["id"], "content": "8"},
            ]
            for question in ("ok", "bye"):
                answer = await session.chat_completion(
                    messages=messages, tools=[TOOL], max_tokens=16, logit_bias=eos
                )
                messages += [answer.choices[0].message, {"role": "user", "content": question}]
            (node,) = session.get_state()["nodes"]
            return node, manager.servers[0].answers
    finally:
        await manager.close()


def check(engine: EngineWithModel, node: SequenceNode, answers: list[Any]) -> None:
    """Compare a node with what the engine said and with the weights themselves."""
    sequences = [[*prompt_ids, *ids[0]] for prompt_ids, ids, _, _ in answers]
    assert len(sequences) == 3
    assert node.tokens == sequences[-1]
    for earlier, later in itertools.pairwise(sequences):
        assert later[: len(earlier)] == earlier
    trained = [mask for mask in node.masked_tokens if mask != IGNORE_INDEX]
    assert trained == [token for _, ids, _, _ in answers for token in ids[0]]
    assert_aligned(node)
    # Under a grammar the engine's logprobs are those among the tokens that it allows.
    num_bound = len(sequences[0])
    masks = [IGNORE_INDEX] * num_bound + node.masked_tokens[num_bound:]
    unbound = node.model_copy(update={"masked_tokens": masks})
    assert worst_difference(engine.model, unbound) < TOLERANCE


async def test_turns_with_tools_are_the_engines_tokens(vllm_engine: EngineWithModel) -> None:
    node, answers = await converse(vllm_engine, "hermes")

    check(vllm_engine, node, answers)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "qwen3"])
async def test_turns_with_tools_are_the_engines_tokens_for(family: str, tmp_path: Path) -> None:
    tokenizer = save_model(family, tmp_path)

    with serve_with_vllm(tmp_path, tokenizer, max_model_len=MAX_MODEL_LEN) as engine:
        node, answers = await converse(engine, FAMILIES[family].tool_parser)
        check(engine, node, answers)
