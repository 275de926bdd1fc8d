"""A session at one server that records, for every completion, the exact tokens sampled.

messages -> prompt text -> ids (those of the continued node + the new ones)
         -> engine -> ids and logprobs -> node, and an OpenAI answer for the caller

Invariants:

- A chat continues the recorded conversation that its messages start with. Turns are compared by
  meaning (`turn_recording` has the rules): calls with other spacing, missing ids, null content, or
  omitted thinking are the same turn. A changed turn, changed tools, or a changed system text start
  a new sequence.
- The engine receives the recorded ids plus the encoding of what follows the reply; sampled tokens
  are never encoded again from text. If the chat template would render the recorded turns
  differently, or their text has other ids, the node lists why in `metadata["extended_by_tokens"]`.
- If a server reports no token ids, its texts are tokenized (`text_sampling`) and the nodes are
  marked.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from atroposlib.envs.server_handling.chat_rendering import (
    THINKING_START,
    TextAnswer,
    ToolAnswer,
    as_finish_reason,
    as_mapping,
    build_chat,
    build_completion,
    encode_model_text,
    render_either,
    render_messages,
    text_of_content,
    text_of_end,
)
from atroposlib.envs.server_handling.openai_compatible import (
    ALL_LIMIT_NAMES,
    load_tokenizer,
    tokenizer_name_of,
)
from atroposlib.envs.server_handling.retry import ServerDownError
from atroposlib.envs.server_handling.server_baseline import (
    TOKEN_VERSIONS,
    failing_over,
    note_sampled,
    oldest_of_runs,
    runs_of_spans,
    spans_in,
)
from atroposlib.envs.server_handling.text_sampling import (
    TextReply,
    announce_text_tokens,
    end_of_turn_ids,
    provider_messages,
    reply_of,
    text_only,
)
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.turn_recording import (
    ChatRequest,
    Continuation,
    NodeRecord,
    NodeRecords,
    Sampled,
    SequenceNode,
    TurnRequest,
    continue_chat,
    plain_messages,
)
from atroposlib.errors import NoTokenIdsError, PromptError
from atroposlib.scored_data import IGNORE_INDEX, PLACEHOLDER_TOKENS
from atroposlib.utils.text import without_secrets

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion
    from openai.types.completion import Completion
    from openai.types.completion_usage import CompletionUsage

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)

Choose = Callable[[Any, bool], Awaitable[Any]]
"""Maps the session's current server and `is_training` to the server of the next request."""


class SessionServer:
    """Sends each request to the current server of a session.

    A request whose server is down is sent to another one: a session sends whole token sequences,
    so any server of the same model can continue it. All other attributes, such as `config` and
    `tokenizer`, are those of the current server.

    Args:
        first: The server at the start.
        choose: Chooses the server of each request.
        on_move: Called with the old and the new server when the session moves.

    Attributes:
        current: Server of the last request.
    """

    def __init__(
        self, first: Any, choose: Choose, on_move: Callable[[Any, Any], None] = lambda *_: None
    ) -> None:
        self.current = first
        self._choose = choose
        self._on_move = on_move

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)

    async def chat_completion(self, **kwargs: Any) -> Any:
        return await self._send("chat_completion", kwargs)

    async def completion(self, **kwargs: Any) -> Any:
        return await self._send("completion", kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        return await self._send("tokens_and_logprobs_completion", kwargs)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        rows: dict[str, Any] = await self._send("get_logprobs", kwargs)
        return rows

    async def _send(self, method: str, kwargs: dict[str, Any]) -> Any:
        is_training = kwargs.get("split", "train") == "train"
        while True:
            chosen = await self._choose(self.current, is_training)
            if chosen is not self.current:  # another request may have moved the session meanwhile
                self._on_move(self.current, chosen)
                self.current = chosen
            try:
                return await getattr(self.current, method)(**failing_over(self.current, kwargs))
            except ServerDownError as error:
                logger.debug("%s; the session continues at another server", error)


def present_server(server: Any) -> Any:
    """Return the current server of a `SessionServer`; any other server is returned unchanged."""
    return server.current if isinstance(server, SessionServer) else server


class DummyManagedServer:
    """A session at a server without token ids: real texts, placeholder tokens.

    Lets an environment run with any provider. Its sequences do not contain the sampled tokens and
    must not be trained on: `metadata["dummy_tokens"]` is True in each, and exports and trainers
    refuse them (`scored_data.has_placeholder_tokens`).
    """

    DUMMY_TOKENS: ClassVar[list[int]] = list(PLACEHOLDER_TOKENS)
    DUMMY_MASKED_TOKENS: ClassVar[list[int]] = [IGNORE_INDEX, *PLACEHOLDER_TOKENS[1:]]
    DUMMY_LOGPROBS: ClassVar[list[float]] = [-0.5] * len(PLACEHOLDER_TOKENS)

    def __init__(self, server: Any, tokenizer: Any = None, track_tree: bool = False) -> None:
        self.server = server
        self.tokenizer = tokenizer
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        answer: ChatCompletion = await self.server.chat_completion(**kwargs)
        messages = map(as_mapping, kwargs["messages"])
        blocks = [f"{m['role']}:{text_of_content(m.get('content'))}" for m in messages]
        for choice in answer.choices:
            text = "\n\n".join([*blocks, f"assistant:{choice.message.content or ''}"])
            self._track(text, choice.finish_reason)
        return answer

    async def completion(self, **kwargs: Any) -> Completion:
        answer: Completion = await self.server.completion(**kwargs)
        for choice in answer.choices:
            self._track(kwargs["prompt"] + choice.text, choice.finish_reason)
        return answer

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError("a server without token ids does not implement get_logprobs")

    def get_state(self) -> dict[str, Any]:
        if self.track_tree:
            sequences = {node.full_text: node for node in self.current_nodes}
            return {"sequences": sequences, "tree": dict(sequences)}
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        self.current_nodes = []

    def _track(self, full_text: str, finish_reason: str | None) -> None:
        self.current_nodes.append(
            SequenceNode(
                full_text=full_text,
                tokens=list(self.DUMMY_TOKENS),
                masked_tokens=list(self.DUMMY_MASKED_TOKENS),
                logprobs=list(self.DUMMY_LOGPROBS),
                metadata={"finish_reason": finish_reason or "stop", "dummy_tokens": True},
            )
        )


class ManagedServerAdapter:
    """A managed server with the interface of an async OpenAI client.

    It has `chat.completions.create` and `completions.create`; other methods of the client raise,
    since they would bypass the recording of tokens.
    """

    def __init__(self, managed_server: Any, base_url: str) -> None:
        self.base_url = base_url
        self.completions = SimpleNamespace(create=managed_server.completion)
        self.chat = SimpleNamespace(
            completions=SimpleNamespace(create=managed_server.chat_completion)
        )

    async def post(self, path: str, body: Any, cast_to: Any) -> NoReturn:
        raise NotImplementedError(f"a managed server cannot record raw requests to {path}")

    def copy(self, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("a managed server cannot be copied with other settings")


class ManagedServer:
    """Chat and completion requests whose sequences are kept with tokens, masks and logprobs.

    A chat that continues a recorded conversation, or a prompt that starts with a recorded text,
    continues that sequence: the engine receives the recorded tokens, never a new tokenization of
    their text, and every turn sampled so far stays trainable. Any other request starts a new
    sequence.

    Args:
        server: Any object with `tokens_and_logprobs_completion`.
        tokenizer: Default: the server's, else the one of its model name; None if neither loads.
        track_tree: Whether to keep every sequence by its text instead of replacing the continued
            one.
        tool_parser: Name of a tool-call format. With it, prompts include the `tools` of a chat,
            calls in completions are parsed, and calls in messages are rendered as they were
            sampled. Sequences always hold the raw text. None leaves tools out of prompts.
        preserve_think_blocks: Ignored; thinking is preserved unless `strip_think_blocks` is set.
        strip_think_blocks: Whether the chat template may drop earlier thinking. Such a turn then
            starts a new sequence, since its prompt differs from the sampled tokens.
        policy_version: Called before each request; returns the policy version that the service
            reports, for engines that do not name their weights.

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
        self._end_of_turn: list[int] | None = None
        if tokenizer is None:
            self._initialize_tokenizer()

    @property
    def is_text_only(self) -> bool:
        """Whether the server reports no token ids, so that texts are tokenized here."""
        # Test and user-defined servers may lack the attribute.
        return not getattr(present_server(self.server), "gives_token_ids", True)

    @property
    def _takes_no_limit(self) -> bool:
        """Whether the server is one of ours; user-defined ones get only what the caller gave."""
        return getattr(present_server(self.server), "takes_no_limit", False)

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """Return the model's answers to `messages` and record their sequences.

        Args:
            **kwargs: `messages` and engine options (`n`, `max_tokens`, `temperature`, `stop`, ...);
                `split` is passed on. Without a limit a reply may fill the context. `tools` and
                `tool_choice` need a `tool_parser`; `tool_choice="none"` still shows the tools but
                leaves the answer unparsed. If the last message is the assistant's text, the model
                continues that text.

        Raises:
            PromptError: the prompt would lack the text of a message, or the last message is the
                assistant's and calls tools.
        """
        if kwargs.keys().isdisjoint(ALL_LIMIT_NAMES) and self._takes_no_limit:
            kwargs["max_tokens"] = None
        turn = self._chat_turn(
            kwargs.pop("messages"), kwargs.pop("tools", None), kwargs.pop("tool_choice", None)
        )
        answers, usage = await self._sample(turn, kwargs)
        return build_chat(answers, usage=usage, **self._answer_head())

    def prompt_of_chat(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[int]]:
        """Return the text and the ids that `chat_completion` would send; nothing is recorded.

        Raises:
            PromptError: the prompt would not hold all messages, or the session has no tokenizer.
        """
        if self.tokenizer is None:
            raise PromptError("this session has no tokenizer to render a prompt with")
        turn = self._chat_turn(messages, tools, None)
        return turn.full_prompt, turn.input_ids()

    def _chat_turn(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, tool_choice: Any
    ) -> TurnRequest:
        translator = self._get_translator() if tools else None
        shown_tools = tools if translator is not None else None
        chat = ChatRequest.of(messages, shown_tools, self._convert_messages_to_prompt)
        turn = TurnRequest(
            self.tokenizer,
            chat.prompt,
            self._find_conversation(chat),
            chat,
            translator,
            tool_choice,
            self._strip_think_blocks,
        )
        turn.check_prompt()
        return turn

    async def completion(self, **kwargs: Any) -> Completion:
        prompt = kwargs.pop("prompt")
        turn = TurnRequest(self.tokenizer, prompt, self._records.find_text(self._nodes(), prompt))
        sampled, usage = await self._sample(turn, kwargs)
        answers = [answer for answer in sampled if isinstance(answer, TextAnswer)]
        return build_completion(answers, usage=usage, **self._answer_head())

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Return prompt logprobs of `messages`, `prompt` or `input_ids`; nothing is recorded.

        Raises:
            NotImplementedError: the server has no prompt logprobs.
        """
        server = present_server(self.server)
        if not hasattr(server, "get_logprobs"):
            raise NotImplementedError(f"{type(server).__name__} does not implement get_logprobs")
        messages = kwargs.pop("messages", None)
        if messages is not None:
            kwargs["prompt"] = self._convert_messages_to_prompt(messages)
        rows: dict[str, Any] = await self.server.get_logprobs(**kwargs)
        return rows

    def get_state(self) -> dict[str, Any]:
        """Return copies: `{"nodes": [...]}`, or `{"sequences": ..., "tree": ...}` in tree mode."""
        if self.track_tree:
            return {"sequences": dict(self.sequences), "tree": dict(self.sequences)}
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        self.current_nodes = []
        self.sequences = {}
        self._records = NodeRecords()

    async def _sample(
        self, turn: TurnRequest, kwargs: dict[str, Any]
    ) -> tuple[list[TextAnswer | ToolAnswer], CompletionUsage | None]:
        """Send one request, record its sequences, return the answers.

        Only servers without token ids report the usage.
        """
        if self.is_text_only:
            return await self._sample_texts(turn, kwargs)
        request = {"model": self.server.config.model_name, **kwargs, "prompt": turn.prompt}
        if self.tokenizer is not None:
            request["input_ids"] = turn.input_ids()
        if self._debug_requests_enabled():
            logger.info("request to %s: %s", request["model"], request)
        reported = self._reported_version()
        try:
            answer = await self.server.tokens_and_logprobs_completion(**request)
        except NoTokenIdsError as error:
            if self.tokenizer is None:
                raise
            logger.debug("%s", error)  # `announce_text_tokens` warns once
            return await self._sample_texts(turn, kwargs)
        prompt_ids, completions, logprobs, reasons = answer
        sampled = [
            Sampled(
                prompt_ids,
                ids,
                values,
                as_finish_reason(reason),
                spans[0].version if spans else None,
                runs_of_spans(spans, reported),
                oldest_of_runs(runs_of_spans(spans, reported), reported),
            )
            for ids, values, reason, spans in zip(
                completions, logprobs, reasons, spans_in(answer), strict=True
            )
        ]
        return await self._record(turn, sampled), None

    async def _sample_texts(
        self, turn: TurnRequest, kwargs: dict[str, Any]
    ) -> tuple[list[TextAnswer | ToolAnswer], CompletionUsage | None]:
        """Request texts from a server without token ids, tokenize them, record the sequences."""
        if self.tokenizer is None:
            raise NoTokenIdsError(
                f"{type(present_server(self.server)).__name__} gives no token ids, and no "
                "tokenizer is known to encode its texts; name one with --env.tokenizer_name, or "
                "use a vLLM engine with server_type vllm"
            )
        options = {name: value for name, value in kwargs.items() if value is not None}
        request: dict[str, Any] = {"model": self.server.config.model_name, **options}
        if turn.chat is not None:
            request["messages"] = provider_messages(turn.chat.all_messages)
            if turn.chat.tools:
                request["tools"] = list(turn.chat.tools)
                request |= {} if turn.tool_choice is None else {"tool_choice": turn.tool_choice}
            ask = self.server.chat_completion
        else:
            request["prompt"] = turn.prompt
            ask = self.server.completion
        if self._debug_requests_enabled():
            logger.info("request to %s: %s", request["model"], request)
        reported = self._reported_version()
        answer = await ask(**request)
        server = present_server(self.server)
        server.gives_token_ids = False  # known for the next session
        announce_text_tokens(
            without_secrets(
                str(getattr(server.config, "base_url", None) or "at the official endpoint")
            ),
            str(getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__),
        )
        prompt_ids = turn.input_ids()
        replies = [
            reply_of(
                choice,
                render_calls=turn.translator.render_calls if turn.translator else None,
                opens_thinking=turn.prompt.rstrip().endswith(THINKING_START),
                has_stop_strings=bool(options.get("stop")),
                end_texts=self._end_texts(turn),
            )
            for choice in answer.choices
        ]
        sampled = [self._sampled_of(reply, prompt_ids, turn, reported) for reply in replies]
        return await self._record(turn, sampled), answer.usage

    def _sampled_of(
        self, reply: TextReply, prompt_ids: list[int], turn: TurnRequest, reported: int | None
    ) -> Sampled:
        ids = encode_model_text(self.tokenizer, reply.text, own_marks=reply.own_marks)
        end_ids = self._end_ids(turn) if reply.is_ended else []
        return Sampled(
            prompt_ids,
            [*ids, *end_ids],
            [],
            reply.finish_reason,
            None,
            [(None, len(ids) + len(end_ids))],
            reported,
            reply=reply,
            num_end_ids=len(end_ids),
        )

    def _end_ids(self, turn: TurnRequest) -> list[int]:
        """Return the ids that end a reply: those of the chat template, or eos for a bare text."""
        if turn.chat is None:
            eos = getattr(self.tokenizer, "eos_token_id", None)
            return [] if eos is None else [eos]
        if self._end_of_turn is None:
            self._end_of_turn = end_of_turn_ids(self.tokenizer, self._convert_messages_to_prompt)
        return self._end_of_turn

    def _end_texts(self, turn: TurnRequest) -> list[str]:
        """Return the texts with which servers may end a reply, that of the template first."""
        end_ids = self._end_ids(turn)
        eos = getattr(self.tokenizer, "eos_token_id", None)
        ends = [end_ids, end_ids[:1], [] if eos is None else [eos]]
        return [text_of_end(self.tokenizer, ids) for ids in ends]

    async def _record(
        self, turn: TurnRequest, completions: Sequence[Sampled]
    ) -> list[TextAnswer | ToolAnswer]:
        notes = await turn.notes_of_prompt()
        recorded = []
        for sampled in completions:
            recorded.append(await turn.record(sampled, notes))
            note_sampled(
                sampled.policy_version,
                tokens=recorded[-1][1].node.tokens,
                finish_reason=sampled.finish_reason,
                is_from_text=sampled.reply is not None,
                runs=(recorded[-1][1].node.metadata or {}).get(TOKEN_VERSIONS, ()),
            )
        self._keep([record for _, record in recorded], turn.parent)
        return [given for given, _ in recorded]

    def _keep(self, records: Sequence[NodeRecord], parent: Continuation | None) -> None:
        """Keep new sequences; in list mode the first one replaces the sequence it continues."""
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
        if self.is_text_only:
            messages = text_only(messages)
        translator = self._get_translator()
        if translator is None:
            return render(messages)
        as_text = translator.convert_messages_for_template(messages, compares_content=True)
        return render_either(render, as_text, messages)

    def _get_translator(self) -> ToolCallTranslator | None:
        """Return the tool-call translator; None without parser or tokenizer."""
        if self._translator is None and self._tool_parser_name and self.tokenizer is not None:
            self._translator = ToolCallTranslator(self.tokenizer, self._tool_parser_name)
        return self._translator

    def _initialize_tokenizer(self) -> None:
        self.tokenizer = getattr(self.server, "tokenizer", None)
        if self.tokenizer is not None:
            return
        try:
            self.tokenizer = load_tokenizer(self.server.config)
        except (OSError, ValueError) as error:
            logger.warning(
                "no tokenizer for %r (%s); prompts are sent as text and completions are read as "
                "code points",
                tokenizer_name_of(self.server.config),
                error,
            )

    def _answer_head(self) -> dict[str, Any]:
        model = self.server.config.model_name
        return {"model": model, "id_": str(uuid.uuid4()), "created": int(time.time())}

    @staticmethod
    def _debug_requests_enabled() -> bool:
        return os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1"
