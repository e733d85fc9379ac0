"""All turns of a chat as lines: where they part, and where forks end. Knows records, no widget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sessions.port import TreeTurn

WORDS = 100
"""Characters of a prompt on a line."""


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A turn and where it hangs."""

    turn: TreeTurn
    lead: str
    """Branches before it. A turn with one successor has it right below, however long the chat."""

    def words(self) -> str:
        """What stands behind it, uncleaned: a full dot on the open path, names where forks end."""
        turn = self.turn
        prompt = " ".join(turn.prompt[: 4 * WORDS].split())[:WORDS]
        mark = "●" if turn.on_path else "○"
        end = "" if turn.state in ("done", "open") else f" ({turn.state})"
        forks = f" ← {', '.join(turn.forks)}" if turn.forks else ""
        return f"{mark} {turn.number} {prompt}{end}{forks}"


def tree_lines(turns: Sequence[TreeTurn]) -> list[TreeLine]:
    """The turns as lines, parents first; where a chat parts, the open path stays in its column.

    Args:
        turns: Parents before children. One whose parent is missing is a first turn.
    """
    known = {turn.id for turn in turns}
    children: dict[int | None, list[TreeTurn]] = {}
    for turn in turns:
        children.setdefault(turn.parent_id if turn.parent_id in known else None, []).append(turn)
    lines: list[TreeLine] = []
    waiting = [(turn, "", "") for turn in _straight_last(children.get(None, []))[::-1]]
    while waiting:
        turn, lead, below = waiting.pop()
        lines.append(TreeLine(turn, lead))
        behind = _straight_last(children.get(turn.id, []))
        waiting += [(one, below, below) for one in behind[-1:]]
        waiting += [(one, f"{below}├─ ", f"{below}│  ") for one in behind[-2::-1]]
    return lines


def _straight_last(siblings: list[TreeTurn]) -> list[TreeTurn]:
    """Oldest first, but the one on the open path last: it goes straight on."""
    return sorted(siblings, key=lambda turn: turn.on_path)
