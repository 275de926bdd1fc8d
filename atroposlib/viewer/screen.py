"""What stands on each page for a view: the viewer's data through the pages' markup."""

from __future__ import annotations

from dataclasses import replace

from atroposlib.utils.text import inert_block
from atroposlib.viewer.group_index import GroupFilter
from atroposlib.viewer.pages.compare import compare_page
from atroposlib.viewer.pages.conversation import conversation_page
from atroposlib.viewer.pages.images import images_of_group, images_page
from atroposlib.viewer.pages.listing import listing_page
from atroposlib.viewer.pages.markup import empty, notice, number, score_chip, shown
from atroposlib.viewer.pages.overview import overview_page
from atroposlib.viewer.pages.side_by_side import side_by_side_page
from atroposlib.viewer.pages.tokens import tokens_page
from atroposlib.viewer.rollouts import Group, Rollout
from atroposlib.viewer.sources.base import GroupGoneError
from atroposlib.viewer.texts import RolloutText, answer_of, find_common_prefix, texts_of
from atroposlib.viewer.view_state import ROWS_PER_PAGE, ViewState
from atroposlib.viewer.viewer import Viewer

__all__ = ["Screen"]

_MAX_CHIPS = 32


class Screen:
    """Markup of every page for a viewer."""

    def __init__(self, viewer: Viewer) -> None:
        self.viewer = viewer

    def head(self, view: ViewState) -> str:
        """Return what stands above all pages: the source, the open group and its rollouts."""
        viewer = self.viewer
        count = f"{len(viewer.index):,} groups" + (", reading on" if viewer.is_reading else "")
        source = f'<span class="v-source">{shown(viewer.source.title)}: {count}</span>'
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
        """Return the content of the page a view is on."""
        if view.page == "overview":
            return self._overview()
        if view.page == "groups":
            return self._listing(view)
        group = self._group(view)
        if group is None:
            return empty("No group to show: none is here yet, or none passes the filters.")
        if not isinstance(group, Group):
            return notice(group, "bad")
        if not group.rollouts:
            return empty("This group has no rollouts.")
        return self._group_page(group, view)

    def status(self, view: ViewState) -> str:
        """Say which rows of how many the list shows."""
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
        """Return the open group as plain text: common prefix, scores, what follows the prefix."""
        group = self._group(view)
        if not isinstance(group, Group) or not group.rollouts:
            return "", [], []
        texts = [f"{text.prompt}\n{text.answer}" for text in self._texts(group)]
        prefix = find_common_prefix(texts)
        scores = [number(rollout.score) for rollout in group.rollouts]
        return inert_block(prefix), scores, [inert_block(text[len(prefix) :]) for text in texts]

    def within(self, view: ViewState) -> ViewState:
        """Return a view whose rollouts exist."""
        group = self._group(view)
        count = max(1, len(group.rollouts)) if isinstance(group, Group) else 1
        other = None if view.other is None else view.other % count
        return replace(view, rollout=view.rollout % count, other=other)

    def _group(self, view: ViewState) -> Group | str | None:
        """Return the open group, None without one, or why it cannot be read."""
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
            return tokens_page(group, rollout, reader, colour=view.colour, start=view.token)
        if view.page == "conversation":
            return conversation_page(rollout, reader)
        if view.page == "compare":
            return self._compare(group, view)
        if view.page == "images":
            return images_page(group, self._texts(group))
        return side_by_side_page(group, self._texts(group), selected=rollout.number)

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
        equal = viewer.match(GroupFilter(signal="equal"), "oldest")
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
        return chips + (f" +{more}" if more > 0 else "") + images

    def _notices(self) -> str:
        problem = self.viewer.reader.problem
        return notice("tokens are shown as ids: " + problem) if problem else ""

    def _mismatch(self, group: Group) -> str:
        reason = self.viewer.reader.mismatch(group)
        return notice(reason, "bad") if reason else ""


def _most_different(group: Group, rollout: Rollout) -> Rollout:
    """Return the rollout whose score is farthest from that of another, the first among equals."""
    others = [other for other in group.rollouts if other is not rollout] or [rollout]
    return max(others, key=lambda other: abs((other.score or 0.0) - (rollout.score or 0.0)))
