"""The Gradio widgets of the viewer and where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atroposlib.viewer.group_index import ORDERS
from atroposlib.viewer.pages.tokens import COLOURS
from atroposlib.viewer.view_state import PAGES

__all__ = ["Widgets", "lay_out"]

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
    """Every widget that an event reads or changes; they are Gradio components."""

    head: Any
    tabs: Any
    tab_of: dict[str, Any]
    """A tab for each page."""
    html_of: dict[str, Any]
    """The content of each page but that of plain text."""
    filters: list[Any]
    """In the order in which `filter_of` takes them."""
    cleared: list[Any]
    """What the filters hold when nothing is filtered."""
    clear: Any
    environment: Any
    status: Any
    colour: Any
    next_group: Any
    previous_group: Any
    next_rollout: Any
    previous_rollout: Any
    next_rows: Any
    previous_rows: Any
    grab: Any
    plain: list[Any]
    """Prefix, then a box per score, then a box per output."""

    @property
    def shown(self) -> list[Any]:
        """What showing a view may change."""
        pages = self.html_of.values()
        return [self.head, *pages, self.status, self.environment, *self.plain]


def lay_out(gr: Any, *, start_page: str, group_size: int) -> Widgets:
    """Make the widgets; called inside a `gradio.Blocks`."""
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
    """Put the widgets of one page into its tab."""
    if page == "plain":
        _plain(gr, parts, group_size)
        return
    if page == "groups":
        _filters(gr, parts)
    if page == "tokens":
        parts["colour"] = gr.Radio(
            list(COLOURS), value=COLOURS[0], label="colour", show_label=False, container=False,
            elem_id="v-colour",
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
            # A box of numbers would show 0 where nothing was asked.
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
