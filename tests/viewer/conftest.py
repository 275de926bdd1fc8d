"""A browser, a served viewer, and the console and requests of its pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.viewer.sources import JsonlSource
from atroposlib.viewer.token_reader import TokenReader
from atroposlib.viewer.viewer import Viewer
from tests.viewer.groups import byte_tokenizer
from tests.viewer.waiting import wait_until

QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium(*flags: str) -> Iterator[Any]:
    """Start Chromium without a window; the tests are skipped where there is none.

    Playwright keeps an event loop running in the main thread for as long as it is open, and
    coroutine tests cannot run meanwhile. So it is closed after each file, not after the last test.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
    with playwright.sync_playwright() as driver:
        found = path or driver.chromium.executable_path
        if not Path(found).exists():
            pytest.skip("no chromium on this machine: install Debian's package chromium")
        browser = driver.chromium.launch(
            executable_path=found, headless=True, args=[*QUIET, *flags]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class Watched:
    """A page, and whatever it should not have done."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"{message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        is_own = request.url.startswith(("http://127.0.0.1:", "file://", "data:", "blob:"))
        if not is_own:
            self.complaints.append(f"request: {request.url}")


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Open an address on a laptop's screen, in light or dark."""
    contexts = []

    def open_at(url: str, *, scheme: str = "light") -> Watched:
        context = browser.new_context(viewport={"width": 1366, "height": 768}, color_scheme=scheme)
        context.set_default_timeout(120_000)
        contexts.append(context)
        watched = Watched(context.new_page())
        watched.page.goto(url)
        return watched

    yield open_at
    for context in contexts:
        context.close()


@pytest.fixture
def read_file() -> Iterator[Callable[..., Viewer]]:
    """Return a viewer that has read a whole file."""
    viewers = []

    def read(path: Path, *, load: Callable[[str], Any] | None = None) -> Viewer:
        reader = TokenReader("bytes", load or (lambda _: byte_tokenizer()))
        viewer = Viewer(JsonlSource(path), reader)
        viewers.append(viewer)
        wait_until(lambda: not viewer.is_reading and reader.wait(0))
        return viewer

    yield read
    for viewer in viewers:
        viewer.close()
