"""Human preferences: a file of choices, and a page on which a person makes them.

    ask(case) ──► FILE.pending ──► page, or any program ──► FILE ──► the choice, or a timeout

Both files are JSON Lines. A pending case is `{"id", "prompt", "completions"}`, a choice is
`{"id", "choice"}`: the index of the best completion, or null if none is better than the others.
Programs may append choices to the file while an environment runs; the page does the same.

Invariants:
    - A choice that was written answers its case in every later run: ids depend on the texts only.
    - At most `max_pending` cases wait; further calls of `ask` wait for room, within their timeout.
    - Texts of models and data reach the page as text: they are escaped, and scripts are forbidden.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse

from atroposlib.envs.server_handling.proxy.app import serving
from atroposlib.errors import AtroposError, ConfigError
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRule, names_of_address

__all__ = [
    "PreferenceCase",
    "PreferenceDesk",
    "PreferenceTimeoutError",
    "choice_scores",
    "preference_page",
    "read_choice",
    "serve_preferences",
]

logger = logging.getLogger(__name__)

POLL_S = 0.5
MAX_LINE_BYTES = 4096
"""Maximum length of a choice in the file."""
MAX_FORM_BYTES = 1024
MAX_SHOWN_CHARACTERS = 20_000
"""Maximum characters of one message on the page."""
NO_CHOICE = "none"
"""Value of the form for completions of equal quality."""


class PreferenceTimeoutError(AtroposError, TimeoutError):
    """A group was not judged in time."""


class PreferenceCase(NamedTuple):
    """The completions of one prompt."""

    prompt: Sequence[Mapping[str, Any]]
    """Messages."""
    completions: Sequence[str]
    """[G] texts."""

    @property
    def case_id(self) -> str:
        content = json.dumps([list(map(dict, self.prompt)), list(self.completions)], default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def choice_scores(choice: int | None, num_completions: int) -> list[float]:
    """Return [G] 1.0 for the best completion and 0.0 for the others; all 0.5 without a best one."""
    if choice is None:
        return [0.5] * num_completions
    return [float(i == choice) for i in range(num_completions)]


def read_choice(line: bytes) -> tuple[str, int | None]:
    """Return id and choice of a line of the file.

    Raises:
        ValueError: the line is malformed.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"expected at most {MAX_LINE_BYTES} bytes, got {len(line)}")
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        raise ValueError('expected an object {"id": text, "choice": index or null}')
    choice = record.get("choice", -1)
    is_index = isinstance(choice, int) and not isinstance(choice, bool) and choice >= 0
    if choice is not None and not is_index:
        raise ValueError(f'"choice" is {choice!r:.50}; expected an index from 0, or null')
    return record["id"], choice


class PreferenceDesk:
    """Cases that wait for a choice, and the choices of the file; call `close` at the end.

    Args:
        path: file of choices; created with the first one.
        max_pending: maximum number of cases that wait at the same time.

    Attributes:
        pending: waiting cases by id, oldest first.
        num_judged: cases answered since the start.
        num_timeouts: cases not answered in time.
        num_bad_lines: malformed lines of the file.
    """

    def __init__(self, path: Path, *, max_pending: int) -> None:
        self.path = path
        self.pending: dict[str, PreferenceCase] = {}
        self.num_judged = 0
        self.num_timeouts = 0
        self.num_bad_lines = 0
        self._room = asyncio.Semaphore(max_pending)
        self._choices: dict[str, int | None] = {}
        self._waiting: dict[str, list[asyncio.Future[int | None]]] = {}
        self._position = 0
        self._is_in_long_line = False
        self._watch: asyncio.Task[None] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._pending_path.write_bytes(b"")  # cases of an earlier run wait no more
            self.read_file()
        except OSError as error:
            raise ConfigError(
                f"the file of preferences {path} cannot be read: {error.strerror}"
            ) from error

    async def ask(self, case: PreferenceCase, *, timeout_s: float) -> int | None:
        """Wait for the choice of a case; None if no completion is better.

        Cancelling is safe. Equal cases share one choice.

        Raises:
            PreferenceTimeoutError: there was no choice within `timeout_s`.
        """
        try:
            choice = await asyncio.wait_for(self._choice_of(case), timeout_s)
        except (TimeoutError, asyncio.TimeoutError) as error:  # two classes before Python 3.11
            self.num_timeouts += 1
            raise PreferenceTimeoutError(
                f"group {case.case_id} was not judged within {timeout_s:g} s"
            ) from error
        self.num_judged += 1
        return choice

    def choose(self, case_id: str, choice: int | None) -> bool:
        """Write the choice of a pending case; return False if there is no such case or completion.

        Raises:
            OSError: the file cannot be written; the case remains pending.
        """
        case = self.pending.get(case_id)
        if case is None or not _is_choice(case, choice):
            return False
        with self.path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")  # the last line of another program has no end
            file.write(json.dumps({"id": case_id, "choice": choice}).encode() + b"\n")
        self.read_file()
        return True

    def read_file(self) -> None:
        """Read the lines appended to the file since the last call, and answer their cases."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if file.seek(0, os.SEEK_END) < self._position:
                self._position, self._is_in_long_line = 0, False  # the file was written again
            file.seek(self._position)
            while line := file.readline(MAX_LINE_BYTES + 1):
                is_complete = line.endswith(b"\n")
                if not is_complete and len(line) <= MAX_LINE_BYTES:
                    return  # it is read later
                self._position = file.tell()
                if not self._is_in_long_line:
                    self._note_line(line)  # the start of a long line is malformed
                self._is_in_long_line = not is_complete

    async def close(self) -> None:
        """Stop watching the file, and cancel waiting calls."""
        for future in [future for futures in self._waiting.values() for future in futures]:
            future.cancel()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    async def _choice_of(self, case: PreferenceCase) -> int | None:
        case_id = case.case_id
        if self._is_answered(case_id, case):
            return self._choices[case_id]
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_file())
        async with self._room:
            if self._is_answered(case_id, case):  # while it waited for room
                return self._choices[case_id]
            future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            sharing = self._waiting.setdefault(case_id, [])
            sharing.append(future)
            try:
                if len(sharing) == 1:
                    self.pending[case_id] = case
                    self._write_pending(case)
                return await future
            finally:
                sharing.remove(future)
                if not sharing:
                    del self._waiting[case_id], self.pending[case_id]

    def _is_answered(self, case_id: str, case: PreferenceCase) -> bool:
        return case_id in self._choices and _is_choice(case, self._choices[case_id])

    def _note_line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            case_id, choice = read_choice(line)
        except (ValueError, RecursionError) as error:
            self.num_bad_lines += 1
            logger.warning("%s: a line before byte %d: %s", self.path, self._position, error)
            return
        self._choices[case_id] = choice
        case = self.pending.get(case_id)
        if case is None:
            return
        if not _is_choice(case, choice):
            self.num_bad_lines += 1
            logger.warning("%s: case %s has no completion %s", self.path, case_id, choice)
            return
        for future in self._waiting[case_id]:
            if not future.done():
                future.set_result(choice)

    @property
    def _pending_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.pending")

    def _write_pending(self, case: PreferenceCase) -> None:
        record = {
            "id": case.case_id,
            "prompt": list(map(dict, case.prompt)),
            "completions": list(case.completions),
        }
        with self._pending_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")

    async def _watch_file(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                self.read_file()
            except OSError as error:
                logger.warning("the file of preferences cannot be read: %s", error)


def _is_choice(case: PreferenceCase, choice: int | None) -> bool:
    return choice is None or 0 <= choice < len(case.completions)


STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: inherit; margin: 0; }
article { border: 1px solid #999; border-radius: 6px; padding: 1rem; margin: 1rem 0; }
.prompt { background: #eee; color: #111; }
button { font: inherit; padding: 0.3rem 1rem; margin-top: 0.8rem; }
"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Preferences</title>{refresh}
<style>{style}</style></head>
<body><h1>Which answer is best?</h1><p>{status}</p>
{body}</body></html>
"""

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)


def preference_page(desk: PreferenceDesk) -> str:
    """Return the page of the oldest pending case, each completion once, in an order of its own."""
    num_pending = len(desk.pending)
    status = f"{num_pending} waiting, {desk.num_judged} judged, {desk.num_timeouts} timed out."
    if not desk.pending:
        refresh = '<meta http-equiv="refresh" content="5">'
        return PAGE.format(refresh=refresh, style=STYLE, status=status, body="No group waits.")
    case_id, case = next(iter(desk.pending.items()))
    # People prefer what they see first, so the order is independent of the index.
    texts = list(case.completions)
    distinct = [i for i, text in enumerate(texts) if texts.index(text) == i]
    order = random.Random(case_id).sample(distinct, len(distinct))
    prompt = "".join(
        f'<article class="prompt"><b>{_text(message.get("role"))}</b>'
        f"<pre>{_text(message.get('content'))}</pre></article>\n"
        for message in case.prompt
    )
    answers = "".join(
        f"<article><pre>{_text(case.completions[i])}</pre>"
        f"{_form(case_id, str(i), 'This answer is best')}</article>\n"
        for i in order
    )
    neither = _form(case_id, NO_CHOICE, "None is better")
    return PAGE.format(refresh="", style=STYLE, status=status, body=prompt + answers + neither)


def _text(value: object) -> str:
    text = str(value)
    cut = f"\n… and {len(text) - MAX_SHOWN_CHARACTERS} more characters"
    return html.escape(
        text[:MAX_SHOWN_CHARACTERS] + (cut if len(text) > MAX_SHOWN_CHARACTERS else "")
    )


def _form(case_id: str, choice: str, label: str) -> str:
    return (
        f'<form method="post" action="choose"><input type="hidden" name="id" '
        f'value="{html.escape(case_id)}"><button name="choice" value="{choice}">{label}</button>'
        "</form>"
    )


def _preference_app(desk: PreferenceDesk, *, host: str) -> FastAPI:
    app = FastAPI(title="Preferences", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    async def show() -> Response:
        headers = {
            "Content-Security-Policy": POLICY,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }
        page = preference_page(desk).encode("utf-8", "replace")
        return HTMLResponse(page, headers=headers)

    @app.post("/choose")
    async def choose(request: Request) -> Response:
        form = await _read_form(request)
        case_id, choice = form.get("id", ""), form.get("choice", "")
        is_index = choice.isascii() and choice.isdigit() and len(choice) <= 4
        if choice != NO_CHOICE and not is_index:
            return PlainTextResponse("expected an index as choice, or none", 400)
        # A case that was answered or timed out meanwhile: the next one is shown.
        desk.choose(case_id, int(choice) if is_index else None)
        return RedirectResponse("/", 303)

    rule = WebPageRule(
        allowed_hosts=names_of_address(host),
        media_types=frozenset({"application/x-www-form-urlencoded"}),
        has_pages=True,
    )
    app.add_middleware(WebPageMiddleware, rule=rule)
    return app


async def _read_form(request: Request) -> dict[str, str]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_FORM_BYTES:
            return {}
    try:
        fields = parse_qs(body.decode("ascii"), max_num_fields=4)
    except ValueError:
        return {}
    return {name: values[0] for name, values in fields.items()}


@asynccontextmanager
async def serve_preferences(desk: PreferenceDesk, *, host: str, port: int) -> AsyncIterator[str]:
    """Serve the page in the running event loop and yield its URL.

    Args:
        desk: the cases.
        host: address to listen on.
        port: port; 0 selects a free one.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    shown = f"[{host}]" if ":" in host else host
    async with AsyncExitStack() as stack:
        try:
            app = _preference_app(desk, host=host)
            number = await stack.enter_async_context(serving(app, host=host, port=port))
        except OSError as error:
            raise ConfigError(
                f"the page of preferences cannot be served on {host}, port {port} "
                f"({error.strerror}); choose others with --env.preference_host and "
                "--env.preference_port"
            ) from error
        yield f"http://{shown}:{number}/"
