"""Replies as Markdown. Imported after the first frame; knows text, nothing of turns.

Textual's widget with four differences: what entities and escapes decode to is made safe again, line
breaks and raw HTML are shown as they are, nothing is fetched or opened, and a list item or a large
table costs one widget (a transcript is as fast as it has few widgets).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from rich.cells import cell_len
from rich.segment import Segment
from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Region, Spacing
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Markdown
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownFence,
    MarkdownList,
    MarkdownListItem,
    MarkdownParagraph,
    MarkdownTable,
    MarkdownTableCellContents,
    MarkdownTableContent,
)

from tui.messages import LinkChosen
from tui.safe_text import NOTHING, SafeText, safe_line, safe_text

MAX_TABLE_CELLS = 60
"""A larger table is shown as its source."""


class ReplyMarkdown(Markdown):
    """A part of a reply. Takes `SafeText` only; its links are announced, never opened."""

    def __init__(self, source: SafeText = NOTHING, *, classes: str = "") -> None:
        super().__init__(
            parser_factory=reply_parser, open_links=False, classes=f"reply {classes}".strip()
        )
        self._first = source

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        event.prevent_default()
        event.stop()
        self.post_message(LinkChosen(safe_line(event.href)))

    async def fill(self) -> None:
        """Show the source given at construction. Call once mounted."""
        if not self.source:
            await self.add(self._first)

    async def add(self, text: SafeText) -> None:
        """Show more of the reply after what is shown."""
        if text and self.is_attached:
            await self.append(text)


class Paragraph(MarkdownParagraph):
    """A paragraph; the first one of a list item carries the bullet in its margin."""

    bullet = NOTHING

    def mark(self, bullet: SafeText) -> None:
        """Hang that bullet before the first line."""
        self.bullet = bullet
        self.styles.padding = Spacing(0, 0, 0, cell_len(bullet))

    def render_lines(self, crop: Region) -> list[Strip]:
        strips = super().render_lines(crop)
        if self.bullet and crop.y == 0 and crop.x == 0 and strips:
            width = cell_len(self.bullet)
            bullet = Strip([Segment(self.bullet, self.rich_style)], width)
            for line_filter in self.app.get_line_filters():
                bullet = bullet.apply_filter(line_filter, self.background_colors[1])
            strips[0] = Strip.join([bullet, strips[0].crop(width)])
        return strips


class FlatList(MarkdownList):
    """A list whose items are its children: one widget for an item of one paragraph."""

    def bullets(self, items: list[MarkdownListItem]) -> list[SafeText]:
        """The bullet of each item, all of one width."""
        return [SafeText(f"{safe_line(item.bullet)} ") for item in items]

    def compose(self) -> ComposeResult:
        items = [block for block in self._blocks if isinstance(block, MarkdownListItem)]
        self._blocks.clear()
        for item, bullet in zip(items, self.bullets(items), strict=True):
            blocks, item._blocks = item._blocks, []
            if not (blocks and isinstance(blocks[0], Paragraph)):
                blocks.insert(0, Paragraph(self._markdown, item._token))
            for block in blocks:
                if block is blocks[0] and isinstance(block, Paragraph):
                    block.mark(bullet)
                elif isinstance(block, Paragraph):
                    block.styles.padding = Spacing(0, 0, 0, cell_len(bullet))
                else:
                    block.styles.margin = Spacing(0, 0, 0, cell_len(bullet))
                yield block

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        """Change and add only what differs: a long list grows by its last item."""
        if type(block) is not type(self):
            await super()._update_from_block(block)
            return
        fresh = [child for child in block.compose() if isinstance(child, Widget)]
        shown = list(self.children)
        same = 0
        for old, new in zip(shown, fresh, strict=False):
            if not await _took_over(old, new):
                break
            same += 1
        if same < len(shown):
            await self.remove_children(shown[same:])
        if same < len(fresh):
            await self.mount_all(fresh[same:])
        self._copy_context(block)


async def _took_over(old: Widget, new: Widget) -> bool:
    """Make the old child show what the new one would. False if it cannot."""
    if isinstance(old, Paragraph) and isinstance(new, Paragraph):
        if old.bullet != new.bullet:
            old.mark(new.bullet)
        if old._content != new._content:
            old.set_content(new._content)
        return True
    if type(old) is type(new) and isinstance(old, FlatList | CodeBlock):
        assert isinstance(new, MarkdownBlock)
        await old._update_from_block(new)
        return True
    return False


class BulletList(FlatList):
    """An unordered list."""


class OrderedList(FlatList):
    """A numbered list, its numbers aligned to the right."""

    def bullets(self, items: list[MarkdownListItem]) -> list[SafeText]:
        numbers = [f"{safe_line(item.bullet)}. " for item in items]
        width = max(map(len, numbers), default=0)
        return [SafeText(number.rjust(width)) for number in numbers]


class CodeBlock(MarkdownFence):
    """A code block in a box that names its language."""

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        super().__init__(markdown, token, code)
        self._name_box()

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        # Never guess: guessing imports every lexer and takes a second.
        return super().highlight(code, language.split()[0] if language else "text", ansi, dark)

    def _copy_context(self, block: MarkdownBlock) -> None:
        super()._copy_context(block)
        self._name_box()

    def _name_box(self) -> None:
        language = self.lexer.split()[0] if self.lexer else ""
        self.border_title = Content(SafeText(language[:20]))


class TableCells(MarkdownTableContent):
    """The cells, without Textual's tooltips: those read a cell's text as markup."""

    def compose(self) -> ComposeResult:
        for header in self.headers:
            yield MarkdownTableCellContents(header, classes="header")
        for row in self.rows:
            for cell in row:
                yield MarkdownTableCellContents(cell, classes="cell")


class Table(MarkdownTable):
    """A table; while it streams it is made anew, cells and all."""

    def compose(self) -> ComposeResult:
        yield TableCells(*self._get_headers_and_rows())

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        await MarkdownBlock._update_from_block(self, block)


ReplyMarkdown.BULLETS = ["•", "•", "•"]
ReplyMarkdown.BLOCKS = {
    **Markdown.BLOCKS,
    "paragraph_open": Paragraph,
    "bullet_list_open": BulletList,
    "ordered_list_open": OrderedList,
    "table_open": Table,
    "fence": CodeBlock,
    "code_block": CodeBlock,
}


@cache
def reply_parser() -> MarkdownIt:
    """CommonMark with tables and strike-through; HTML stays text, bare addresses stay text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.core.ruler.push("reply_tables", _shrink_tables)
    parser.core.ruler.push("reply_safe", _make_safe)
    return parser


def _shrink_tables(state: StateCore) -> None:
    start: int | None = None
    cells = 0
    out: list[Token] = []
    for token in state.tokens:
        out.append(token)
        if token.type == "table_open":
            start, cells = len(out) - 1, 0
        elif token.type in ("th_open", "td_open"):
            cells += 1
        elif token.type == "table_close" and start is not None:
            opening = out[start]
            if cells > MAX_TABLE_CELLS and opening.map:
                lines = state.src.split("\n")[slice(*opening.map)]
                source = Token("fence", "code", 0, map=opening.map, level=opening.level)
                source.content = "\n".join(lines)
                out[start:] = [source]
            start = None
    state.tokens[:] = out


def _make_safe(state: StateCore) -> None:
    for token in state.tokens:
        if token.type == "fence":
            token.info = safe_line(token.info)
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"  # models break lines where they mean it
            elif child.type == "image":
                child.type, child.content = "text", safe_text(_image_text(child.attrs, child))
            else:
                child.content = safe_text(child.content)


def _image_text(attrs: dict[str, Any], token: Token) -> str:
    return f"[image: {token.content or attrs.get('alt', '')}] {attrs.get('src', '')}".strip()
