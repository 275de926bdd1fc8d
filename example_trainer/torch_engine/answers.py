"""JSON of the answers, in the shapes of vLLM.

Each choice has the weight versions that sampled its tokens, null for unknown ones, unless all are:

    "weight_versions": [{"version": "12", "num_tokens": 57}, {"version": "13", "num_tokens": 3}]
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from example_trainer.torch_engine.jobs import Completion, Job, TopEntries
from example_trainer.torch_engine.protocol import ChatFields, ServedTorchModel, TextFields
from example_trainer.torch_engine.texts import INCOMPLETE, find_stop

TokenRow = tuple[int, float | None, TopEntries]
"""A token, its logprob and the most likely tokens at its position."""
_LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_LARGE_ENTRIES = 2**14


class _PromptPart(NamedTuple):
    """The part of an answer that all choices of a prompt repeat."""

    ids: list[int]
    text: str
    """Of an echoed prompt."""
    rows: dict[str, list[Any]] | None
    """Logprobs of an echoed prompt."""
    logprobs: list[dict[str, Any] | None] | None


def error_body(message: str, *, status: int, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error answer."""
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    kind = kinds.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class AnswerWriter:
    """Builds the answers to one request."""

    def __init__(self, fields: TextFields | ChatFields, served: ServedTorchModel) -> None:
        self._fields = fields
        self._served = served
        self._is_chat = isinstance(fields, ChatFields)
        prefix, kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "")
        self._id = f"{prefix}-{uuid.uuid4().hex}"
        self._object = kind or "text_completion"
        self._created = int(time.time())

    def whole(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Return the answer to a request whose jobs, one for each prompt, are done."""
        choices = []
        for position, job in enumerate(jobs):
            part = self._prompt_part(job)
            for completion in job.completions:
                index = position * self._fields.n + completion.index
                choices.append(self._choice(part, completion, index))
        answer = {**self._envelope(self._object), "choices": choices, "usage": usage(jobs)}
        if self._is_chat:
            answer["prompt_logprobs"] = self._prompt_logprobs(jobs[0])
            if self._fields.return_token_ids:
                answer["prompt_token_ids"] = list(jobs[0].request.prompt_ids)
        return answer

    def is_large(self, jobs: Sequence[Job]) -> bool:
        """Whether building the answer takes long enough to delay other requests."""
        num_prompt = num_completion = 0
        for job in jobs:
            top = job.request.prompt_top
            num_prompt += 0 if top is None else len(job.request.prompt_ids) * (1 + top)
            num_tokens = sum(len(each.tokens) for each in job.completions)
            num_completion += num_tokens * (1 + job.request.num_top)
        return num_prompt + num_completion > _LARGE_ENTRIES

    def _prompt_part(self, job: Job) -> _PromptPart:
        fields = self._fields
        ids = list(job.request.prompt_ids)
        if isinstance(fields, ChatFields):
            return _PromptPart(ids, "", None, None)
        has_rows = fields.echo and fields.logprobs is not None
        return _PromptPart(
            ids,
            text=self._decode(ids) if fields.echo else "",
            rows=self._text_rows(_echoed_rows(job)) if has_rows else None,
            logprobs=self._prompt_logprobs(job),
        )

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
        }

    def _choice(self, part: _PromptPart, completion: Completion, index: int) -> dict[str, Any]:
        fields = self._fields
        choice: dict[str, Any] = {"index": index, **self._ending(completion)}
        text = self.text_of(completion)
        if isinstance(fields, ChatFields):
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
            choice["logprobs"] = self.chat_logprobs(completion, 0) if fields.logprobs else None
        else:
            choice["text"] = part.text + text
            choice["logprobs"] = None
            if fields.logprobs is not None:
                choice["logprobs"] = self.text_logprobs(completion, 0, before=part.rows)
            choice["prompt_logprobs"] = part.logprobs
            if fields.return_token_ids:
                choice["prompt_token_ids"] = part.ids
        if fields.return_token_ids:
            choice["token_ids"] = list(completion.tokens)
        return choice

    def _ending(self, completion: Completion) -> dict[str, Any]:
        """Return the fields of a choice that are known at its end."""
        reason = completion.stop_reason
        if reason in self._served.end_ids and not self._fields.ignore_eos:
            reason = None
        ending: dict[str, Any] = {
            "finish_reason": completion.finish_reason,
            "stop_reason": reason,
        }
        runs = completion.version_runs
        if any(version is not None for version, _ in runs):
            ending["weight_versions"] = [
                {"version": version, "num_tokens": count} for version, count in runs
            ]
        return ending

    def text_of(self, completion: Completion) -> str:
        """Return the text of a completion, without what ended it unless that is requested."""
        reason, includes = completion.stop_reason, self._fields.include_stop_str_in_output
        tokens = completion.tokens
        if isinstance(reason, int) and not includes:
            tokens = tokens[:-1]
        text = self._decode(tokens)
        if isinstance(reason, str):
            first = self._decode(tokens[: completion.request.sampling.min_tokens])
            end = find_stop(text, reason, len(first.rstrip(INCOMPLETE)))
            return text[: end + (len(reason) if includes else 0)] if end >= 0 else text
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        skips = self._fields.skip_special_tokens
        return str(self._served.tokenizer.decode(list(tokens), skip_special_tokens=skips))

    def _shown_token(self, token: int) -> str:
        if self._fields.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._served.token_text(token)

    def chat_logprobs(self, completion: Completion, first: int) -> dict[str, Any]:
        """Return the logprobs of a chat completion from token `first` on."""

        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self._shown_token(token)
            data = list(text.encode("utf-8", errors="replace"))
            return {"token": text, "logprob": max(logprob, _LOWEST_LOGPROB), "bytes": data}

        content = []
        for position in range(first, len(completion.tokens)):
            tops = completion.tops[position] if completion.request.num_top else []
            chosen = entry(completion.tokens[position], completion.logprobs[position])
            content.append({**chosen, "top_logprobs": [entry(*top) for top in tops]})
        return {"content": content}

    def text_logprobs(
        self,
        completion: Completion,
        first: int,
        *,
        before: dict[str, list[Any]] | None = None,
    ) -> dict[str, Any]:
        """Return the logprobs of a text completion from token `first` on.

        `before`: The logprobs of an echoed prompt.
        """
        rows: list[TokenRow] = []
        for position in range(first, len(completion.tokens)):
            tops = completion.tops[position] if completion.request.num_top else []
            rows.append((completion.tokens[position], completion.logprobs[position], tops))
        if before is None:
            return self._text_rows(rows)
        offset = before["text_offset"][-1] + len(before["tokens"][-1])
        return {key: before[key] + new for key, new in self._text_rows(rows, offset).items()}

    def _text_rows(self, rows: Sequence[TokenRow], offset: int = 0) -> dict[str, list[Any]]:
        """Return the logprobs of tokens, whose text begins at `offset`."""
        tokens = [self._shown_token(token) for token, _, _ in rows]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if logprob is None else max(logprob, _LOWEST_LOGPROB) for _, logprob, _ in rows
            ],
            "top_logprobs": [self._named_tops(*row) for row in rows],
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
        }

    def _named_tops(
        self, token: int, logprob: float | None, tops: TopEntries
    ) -> dict[str, float] | None:
        if logprob is None:
            return None
        named = {self._shown_token(token): max(logprob, _LOWEST_LOGPROB)}
        for other, value in tops:
            named.setdefault(self._shown_token(other), max(value, _LOWEST_LOGPROB))
        return named

    def _prompt_logprobs(self, job: Job) -> list[dict[str, Any] | None] | None:
        """Return for each token of the prompt {id: logprob}: its own, then the most likely."""
        if self._fields.prompt_logprobs is None or job.prompt_logprobs is None:
            return None
        rows: list[dict[str, Any] | None] = [None]
        pairs = zip(job.request.prompt_ids[1:], job.prompt_logprobs, strict=True)
        for token, (logprob, tops) in pairs:
            ranks = {other: rank for rank, (other, _) in enumerate(tops, start=1)}
            values = {token: logprob, **dict(tops)}
            rows.append(
                {
                    str(other): {
                        "logprob": max(value, _LOWEST_LOGPROB),
                        "rank": ranks.get(other),
                        "decoded_token": self._served.token_text(other),
                    }
                    for other, value in values.items()
                }
            )
        return rows

    def opening_chunk(self, job: Job, index: int) -> dict[str, Any] | None:
        """Return the first chunk of a choice of a chat; None for text completions."""
        if not self._is_chat:
            return None
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._envelope("chat.completion.chunk"), "choices": [choice]}
        if self._fields.return_token_ids:
            chunk["prompt_token_ids"] = list(job.request.prompt_ids)
        return chunk

    def chunk(
        self,
        job: Job,
        completion: Completion,
        index: int,
        *,
        text: str,
        tokens: slice,
        is_last: bool,
    ) -> dict[str, Any]:
        """Return a chunk with new text and the tokens `tokens` of a completion."""
        fields = self._fields
        ending = self._ending(completion) if is_last else {"finish_reason": None}
        choice: dict[str, Any] = {"index": index, "logprobs": None, **ending}
        part = _part_of(completion, tokens)
        if isinstance(fields, ChatFields):
            choice["delta"] = {"content": text}
            if fields.logprobs:
                choice["logprobs"] = self.chat_logprobs(part, 0)
        else:
            choice["text"] = text
            if fields.logprobs is not None:
                choice["logprobs"] = self.text_logprobs(part, 0)
            if fields.return_token_ids and tokens.start == 0:
                choice["prompt_token_ids"] = list(job.request.prompt_ids)
        if fields.return_token_ids:
            choice["token_ids"] = list(part.tokens)
        kind = "chat.completion.chunk" if self._is_chat else self._object
        return {**self._envelope(kind), "choices": [choice]}

    def usage_chunk(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Return the last chunk of a stream that includes the numbers of tokens."""
        kind = "chat.completion.chunk" if self._is_chat else self._object
        return {**self._envelope(kind), "choices": [], "usage": usage(jobs)}


def _echoed_rows(job: Job) -> list[TokenRow]:
    """Return [P] rows of the prompt; the first token has no logprob."""
    first, *others = job.request.prompt_ids
    pairs = zip(others, job.prompt_logprobs or (), strict=True)
    return [(first, None, []), *((token, *entry) for token, entry in pairs)]


def _part_of(completion: Completion, tokens: slice) -> Completion:
    part = Completion(completion.request, completion.index, completion.generator)
    part.tokens = completion.tokens[tokens]
    part.logprobs = completion.logprobs[tokens]
    part.tops = completion.tops[tokens]
    return part


def usage(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the numbers of tokens of a request."""
    num_prompt = sum(len(job.request.prompt_ids) for job in jobs)
    num_completion = sum(len(each.tokens) for job in jobs for each in job.completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }
