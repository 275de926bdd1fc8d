"""A session at one server that records, for every completion, the exact tokens sampled.

messages -> prompt text -> ids (those of the node it continues + what is new)
         -> engine -> ids and logprobs -> node, and an OpenAI answer for the caller

A chat continues the recorded conversation whose turns its messages begin with. Turns are compared
by what they mean, not by their text (`turn_matching` has the rules), so it does not matter how a
caller wrote an answer back: calls with other spacing, no ids, null content, or left-out thinking
are the same turn. The engine is then sent the recorded ids and the encoding of what follows the
reply. Where the chat template would write the recorded turns differently from how they were
sampled, or their text has other ids, the node says so in `metadata["extended_by_tokens"]`.
A changed turn, changed tools, or a changed system text start a new sequence.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.chat_rendering import render_either, render_messages
from atroposlib.envs.server_handling.completion_objects import (
    Answer,
    ToolAnswer,
    as_finish_reason,
    build_chat,
    build_completion,
)
from atroposlib.envs.server_handling.continuation import (
    ChatRequest,
    continue_chat,
    plain_messages,
)
from atroposlib.envs.server_handling.dummy_managed_server import (
    DummyManagedServer,
    ManagedServerAdapter,
)
from atroposlib.envs.server_handling.node_records import Continuation, NodeRecord, NodeRecords
from atroposlib.envs.server_handling.sequence_tracker import SequenceNode
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.turn_recording import Sampled, Turn
from atroposlib.envs.server_handling.weight_versions import (
    note_sampled,
    policy_version_of,
    versions_in,
)

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

_LIMIT_NAMES = frozenset({"max_tokens", "max_completion_tokens", "max_new_tokens"})


class ManagedServer:
    """Chat and completion requests whose sequences are kept with tokens, masks and logprobs.

    A chat that goes on with a recorded conversation, or a prompt that starts with a recorded
    text, continues that sequence: the engine is sent the recorded tokens, never a new
    tokenisation of their text, and every turn sampled so far stays trainable. Any other request
    starts a new sequence.

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
        policy_version: Called before each request; what the service calls the policy, for
            engines that do not name their weights.

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
        policy_version: Callable[[], int | None] | None = None,
    ) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}
        self._tool_parser_name = tool_parser
        self._strip_think_blocks = strip_think_blocks
        self._reported_version = policy_version or (lambda: None)
        self._records = NodeRecords()
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
        shown_tools = tools if translator is not None else None
        chat = ChatRequest.of(messages, shown_tools, self._convert_messages_to_prompt)
        turn = Turn(
            self.tokenizer,
            chat.prompt,
            self._find_conversation(chat),
            chat,
            translator,
            tool_choice,
            self._strip_think_blocks,
        )
        return build_chat(await self._sample(turn, kwargs), **self._answer_head())

    async def completion(self, **kwargs: Any) -> Completion:
        """Return the model's continuations of `prompt` and record their sequences."""
        prompt = kwargs.pop("prompt")
        turn = Turn(self.tokenizer, prompt, self._records.find_text(self._nodes(), prompt))
        answers = [a for a in await self._sample(turn, kwargs) if isinstance(a, Answer)]
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
        self._records = NodeRecords()

    async def _sample(self, turn: Turn, kwargs: dict[str, Any]) -> list[Answer | ToolAnswer]:
        """Send one request, record its sequences, return the answers."""
        request = {"model": self.server.config.model_name, **kwargs, "prompt": turn.prompt}
        if self.tokenizer is not None:
            request["input_ids"] = turn.input_ids()
        if self._debug_requests_enabled():
            logger.info("request to %s: %s", request["model"], request)
        reported = self._reported_version()
        answer = await self.server.tokens_and_logprobs_completion(**request)
        prompt_ids, completions, logprobs, reasons = answer
        versions = versions_in(answer, len(completions))
        notes = await turn.notes_of_prompt()
        recorded = []
        for ids, values, reason, version in zip(
            completions, logprobs, reasons, versions, strict=True
        ):
            policy_version = policy_version_of(version, reported)
            note_sampled(policy_version)
            sampled = Sampled(
                prompt_ids, ids, values, as_finish_reason(reason), version, policy_version
            )
            recorded.append(await turn.record(sampled, notes))
        self._keep([record for _, record in recorded], turn.parent)
        return [given for given, _ in recorded]

    def _keep(self, records: Sequence[NodeRecord], parent: Continuation | None) -> None:
        """Keep new sequences; in list mode the first takes the place of the one it continues."""
        for record in records:
            self._records.add(record)
        fresh = [record.node for record in records]
        if self.track_tree:
            self.sequences.update({node.full_text: node for node in fresh})
        else:
            continued = parent.record.node if parent is not None else None
            for i, known in enumerate(self.current_nodes):
                if fresh and known is continued:
                    self.current_nodes[i] = fresh.pop(0)
            self.current_nodes.extend(fresh)
        self._records.forget_others(self._nodes())

    def _nodes(self) -> list[SequenceNode]:
        return list(self.sequences.values()) if self.track_tree else self.current_nodes

    def _find_conversation(self, chat: ChatRequest) -> Continuation | None:
        if self.tokenizer is None:  # nothing can be continued by ids
            return self._records.find_text(self._nodes(), chat.prompt)
        return continue_chat(
            self._records,
            self._nodes(),
            chat,
            self._convert_messages_to_prompt,
            strips_thinking=self._strip_think_blocks,
        )

    def _convert_messages_to_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> str:
        def render(shown: Sequence[Mapping[str, Any]]) -> str:
            keep_thinking = not self._strip_think_blocks
            return render_messages(self.tokenizer, shown, tools=tools, keep_thinking=keep_thinking)

        messages = plain_messages(messages)
        translator = self._get_translator()
        if translator is None:
            return render(messages)
        as_text = translator.convert_messages_for_template(messages, honours_content=True)
        return render_either(render, as_text, messages)

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
