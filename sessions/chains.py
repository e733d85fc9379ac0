"""The id chains under which pages of a path were stored beside its own: those of restarts.

A restart computes what is left of a path as a plain prompt, so its pages hang from the root by
other ids. Whoever removes the pages of a path removes those too. Knows turns and records; no SQL.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.forget import flatten
from sessions.context import spans_of_path, standing, to_ops
from sessions.records import TurnPath


def restarted(
    path: Sequence[TurnPath], tok_fp: bytes, turn: TurnPath | None = None
) -> list[tuple[tuple[int, ...], int]]:
    """The ids of a path as each of its restarts put them, by records that are cancelled too.

    Args:
        path: Turns from the root on.
        tok_fp: Of the tokenizer.
        turn: Only as far as this turn, and only where its ids were in sight.

    Returns:
        Ids, and how many of them stand before `turn`; none twice, nothing where ids are missing.
    """
    shown = [each for each in path if each.shown]
    spans = spans_of_path(shown, tok_fp)
    if spans is None:
        return []
    messages = [message for each in shown for message in each.messages]
    renders = [render for message in messages if (render := message.render(tok_fp)) is not None]
    ids = [token for render in renders for token in render.token_ids]
    wanted = {} if turn is None else {span.number: span for span in spans}
    own = wanted.get(-1 if turn is None else turn.turn.depth)
    marks = [own is not None and own.start <= place < own.stop for place in range(len(ids))]
    found: dict[tuple[tuple[int, ...], int], None] = {}
    for place, each in enumerate(path):
        records = [one.to_json() for one in standing(path[: place + 1])]
        if not each.forgets or not any(one.get("restart") for one in records):
            continue
        ops = [op for op in to_ops(records, spans, tok_fp.hex()) if op.at <= len(ids)]
        tokens, flags, _ = flatten(ids, marks, ops)
        if turn is None:
            found[tuple(tokens), 0] = None
        elif True in flags:
            first, last = flags.index(True), len(flags) - flags[::-1].index(True)
            found[tuple(tokens[:last]), first] = None
    return list(found)
