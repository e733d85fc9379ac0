"""ASCII stand-ins for the glyphs we draw with. Knows segments; no widget."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter


class PlainGlyphs(LineFilter):
    """Every glyph that is not ASCII and is ours becomes an ASCII stand-in of the same width."""

    TABLE = str.maketrans(
        "─━│┃┌┐└┘├┤┬┴┼▔▏▕█▓▒░●○★▶▼›‹·↑↓…•▁▂▃▄▅▆▇",
        "--||+++++++++ ||##=.*o*>v><.^v.*       ",
    )

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            Segment(segment.text.translate(self.TABLE), segment.style, segment.control)
            for segment in segments
        ]
