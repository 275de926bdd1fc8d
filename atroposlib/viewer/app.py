"""The viewer as a Gradio application.

Every event changes the view of one browser tab and shows the page it is on again; nothing reaches
the run. Events skip Gradio's queue, which would cost more than the pages.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib import resources
from typing import Any

from atroposlib.errors import MissingExtraError
from atroposlib.utils.listening import require_free_port
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRule, names_of_address
from atroposlib.viewer.screen import Screen
from atroposlib.viewer.view_state import ROWS_PER_PAGE, BrowserTab, ViewState, filter_of
from atroposlib.viewer.viewer import Viewer
from atroposlib.viewer.widgets import Widgets, lay_out

__all__ = ["build_app", "launch_app"]

_TICK_S = 2.0
_SHARED_HOSTS = "*.gradio.live"
"""Names that Gradio gives to the public links of `share`."""
_EVENT: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
    "trigger_mode": "multiple",
}

_GROUP_PAGES = ("rollouts", "tokens", "conversation", "compare", "images")
"""Pages that show one group; that of plain text opens its first by the button."""


def build_app(viewer: Viewer, *, start_page: str = "overview", group_size: int = 2) -> Any:
    """Return the application, a `gradio.Blocks`.

    Args:
        viewer: what it shows.
        start_page: one of `PAGES`.
        group_size: boxes on the page of plain text.

    Raises:
        MissingExtraError: Gradio is not installed.
    """
    try:
        import gradio as gr
    except ImportError as error:
        raise MissingExtraError("gradio", extra="view") from error

    with gr.Blocks(title="Atropos rollouts", analytics_enabled=False, fill_width=True) as blocks:
        widgets = lay_out(gr, start_page=start_page, group_size=group_size)
        tab = gr.State(BrowserTab(ViewState(page=start_page)))
        _Wiring(gr, Screen(viewer), widgets, tab).connect(blocks)
    return blocks


def launch_app(
    blocks: Any,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    share: bool = False,
    allowed_hosts: Collection[str] = (),
) -> str:
    """Serve the application in the background; return its address.

    Args:
        blocks: what `build_app` returned.
        host: address to listen on.
        port: port to listen on; None or 0 takes a free one.
        share: also open a public link through Gradio's servers.
        allowed_hosts: names beyond this machine's own that browsers reach it by.

    Raises:
        CannotListenError: the address cannot be listened on; the message says why.
    """
    import gradio as gr

    if port:
        require_free_port(host, port)

    files = resources.files(__package__)
    script = files.joinpath("viewer.js").read_text(encoding="utf-8")
    _, url, public = blocks.launch(
        server_name=host,
        server_port=port or None,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        app_kwargs={
            "lifespan": _guarding(names_of_address(host).union(allowed_hosts), share=share)
        },
        max_file_size=1,
        footer_links=[],
        ssr_mode=False,
        run_history=False,
        enable_monitoring=False,
        css=files.joinpath("viewer.css").read_text(encoding="utf-8"),
        head=f"<script>{script}</script>",
        theme=gr.themes.Base(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ),
    )
    return str(public or url)


def _guarding(allowed_hosts: frozenset[str], *, share: bool) -> Callable[[Any], Any]:
    """Return a lifespan that puts the guard against web pages around all of Gradio's layers.

    Outside of them, since one answers other sites' preflights. Uploads are forms, which it refuses.
    """
    rule = WebPageRule(
        allowed_hosts=allowed_hosts | {_SHARED_HOSTS} if share else allowed_hosts,
        machine_name=socket.gethostname(),
        changes=lambda scope: scope["path"].rstrip("/").endswith("/deep_link"),
        has_pages=True,
        may_be_framed=True,
        host_remedy="start the viewer with --allowed-host {}",
    )

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        # Starlette has built the stack to be here, and serves no request before.
        app.middleware_stack = WebPageMiddleware(app.middleware_stack, rule=rule)
        yield

    return lifespan


class _Wiring:
    """Connects the widgets of one application with the screen."""

    def __init__(self, gr: Any, screen: Screen, widgets: Widgets, tab: Any) -> None:
        self.gr = gr
        self.screen = screen
        self.viewer = screen.viewer
        self.widgets = widgets
        self.tab = tab
        self.outputs = [widgets.tabs, *widgets.shown]

    def connect(self, blocks: Any) -> None:
        """Attach every event."""
        widgets = self.widgets
        self._on(blocks.load, lambda view: view, [])
        for page, tab in widgets.tab_of.items():
            self._on(tab.select, lambda view, page=page: replace(view, page=page), [])
        for button, by in ((widgets.next_group, 1), (widgets.previous_group, -1)):
            self._on(button.click, lambda view, by=by: self._step(view, by), [])
        for button, by in ((widgets.next_rollout, 1), (widgets.previous_rollout, -1)):
            self._on(
                button.click,
                lambda view, by=by: replace(view, rollout=view.rollout + by, token=0),
                [],
            )
        for button, by in ((widgets.next_rows, 1), (widgets.previous_rows, -1)):
            self._on(button.click, lambda view, by=by: self._turn(view, by), [])
        for widget in widgets.filters:
            self._on(widget.change, self._filter, widgets.filters)
        self._on(widgets.colour.change, lambda view, c: replace(view, colour=c), [widgets.colour])

        def clicked(tab: BrowserTab, event: Any) -> dict[Any, Any]:
            with tab.turn:
                return self._click(tab, event._data)

        clicked.__annotations__["event"] = self.gr.EventData  # how Gradio knows what it is
        for page in (widgets.head, *widgets.html_of.values()):
            page.click(clicked, [self.tab], self.outputs, **_EVENT)
        widgets.clear.click(lambda: list(widgets.cleared), None, widgets.filters, **_EVENT)
        widgets.grab.click(
            self._grab, [self.tab], widgets.plain,
            queue=False, show_progress="hidden", api_name="get_batch",
        )  # fmt: skip
        ticking = self.gr.Timer(_TICK_S).tick
        ticking(self._tick, [self.tab, *widgets.filters], self.outputs, **_EVENT)

    def _on(self, event: Any, change: Callable[..., ViewState], inputs: list[Any]) -> None:
        """Let an event change the view and show it."""

        def handle(tab: BrowserTab, *values: Any) -> dict[Any, Any]:
            with tab.turn:
                return self._show(tab, change(tab.view, *values))

        event(handle, [self.tab, *inputs], self.outputs, **_EVENT)

    def _show(self, tab: BrowserTab, view: ViewState, *, moves: bool = False) -> dict[Any, Any]:
        """Give a tab a view; return what then stands on screen.

        `moves` also opens the tab of its page.

        A page of one group opens the first where none is open.
        """
        if view.group is None and view.page in _GROUP_PAGES:
            view = self._step(view, 1)
        view = self.screen.within(view)
        page = self.screen.page(view)
        head = self.screen.head(view)
        status = self.screen.status(view) if view.page == "groups" else ""
        widgets = self.widgets
        tab.view = replace(view, digest=hash((page, head, status)))
        answer: dict[Any, Any] = {widgets.head: head}
        if view.page == "groups":
            answer[widgets.status] = status
            answer[widgets.environment] = self._environments()
        if view.page == "plain":
            answer.update(zip(widgets.plain, self._plain_values(view), strict=True))
        else:
            answer[widgets.html_of[view.page]] = page
        if moves:
            answer[widgets.tabs] = self.gr.update(selected=view.page)
        return answer

    def _click(self, tab: BrowserTab, data: Any) -> dict[Any, Any]:
        """Answer a click on a row, a rollout or a button within a page."""
        view = tab.view
        clicked = data if isinstance(data, dict) else {}
        name, value = str(clicked.get("name")), int(clicked.get("value") or 0)
        if name == "group" and 0 <= value < len(self.viewer.index):
            page = view.page if view.page not in ("overview", "groups") else "rollouts"
            opened = replace(view, group=value, page=page, rollout=0, other=None, token=0)
            return self._show(tab, opened, moves=True)
        changes: dict[str, Any] = {
            "rollout": {"rollout": value, "token": 0},
            "other": {"other": value},
            "tokens": {"token": max(0, value)},
        }.get(name, {})
        return self._show(tab, replace(view, **changes))

    def _step(self, view: ViewState, by: int) -> ViewState:
        matches = self.viewer.match(view.wanted, view.order).positions
        group = self.viewer.neighbour(view.group, by, matches)
        if group is None:
            return view
        place = int((matches == group).argmax()) if len(matches) else 0
        offset = place - place % ROWS_PER_PAGE
        return replace(view, group=group, offset=offset, rollout=0, other=None, token=0)

    def _turn(self, view: ViewState, by: int) -> ViewState:
        count = len(self.viewer.match(view.wanted, view.order).positions)
        last = max(0, (count - 1) // ROWS_PER_PAGE * ROWS_PER_PAGE)
        return replace(view, offset=min(max(0, view.offset + by * ROWS_PER_PAGE), last))

    def _filter(self, view: ViewState, *values: Any) -> ViewState:
        wanted, order = filter_of(*values)
        if (wanted, order) == (view.wanted, view.order):
            return view
        return replace(view, wanted=wanted, order=order, offset=0)

    def _tick(self, tab: BrowserTab, *values: Any) -> dict[Any, Any]:
        """Show what is new; what is on screen is left alone when it is the same.

        What stands in the filters applies: of two changes the first may have arrived last.
        """
        with tab.turn:
            before = tab.view
            answer = self._show(tab, self._filter(before, *values))
            if tab.view.digest == before.digest:
                return {self.widgets.head: self.gr.skip()}
            has_opened = before.group is None and tab.view.group is not None
            if tab.view.page in ("overview", "groups") or has_opened:
                return answer
            return {self.widgets.head: answer[self.widgets.head]}

    def _grab(self, tab: BrowserTab) -> list[Any]:
        """Show the next group as plain text."""
        with tab.turn:
            tab.view = self.screen.within(self._step(tab.view, 1))
            return self._plain_values(tab.view)

    def _plain_values(self, view: ViewState) -> list[str]:
        prefix, scores, outputs = self.screen.plain(view)
        size = (len(self.widgets.plain) - 1) // 2
        padding = [""] * size
        return [prefix, *(scores + padding)[:size], *(outputs + padding)[:size]]

    def _environments(self) -> Any:
        names = [name for name in self.viewer.index.environments if name]
        return self.gr.update(choices=["all", *names])
