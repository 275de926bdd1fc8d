"""The viewer as a Gradio application: its widgets, their events, and the content of each page.

Every event changes the view of one browser tab and renders its page again, without effect on the
run. Events bypass Gradio's queue, which would take longer than rendering.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from atroposlib.agent_tasks.trace import TRACES_KEY
from atroposlib.errors import MissingExtraError
from atroposlib.utils.listening import require_free_port
from atroposlib.utils.text import find_common_prefix, inert_block
from atroposlib.utils.web_pages import WebPageMiddleware, WebPageRule, names_of_address
from atroposlib.viewer.index import ORDERS, RowFilter
from atroposlib.viewer.pages import (
    COLORS,
    compare_page,
    conversation_page,
    empty,
    images_of_group,
    images_page,
    listing_page,
    notice,
    number,
    overview_page,
    score_chip,
    shown,
    side_by_side_page,
    tokens_page,
)
from atroposlib.viewer.rollouts import Group, ShownRollout
from atroposlib.viewer.sources import GroupGoneError
from atroposlib.viewer.timeline import timeline_page
from atroposlib.viewer.token_reader import RolloutText, answer_of, texts_of
from atroposlib.viewer.viewer import PAGES, ROWS_PER_PAGE, BrowserTab, Viewer, ViewState, filter_of

__all__ = ["Screen", "build_app", "launch_app"]

_CLICKS = """
element.addEventListener("click", (event) => {
  const found = event.target.closest("[data-group],[data-rollout],[data-other],[data-tokens]");
  if (!found || getSelection().toString()) { return; }
  const name = ["group", "rollout", "other", "tokens"].find((key) => key in found.dataset);
  trigger("click", { name: name, value: Number(found.dataset[name]) });
});
"""
_TITLES = {"plain": "Plain text", "groups": "Groups", "rollouts": "Side by side"}


@dataclass(frozen=True)
class Widgets:
    """The Gradio components that events read or change."""

    head: Any
    tabs: Any
    tab_of: dict[str, Any]
    """Tab of each page."""
    html_of: dict[str, Any]
    """Content of each page except plain text."""
    filters: list[Any]
    """In the order of the arguments of `filter_of`."""
    cleared: list[Any]
    """Values of the filters that match every group."""
    clear: Any
    environment: Any
    status: Any
    color: Any
    next_group: Any
    previous_group: Any
    next_rollout: Any
    previous_rollout: Any
    next_rows: Any
    previous_rows: Any
    grab: Any
    plain: list[Any]
    """Box of the prefix, boxes of the scores, boxes of the outputs."""

    @property
    def shown(self) -> list[Any]:
        pages = self.html_of.values()
        return [self.head, *pages, self.status, self.environment, *self.plain]


def lay_out(gr: Any, *, start_page: str, group_size: int) -> Widgets:
    """Create the widgets; called inside a `gradio.Blocks`."""
    parts: dict[str, Any] = {"tab_of": {}, "html_of": {}}
    with gr.Row(elem_id="v-top", equal_height=True):
        parts["head"] = gr.HTML("", js_on_load=_CLICKS, elem_id="v-head", scale=8)
        for name, sign in (
            ("previous_group", "◀ group"),
            ("next_group", "group ▶"),
            ("previous_rollout", "◀ rollout"),
            ("next_rollout", "rollout ▶"),
        ):
            parts[name] = _button(gr, sign, name)
    with gr.Tabs(selected=start_page, elem_id="v-tabs") as parts["tabs"]:
        for page in PAGES:
            title = _TITLES.get(page, page.capitalize())
            with gr.Tab(title, id=page, elem_id=f"v-tab-{page}") as parts["tab_of"][page]:
                _fill(gr, page, parts, group_size)
    return Widgets(**parts)


def _fill(gr: Any, page: str, parts: dict[str, Any], group_size: int) -> None:
    if page == "plain":
        _plain(gr, parts, group_size)
        return
    if page == "groups":
        _filters(gr, parts)
    if page == "tokens":
        parts["color"] = gr.Radio(
            list(COLORS), value=COLORS[0], label="color", show_label=False, container=False,
            elem_id="v-color",
        )  # fmt: skip
    parts["html_of"][page] = gr.HTML(
        "", js_on_load=_CLICKS, elem_id=f"v-{page}", elem_classes="v-page"
    )


def _filters(gr: Any, parts: dict[str, Any]) -> None:
    with gr.Row(elem_id="v-filters"):
        text = gr.Textbox(label="text", placeholder="words in a question or answer",
                          elem_id="v-search", scale=3, min_width=200)  # fmt: skip
        parts["environment"] = _choice(gr, "environment", ["all"])
        order = _choice(gr, "order", list(ORDERS))
        signal = _choice(gr, "scores", ["any", "differ", "all equal"])
        ranges = [
            # A `gr.Number` would show 0 for an empty box.
            gr.Textbox(label=label, min_width=84, elem_classes="v-number")
            for label in ("score from", "to", "tokens from", "to", "step from", "to")
        ]
    with gr.Row(elem_id="v-turn"):
        parts["status"] = gr.HTML("", elem_id="v-status", scale=8)
        parts["previous_rows"] = _button(gr, "◀ page", "previous_rows")
        parts["next_rows"] = _button(gr, "page ▶", "next_rows")
        parts["clear"] = _button(gr, "clear filter", "clear")
    parts["filters"] = [text, parts["environment"], order, signal, *ranges]
    parts["cleared"] = ["", "all", ORDERS[0], "any", *[""] * len(ranges)]


def _plain(gr: Any, parts: dict[str, Any], group_size: int) -> None:
    parts["grab"] = gr.Button("Grab Next Batch", elem_id="v-grab")
    prefix = gr.Textbox(label="Prefix", lines=3, max_lines=8)
    with gr.Row():
        scores = [gr.Textbox(label=f"Score_{i + 1}") for i in range(group_size)]
    with gr.Row():
        outputs = [
            gr.Textbox(label=f"Output_{i + 1}", lines=8, max_lines=16) for i in range(group_size)
        ]
    parts["plain"] = [prefix, *scores, *outputs]


def _choice(gr: Any, label: str, choices: list[str]) -> Any:
    return gr.Dropdown(
        choices, value=choices[0], label=label, min_width=120,
        allow_custom_value=True,
    )  # fmt: skip


def _button(gr: Any, text: str, name: str) -> Any:
    elem_id = f"v-{name.replace('_', '-')}"
    return gr.Button(text, size="sm", elem_id=elem_id, min_width=90, scale=0)


_MAX_CHIPS = 32


class Screen:
    """HTML of all pages for a viewer."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    def head(self, view: ViewState) -> str:
        """Return the head of all pages: the source, the open group and its rollouts."""
        viewer = self.viewer
        count = f"{len(viewer.index):,} groups" + (", reading on" if viewer.is_reading else "")
        source = (
            '<a class="v-skip" href="#v-tabs">Skip to the pages</a>'
            f'<h1 class="v-source">{shown(viewer.source.title)}: {count}</h1>'
        )
        if view.group is None:
            return f'<div class="v-head">{source}{self._notices()}</div>'
        row = viewer.index[view.group]
        facts = [row.label, row.environment, "" if row.step is None else f"step {row.step}"]
        name = shown(" · ".join(fact for fact in facts if fact))
        group = self._group(view)
        chips, warning = "", ""
        if isinstance(group, Group):
            chips = self._chips(group, view)
            warning = self._mismatch(group)
        return (
            f'<div class="v-head">{source}<span class="v-name">{name}</span>'
            f'<span class="v-rollouts">{chips}</span>{self._notices()}{warning}</div>'
        )

    def page(self, view: ViewState) -> str:
        if view.page == "overview":
            return self._overview()
        if view.page == "groups":
            return self._listing(view)
        group = self._group(view)
        if group is None:
            return empty("No group to show: there is none yet, or none matches the filter.")
        if not isinstance(group, Group):
            return notice(group, "bad")
        if not group.rollouts:
            return empty("This group has no rollouts.")
        return self._group_page(group, view)

    def status(self, view: ViewState) -> str:
        """Return the range of the listed rows and the number of matches."""
        matches = self.viewer.match(view.wanted, view.order)
        count = len(matches.positions)
        last = min(view.offset + ROWS_PER_PAGE, count)
        text = f"{view.offset + 1:,} to {last:,} of {count:,}" if count else "none"
        if not matches.is_complete:
            text += f" (searched {matches.num_searched:,} groups so far)"
        elif view.wanted.text and matches.num_searched < len(self.viewer.index):
            unread = len(self.viewer.index) - matches.num_searched
            text += f" ({unread:,} groups have no text that could be searched)"
        return text

    def plain(self, view: ViewState) -> tuple[str, list[str], list[str]]:
        """Return the open group as plain text: common prefix, scores, rest of each text."""
        group = self._group(view)
        if not isinstance(group, Group) or not group.rollouts:
            return "", [], []
        texts = [f"{text.prompt}\n{text.answer}" for text in self._texts(group)]
        prefix = find_common_prefix(texts)
        scores = [number(rollout.score) for rollout in group.rollouts]
        return inert_block(prefix), scores, [inert_block(text[len(prefix) :]) for text in texts]

    def within(self, view: ViewState) -> ViewState:
        group = self._group(view)
        count = max(1, len(group.rollouts)) if isinstance(group, Group) else 1
        other = None if view.other is None else view.other % count
        return replace(view, rollout=view.rollout % count, other=other)

    def _group(self, view: ViewState) -> Group | str | None:
        if view.group is None:
            return None
        try:
            return self.viewer.group(view.group)
        except GroupGoneError as error:
            return str(error)

    def _group_page(self, group: Group, view: ViewState) -> str:
        reader = self.viewer.reader
        rollout = group.rollouts[view.rollout % len(group.rollouts)]
        if view.page == "tokens":
            return tokens_page(group, rollout, reader, color=view.color, start=view.token)
        if view.page == "conversation":
            return conversation_page(rollout, reader)
        if view.page == "compare":
            return self._compare(group, view)
        if view.page == "images":
            return images_page(group, self._texts(group))
        if view.page == "timeline":
            return timeline_page(group, rollout)
        return side_by_side_page(
            group,
            self._texts(group),
            selected=rollout.number,
            trace_url=self.viewer.trace_url,
        )

    def _texts(self, group: Group) -> list[RolloutText]:
        return texts_of(group, self.viewer.reader)

    def _compare(self, group: Group, view: ViewState) -> str:
        reader = self.viewer.reader
        left = group.rollouts[view.rollout % len(group.rollouts)]
        if view.other is None or view.other == left.number:
            right = _most_different(group, left)
        else:
            right = group.rollouts[view.other % len(group.rollouts)]
        chips = "".join(
            f'<button class="v-pick{" v-selected" if rollout is right else ""}" '
            f'data-other="{rollout.number}">{rollout.number} {score_chip(rollout.score)}</button>'
            for rollout in group.rollouts[:_MAX_CHIPS]
            if rollout is not left
        )
        texts = answer_of(group, left, reader), answer_of(group, right, reader)
        return f'<p class="v-legend">compare with {chips}</p>' + compare_page(left, right, *texts)

    def _overview(self) -> str:
        viewer = self.viewer
        equal = viewer.match(RowFilter(signal="equal"), "oldest")
        return overview_page(
            viewer.source.figures(),
            viewer.source.problems,
            viewer.index.scores_by_environment(),
            rewards=viewer.index.rewards_by_step(),
            num_groups=len(viewer.index),
            num_equal=len(equal.positions),
            metric_drops=viewer.metric_drops(),
        )

    def _listing(self, view: ViewState) -> str:
        positions = self.viewer.match(view.wanted, view.order).positions
        shown_rows = positions[view.offset : view.offset + ROWS_PER_PAGE].tolist()
        rows = [(position, self.viewer.row(position)) for position in shown_rows]
        return listing_page(rows, selected=view.group)

    def _chips(self, group: Group, view: ViewState) -> str:
        chips = "".join(
            f'<button class="v-pick{" v-selected" if i == view.rollout else ""}" '
            f'data-rollout="{i}">{i} {score_chip(rollout.score)}</button>'
            for i, rollout in enumerate(group.rollouts[:_MAX_CHIPS])
        )
        more = len(group.rollouts) - _MAX_CHIPS
        images = ' <span class="v-chip">images</span>' if images_of_group(group) else ""
        traces = group.fields.get(TRACES_KEY)
        agents = ' <button class="v-chip" data-opens="Timeline">timeline</button>' if traces else ""
        return chips + (f" +{more}" if more > 0 else "") + images + agents

    def _notices(self) -> str:
        problem = self.viewer.reader.problem
        return notice("tokens are shown as ids: " + problem) if problem else ""

    def _mismatch(self, group: Group) -> str:
        reason = self.viewer.reader.mismatch(group)
        return notice(reason, "bad") if reason else ""


def _most_different(group: Group, rollout: ShownRollout) -> ShownRollout:
    """Return the rollout with the largest difference in score; the first of several."""
    others = [other for other in group.rollouts if other is not rollout] or [rollout]
    return max(others, key=lambda other: abs((other.score or 0.0) - (rollout.score or 0.0)))


_TICK_S = 2.0
_SHARED_HOSTS = "*.gradio.live"
"""Host names of Gradio's public links, for `share`."""
_EVENT: dict[str, Any] = {
    "queue": False,
    "show_progress": "hidden",
    "api_visibility": "private",
    "trigger_mode": "multiple",
}

_GROUP_PAGES = ("rollouts", "tokens", "conversation", "compare", "images", "timeline")
"""Pages that show one group; plain text opens one by its button only."""


def build_app(viewer: Viewer, *, start_page: str = "overview", group_size: int = 2) -> Any:
    """Return the application, a `gradio.Blocks`.

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
    """Serve the application in the background; return its URL.

    Args:
        blocks: result of `build_app`.
        host: address to listen on.
        port: port to listen on; None or 0 takes a free one.
        share: whether to also open a public link through Gradio's servers.
        allowed_hosts: further host names of this machine that browsers may use.

    Raises:
        CannotListenError: the address cannot be listened on.
    """
    import gradio as gr

    if port:
        require_free_port(host, port)

    files = resources.files(__package__)
    scripts = (
        files.joinpath(name).read_text(encoding="utf-8") for name in ("viewer.js", "player.js")
    )
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
        head="".join(f"<script>{script}</script>" for script in scripts),
        theme=gr.themes.Base(
            font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        ),
    )
    return str(public or url)


def _guarding(allowed_hosts: frozenset[str], *, share: bool) -> Callable[[Any], Any]:
    """Return a lifespan that wraps the application in the protection against web pages.

    It is outside of Gradio's own middleware, which answers preflight requests of other sites. It
    also refuses uploads, since they are forms.
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
        # Starlette has built the stack by now, and has not served a request yet.
        app.middleware_stack = WebPageMiddleware(app.middleware_stack, rule=rule)
        yield

    return lifespan


class _Wiring:
    def __init__(self, gr: Any, screen: Screen, widgets: Widgets, tab: Any) -> None:
        self.gr = gr
        self.screen = screen
        self.viewer = screen.viewer
        self.widgets = widgets
        self.tab = tab
        self.outputs = [widgets.tabs, *widgets.shown]

    def connect(self, blocks: Any) -> None:
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
        self._on(widgets.color.change, lambda view, c: replace(view, color=c), [widgets.color])

        def clicked(tab: BrowserTab, event: Any) -> dict[Any, Any]:
            with tab.turn:
                return self._click(tab, event._data)

        clicked.__annotations__["event"] = self.gr.EventData  # read by Gradio
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
        def handle(tab: BrowserTab, *values: Any) -> dict[Any, Any]:
            with tab.turn:
                return self._show(tab, change(tab.view, *values))

        event(handle, [self.tab, *inputs], self.outputs, **_EVENT)

    def _show(self, tab: BrowserTab, view: ViewState, *, moves: bool = False) -> dict[Any, Any]:
        """Set the view of a tab and return the changed widgets.

        A page that shows one group opens the first group if none is open. With `moves`, the tab of
        the page is also selected.
        """
        if view.group is None and view.page in _GROUP_PAGES:
            view = self._step(view, 1)
        view = self.screen.within(view)
        page = self.screen.page(view)
        head = self.screen.head(view)
        status = self.screen.status(view) if view.page == "groups" else ""
        widgets = self.widgets
        tab.view = replace(view, digest=hash((page, head, status)), page_digest=hash(page))
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
        rows = matches[view.offset : view.offset + ROWS_PER_PAGE]
        if view.page == "groups" and len(rows) and view.group not in rows:
            group: int | None = int(rows[0 if by > 0 else -1])  # of the rows that are shown
        else:
            group = self.viewer.neighbor(view.group, by, matches)
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
        """Update the tab if its content has changed.

        Applies the current filters, since two changes may arrive in reverse order.
        """
        with tab.turn:
            before = tab.view
            answer = self._show(tab, self._filter(before, *values))
            if tab.view.digest == before.digest:
                return {self.widgets.head: self.gr.skip()}
            # A page of one group changes when its group arrives, and when tokens become text.
            has_changed = tab.view.page_digest != before.page_digest
            if tab.view.page in ("overview", "groups") or has_changed:
                return answer
            return {self.widgets.head: answer[self.widgets.head]}

    def _grab(self, tab: BrowserTab) -> list[Any]:
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
