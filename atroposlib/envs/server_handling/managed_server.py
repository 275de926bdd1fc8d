"""A session at one server that records, for every completion, the exact tokens sampled.

messages -> prompt text -> ids (those of the node it continues + what is new)
         -> engine -> ids and logprobs -> node, and an OpenAI answer for the caller
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.chat_rendering import render_messages
from atroposlib.envs.server_handling.completion_objects import (
    Answer,
    ToolAnswer,
    as_finish_reason,
    build_chat,
    build_completion,
)
from atroposlib.envs.server_handling.dummy_managed_server import (
    DummyManagedServer,
    ManagedServerAdapter,
)
from atroposlib.envs.server_handling.sequence_tracker import (
    SequenceNode,
    continue_ids,
    longest_prefix,
    make_node,
)
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.vllm_payloads import drop_double_bos
from atroposlib.utils.long_decode import decode_long

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

_LIMIT_NAMES = frozenset({"max_tokens", "max_completion_tokens", "max_new_tokens"})


class ManagedServer:
    """Chat and completion requests whose sequences are kept with tokens, masks and logprobs.

    A request whose prompt starts with the text of a recorded sequence continues that sequence:
    the engine is sent the recorded tokens, never a new tokenisation of their text, and every turn
    sampled so far stays trainable. Any other request starts a new sequence.

    Args:
        server: Anything with `tokens_and_logprobs_completion`.
        tokenizer: Default: the server's, else the one of its model name; None if neither loads.
        track_tree: Keep every sequence by its text instead of replacing the continued one.
        tool_parser: Name of a tool-call format. With it `tools` of a chat are shown to the model,
            its calls are parsed, and those in the messages are written back as they were sampled.
            Sequences always hold the raw text. None leaves tools out of prompts.
        preserve_think_blocks: Kept for callers; thinking is preserved either way.
        strip_think_blocks: Let the chat template drop earlier thinking. Such a turn then starts
            a new sequence, as its prompt differs from what was sampled.

    Attributes:
        current_nodes: The sequences in list mode.
        sequences: The sequences by text in tree mode.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
        *,
        strip_think_blocks: bool = False,
    ) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}
        self._tool_parser_name = tool_parser
        self._strip_think_blocks = strip_think_blocks
        self._translator: ToolCallTranslator | None = None
        if tokenizer is None:
            self._initialize_tokenizer()

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the model's answers to `messages` and record their sequences.

        Args:
            **kwargs: `messages`, and what the engine takes (`n`, `max_tokens`, `temperature`,
                `stop`, ...); `split` is passed on. Without a limit a reply runs to its own end,
                as in any chat. `tools` and `tool_choice` are honoured with a `tool_parser`;
                `tool_choice="none"` still shows the tools but leaves the answer unparsed.
        """
        messages = kwargs.pop("messages")
        if not _LIMIT_NAMES & kwargs.keys():
            kwargs["max_tokens"] = None
        tools, tool_choice = kwargs.pop("tools", None), kwargs.pop("tool_choice", None)
        translator = self._get_translator() if tools else None
        if translator is None:
            prompt = self._convert_messages_to_prompt(messages)
            return build_chat(await self._sample(prompt, kwargs), **self._answer_head())
        prompt = self._convert_messages_to_prompt(messages, tools)
        answers = await self._sample(prompt, kwargs, translator)
        return build_chat(
            [_with_tool_calls(answer, translator, tools, tool_choice) for answer in answers],
            **self._answer_head(),
        )

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the model's continuations of `prompt` and record their sequences."""
        prompt = kwargs.pop("prompt")
        answers = await self._sample(prompt, kwargs)
        return build_completion(answers, **self._answer_head())

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return prompt logprobs of `messages`, `prompt` or `input_ids`; nothing is recorded.

        Raises:
            NotImplementedError: the server has no prompt logprobs.
        """
        if not hasattr(self.server, "get_logprobs"):
            raise NotImplementedError(
                f"{type(self.server).__name__} does not implement get_logprobs"
            )
        messages = kwargs.pop("messages", None)
        if messages is not None:
            kwargs["prompt"] = self._convert_messages_to_prompt(messages)
        rows: dict[str, Any] = await self.server.get_logprobs(**kwargs)
        return rows

    def get_state(self) -> dict[str, Any]:
        """Return `{"nodes": [...]}`, or `{"sequences": ..., "tree": ...}` in tree mode.

        The containers are the caller's own; `reset` does not touch them.
        """
        if self.track_tree:
            return {"sequences": dict(self.sequences), "tree": dict(self.sequences)}
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        """Forget every sequence."""
        self.current_nodes = []
        self.sequences = {}

    async def _sample(
        self, prompt: str, kwargs: dict[str, Any], translator: ToolCallTranslator | None = None
    ) -> list[Answer]:
        """Send one request, record its sequences, return the texts.

        With a translator the texts keep the special tokens that may mark tool calls.
        """
        parent = self._find_extending_node(prompt)
        request = {"model": self.server.config.model_name, **kwargs, "prompt": prompt}
        if self.tokenizer is not None:
            request["input_ids"] = self._compute_input_ids(prompt, parent)
        if self._debug_requests_enabled():
            logger.info("request to %s: %s", request["model"], request)
        (
            prompt_ids,
            completions,
            logprobs,
            finish_reasons,
        ) = await self.server.tokens_and_logprobs_completion(**request)
        answers = []
        nodes = []
        for ids, values, reason in zip(completions, logprobs, finish_reasons, strict=True):
            if translator is None:
                text = await self._completion_text(ids)
            else:
                text = self._marked_text(ids, translator)
            finish_reason = as_finish_reason(reason)
            node = make_node(
                full_text=prompt + text,
                prompt_ids=prompt_ids,
                completion_ids=ids,
                completion_logprobs=values,
                finish_reason=finish_reason,
                parent=parent,
            )
            nodes.append(node)
            answers.append(Answer(text, finish_reason))
        self._record(nodes, parent)
        return answers

    def _record(self, nodes: Sequence[SequenceNode], parent: SequenceNode | None) -> None:
        """Keep new sequences; in list mode the first takes the place of the one it continues."""
        if self.track_tree:
            self.sequences.update({node.full_text: node for node in nodes})
            return
        fresh = list(nodes)
        for i, known in enumerate(self.current_nodes):
            if fresh and known is parent:
                self.current_nodes[i] = fresh.pop(0)
        self.current_nodes.extend(fresh)

    def _find_extending_node(self, input_text: str) -> SequenceNode | None:
        known = list(self.sequences.values()) if self.track_tree else self.current_nodes
        return longest_prefix(known, input_text)

    def _compute_input_ids(self, input_text: str, extending_node: SequenceNode | None) -> list[int]:
        """Return the ids of a prompt, those of the sequence it continues taken as they were."""
        if extending_node is None:
            ids = self.tokenizer.encode(input_text, add_special_tokens=True)
            return drop_double_bos(ids, getattr(self.tokenizer, "bos_token_id", None))
        added_text = input_text[len(extending_node.full_text) :]
        added_ids = (
            self.tokenizer.encode(added_text, add_special_tokens=False) if added_text else []
        )
        return continue_ids(extending_node, added_ids, self._is_hidden)

    def _is_hidden(self, token_id: int) -> bool:
        """Whether a token is left out of texts; one that decodes to nothing anyway is not."""
        shown = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return bool(shown) and not self._text_of([token_id])

    async def _completion_text(self, ids: Sequence[int]) -> str:
        """Return what `_text_of` does; other sessions go on while a long completion is decoded."""
        if self.tokenizer is None:
            return self._text_of(ids)
        return await decode_long(self.tokenizer, ids, skip_special_tokens=True)

    def _text_of(self, ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return "".join(chr(i) for i in ids if 0 <= i < 0x110000 and chr(i).isprintable())
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _marked_text(self, ids: Sequence[int], translator: ToolCallTranslator) -> str:
        """Return a completion with its special tokens but the one that ends it.

        The template writes the end of a turn itself, as after any other completion.
        """
        end = len(ids)
        while end and ids[end - 1] == ids[-1] and self._is_hidden(ids[end - 1]):
            end -= 1
        return translator.decode_with_tool_awareness(list(ids[:end]), has_tools=True)

    def _convert_messages_to_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str:
        translator = self._get_translator()
        if translator is not None:
            messages = translator.convert_messages_for_template(messages)
        return render_messages(
            self.tokenizer, messages, tools=tools, keep_thinking=not self._strip_think_blocks
        )

    def _get_translator(self) -> ToolCallTranslator | None:
        """Return the translator between tool calls and text; None without parser or tokenizer."""
        if self._translator is None and self._tool_parser_name and self.tokenizer is not None:
            self._translator = ToolCallTranslator(self.tokenizer, self._tool_parser_name)
        return self._translator

    def _initialize_tokenizer(self) -> None:
        """Take the server's tokenizer, else load the one of its model."""
        self.tokenizer = getattr(self.server, "tokenizer", None)
        if self.tokenizer is not None:
            return
        from transformers import AutoTokenizer

        name = self.server.config.model_name
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            logger.warning(
                "no tokenizer for %r (%s); prompts are sent as text and completions are read as "
                "code points",
                name,
                error,
            )

    def _answer_head(self) -> dict[str, Any]:
        model = self.server.config.model_name
        return {"model": model, "id_": str(uuid.uuid4()), "created": int(time.time())}

    @staticmethod
    def _debug_requests_enabled() -> bool:
        return os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1"


def _with_tool_calls(
    answer: Answer, translator: ToolCallTranslator, tools: Sequence[Any], tool_choice: Any
) -> Answer | ToolAnswer:
    """Return an answer with its text's tool calls; as it is, its finish reason too, without any."""
    choice = tool_choice if isinstance(tool_choice, str) else "auto"
    content, calls, _ = translator.parse_model_output(answer.text, choice, tools)
    return ToolAnswer(content, [call.model_dump() for call in calls]) if calls else answer
