"""Structured outputs: completions that follow a JSON schema, a regex or a grammar, by xgrammar.

    source ─► worker process: compiles ─► Grammar ─► GrammarState of each completion
                                                        │        ▲
                                         allowed tokens ▼        │ sampled token
                                                 logits of the next token

A source can be made to take minutes to compile, which is why a process with a time limit does it.
Logprobs are normalized over the allowed tokens, as with vLLM, which uses the same library.

Shapes: `M` rows (one per sequence), `R` of them with a grammar, `V` vocabulary, `W` words of 32
bits and `B` bytes for one bit per token.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from atroposlib.errors import AtroposError, MissingExtraError
from atroposlib.utils.score_pool import ProcessBackend, ScoreCrashError, ScoreTimeoutError

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

GrammarKind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]

MAX_SOURCE_CHARS = 2**20
MAX_NESTING = 80
"""Objects and arrays inside each other; xgrammar's time grows with the square of it."""
_COMPILING_S = 30.0
_MAX_COMPILED_BYTES = 2**28
"""Memory of all grammars that are kept for later requests."""
_STARTING_S, _TOKEN_S = 2.0, 0.02
"""Processor time that a request may spend in its grammar, at first and for each token more.
Ambiguous grammars exceed it."""
_PLACE_IN_LIBRARY = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""Time and line of its code, before a message of xgrammar."""
_UNENFORCED = frozenset(
    {"uniqueItems", "contains", "minContains", "maxContains", "not", "if",
     "dependentRequired", "dependentSchemas"}
)  # fmt: skip
"""Keywords of JSON Schema that xgrammar ignores."""
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords whose value has names instead of keywords."""


class GrammarError(AtroposError, ValueError):
    """A source that is malformed or takes too long to compile."""


class GrammarSource(NamedTuple):
    """A form of text that completions follow."""

    kind: GrammarKind
    text: str
    """JSON of a schema, of a list of choices or of a structural tag; a regex; EBNF or Lark."""


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar for one tokenizer."""

    compiled: xgrammar.CompiledGrammar
    end_ids: frozenset[int]
    """Tokens that end a turn, which are allowed where the text may end."""

    def start(self, stop_ids: frozenset[int], time_left: GrammarTime) -> GrammarState:
        """Return the state before the first token; `stop_ids` also end the completion."""
        return GrammarState(self, self.end_ids | stop_ids, time_left)


class GrammarTime:
    """Processor time that the completions of one request have left, in seconds."""

    def __init__(self) -> None:
        self.left_s = _STARTING_S


class GrammarState:
    """The position of one completion in its grammar.

    Attributes:
        failure: why the completion cannot go on; None while it can.
    """

    def __init__(self, grammar: Grammar, end_ids: frozenset[int], time_left: GrammarTime) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar.compiled, override_stop_tokens=sorted(end_ids))
        self._time = time_left
        self.failure: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether the grammar limits the next token: not after a token that ended the text."""
        return self.failure is None and not self._matcher.is_terminated()

    def fill(self, bits_RW: torch.Tensor, row: int) -> None:
        """Set the bits of the tokens that may follow."""
        self._run(self._matcher.fill_next_token_bitmask, bits_RW, row)
        if self.failure is None and not bits_RW[row].any():
            self.failure = "the grammar allows no token"

    def accept(self, token: int) -> None:
        """Move on by a sampled token."""
        if not self.is_open:
            return
        self._time.left_s += _TOKEN_S
        is_accepted = self._run(self._matcher.accept_token, token)
        if self.failure is None and not is_accepted:
            self.failure = f"the grammar does not allow the token {token}"

    def _run(self, function: Callable[..., object], *args: object) -> object:
        if self._time.left_s <= 0:
            self.failure = "the grammar takes too long; expected one that is less ambiguous"
            return None
        started = time.thread_time()
        try:
            return function(*args)
        except RuntimeError as error:
            self.failure = f"the grammar failed: {error}"
            return None
        finally:
            self._time.left_s -= time.thread_time() - started


def constrain(logits_MV: torch.Tensor, states: Sequence[GrammarState | None]) -> torch.Tensor:
    """Return logits in which the tokens that a grammar does not allow are minus infinity.

    Args:
        logits_MV: Logits of the model; not modified.
        states: [M] None where there is no grammar. Those that fail keep their logits.
    """
    limited = [(row, state) for row, state in enumerate(states) if state and state.is_open]
    if not limited:
        return logits_MV
    from xgrammar import allocate_token_bitmask

    num_tokens = logits_MV.shape[1]
    bits_RW = allocate_token_bitmask(len(limited), num_tokens)
    for index, (_, state) in enumerate(limited):
        state.fill(bits_RW, index)
        if state.failure is not None:
            bits_RW[index] = -1  # every bit
    bytes_RB = bits_RW.numpy().view(np.uint8)
    allowed = np.unpackbits(bytes_RB, axis=1, count=num_tokens, bitorder="little")
    excluded_RV = torch.from_numpy(allowed == 0).to(logits_MV.device)
    rows_R = torch.tensor([row for row, _ in limited], device=logits_MV.device)
    limited_MV = logits_MV.clone()
    limited_MV[rows_R] = logits_MV[rows_R].masked_fill(excluded_RV, -torch.inf)
    return limited_MV


class GrammarCompiler:
    """Compiles the grammars of requests and keeps the latest; `close` ends its process.

    Args:
        tokenizer: Only read, also in threads.
        vocabulary_size: V, the width of the logits.
        end_ids: Tokens that end a turn.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._end_ids = end_ids
        self._info: xgrammar.TokenizerInfo | None = None
        self._process: ProcessBackend | None = None
        self._kept: OrderedDict[GrammarSource, Grammar | GrammarError] = OrderedDict()
        """Also errors, so that a source which takes too long is not tried for each request."""
        self._lock = asyncio.Lock()

    async def compile(self, source: GrammarSource) -> Grammar:
        """Return the grammar of a source, the kept one if there is one.

        Raises:
            GrammarError: The source is malformed, or takes too long.
            MissingExtraError: xgrammar is not installed.
        """
        if importlib.util.find_spec("xgrammar") is None:
            raise MissingExtraError("xgrammar", extra="trainer")
        if len(source.text) > MAX_SOURCE_CHARS:
            raise GrammarError(
                f"expected at most {MAX_SOURCE_CHARS} characters, got {len(source.text)}"
            )
        if source not in self._kept:
            # One at a time: requests that wait often have the same source.
            async with self._lock:
                if source not in self._kept:
                    self._kept[source] = await self._grammar_or_error(source)
                    self._remove_oldest()
        self._kept.move_to_end(source)
        found = self._kept[source]
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def close(self) -> None:
        """End the process; closing twice has no effect."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    async def _grammar_or_error(self, source: GrammarSource) -> Grammar | GrammarError:
        try:
            _check_schema(source)
            return await self._compile(source)
        except GrammarError as error:
            return error

    async def _compile(self, source: GrammarSource) -> Grammar:
        if self._info is None:
            self._info = await asyncio.to_thread(self._describe_tokenizer)
        info = self._info
        if self._process is None:
            prepare = partial(_prepare_process, info.serialize_json())
            self._process = ProcessBackend(1, prepare)
        try:
            serialized = await self._process.call(_compile_in_process, [source], _COMPILING_S)
        except ScoreTimeoutError as error:
            raise GrammarError(f"compiling it takes more than {_COMPILING_S:g} s") from error
        except ScoreCrashError as error:
            raise GrammarError(f"it cannot be compiled: {error}") from error
        return Grammar(await asyncio.to_thread(_load, serialized, info), self._end_ids)

    def _describe_tokenizer(self) -> xgrammar.TokenizerInfo:
        from xgrammar import TokenizerInfo

        try:
            return TokenizerInfo.from_huggingface(
                self._tokenizer,
                vocab_size=self._vocabulary_size,
                stop_token_ids=sorted(self._end_ids) or None,
            )
        except Exception as error:  # of any class, for a tokenizer of a kind it does not know
            raise GrammarError(f"xgrammar does not support the tokenizer: {error}") from error

    def _remove_oldest(self) -> None:
        num_bytes = sum(_size_of(*entry) for entry in self._kept.items())
        while len(self._kept) > 1 and num_bytes > _MAX_COMPILED_BYTES:
            num_bytes -= _size_of(*self._kept.popitem(last=False))


def _size_of(source: GrammarSource, found: Grammar | GrammarError) -> int:
    size = len(source.text)
    return size if isinstance(found, GrammarError) else size + found.compiled.memory_size_bytes


def _load(serialized: str, info: xgrammar.TokenizerInfo) -> xgrammar.CompiledGrammar:
    from xgrammar import CompiledGrammar

    return CompiledGrammar.deserialize_json(serialized, info)


def _check_schema(source: GrammarSource) -> None:
    """Log keywords that are not enforced; `GrammarError` for a schema that is not JSON or deep."""
    if source.kind not in ("json", "structural_tag"):
        return
    try:
        schema = msgspec.json.decode(source.text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the schema is not JSON: {error}") from error
    for name in sorted(_UNENFORCED.intersection(_keywords(schema))):
        logger.warning("structured outputs: %s of a JSON schema is not enforced", name)


def _keywords(root: Any) -> Iterator[str]:
    """Yield the keys of all objects, except names of properties and definitions.

    Raises:
        GrammarError: Objects and arrays are nested too deep.
    """
    level = [(root, False)]
    for _ in range(MAX_NESTING + 1):
        inner: list[tuple[Any, bool]] = []
        for value, has_names in level:
            if isinstance(value, dict):
                if not has_names:
                    yield from value
                inner += [(each, not has_names and key in _NAMED) for key, each in value.items()]
            elif isinstance(value, list):
                inner += [(each, False) for each in value]
        level = inner
        if not level:
            return
    raise GrammarError(f"expected at most {MAX_NESTING} objects and arrays inside each other")


_process_compiler: xgrammar.GrammarCompiler | None = None
"""Of a worker process."""


def _prepare_process(tokenizer_info: str) -> None:
    global _process_compiler
    from xgrammar import GrammarCompiler, TokenizerInfo

    info = TokenizerInfo.deserialize_json(tokenizer_info)
    _process_compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compile_in_process(source: GrammarSource) -> str:
    """Return a compiled grammar as JSON; `GrammarError` for a malformed source."""
    assert _process_compiler is not None, "the process was not prepared"
    try:
        return str(_compiled(_process_compiler, source).serialize_json())
    except Exception as error:  # xgrammar raises RuntimeError for what it cannot parse
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise GrammarError(_PLACE_IN_LIBRARY.sub("", lines[0])) from error


def _compiled(
    compiler: xgrammar.GrammarCompiler, source: GrammarSource
) -> xgrammar.CompiledGrammar:
    kind, text = source
    if kind == "json":
        return compiler.compile_json_schema(text)
    if kind == "json_object":
        return compiler.compile_json_schema('{"type": "object"}')
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "grammar":
        is_ebnf = "::=" in text
        return compiler.compile_grammar(text) if is_ebnf else compiler.compile_lark(text)
    if kind == "choice":
        choices = [{"type": "const_string", "value": choice} for choice in json.loads(text)]
        form = {"type": "or", "elements": choices}
        text = json.dumps({"type": "structural_tag", "format": form})
    return compiler.compile_structural_tag(text)
