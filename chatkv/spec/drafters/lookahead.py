"""Guesses that come out of the model itself: Jacobi iteration on a plain tree. Knows ids; no model.

What the model picks behind a wrong guess is often right a little later, or a place further. So each
step runs a chain of guesses, and the picks along it, shifted by what was accepted, are the next
chain. Noise belongs to a position, so the chain settles at any temperature. Picks also fill a pool
of short runs, which become branches wherever their first token is the root. Every row costs, so
this is for machines where rows are nearly free, and never a default.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from chatkv.spec.drafter import DraftContext
from chatkv.spec.tree import DraftTree
from chatkv.spec.verify import Accepted

WINDOW = 7
"""Guesses of the chain."""
RUN = 3
"""Tokens of a run behind its first one."""
BRANCHES = 4
"""Runs kept for a first token: the newest."""
PROMPT_TOKENS = 512
"""Of the newest text, whose runs fill the pool at first."""
POOL_TOKENS = 4096
"""First tokens in the pool; the one that came up longest ago goes first."""
FRESH, SEEN, SETTLED, RUNS = 1, 2, 3, 4
"""Score bins: a guess nobody checked, a pick of the last step, one that came out the same again;
from `RUNS` on the runs of the pool, newest first."""
CHANCE = (1.0, 0.2, 0.4, 0.7, 0.3, 0.25, 0.2, 0.15)
"""Of a guess by its bin, until the controller has counted."""


class _Window:
    """The state of one conversation.

    Args:
        tokens: Its ids so far; their newest runs fill the pool.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.chain: list[int] = []
        """What may come behind the root."""
        self.bins: list[int] = []
        self.pool: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()
        self._tail: list[int] = []
        self._read(tokens[-PROMPT_TOKENS:])

    def fill(self, tokens: Sequence[int]) -> None:
        """Make the chain whole: from the pool, else from the newest text."""
        while len(self.chain) < WINDOW:
            known = self.pool.get(self.chain[-1] if self.chain else int(tokens[-1]))
            self.chain += known[-1] if known else [int(tokens[-1 - len(self.chain) % len(tokens)])]
        del self.chain[WINDOW:]
        self.bins += [FRESH] * (WINDOW - len(self.bins))

    def learn(self, accepted: Accepted, tree: DraftTree) -> None:
        """The picks along the chain, past what was accepted, are the next chain; all teach runs."""
        self._read(accepted.tokens)
        picks = accepted.picks
        for row in range(1, len(tree)):
            if row not in accepted.rows:
                self._note(int(tree.tokens[row]), _run(tree, picks, row))
        row: int | None = 0
        along: list[int] = []
        for guess in (*self.chain, None):
            if row is None or (pick := picks[row]) is None:
                break
            along.append(pick)
            row = None if guess is None else tree.child(row, guess)
        for depth in range(1, len(along)):
            self._note(self.chain[depth - 1], along[depth : depth + RUN])
        gained = len(accepted.tokens)
        same = [pick == guess for pick, guess in zip(along, self.chain, strict=False)]
        self.chain = along[gained:]
        self.bins = [SETTLED if again else SEEN for again in same[gained:]]
        self.bins += [SEEN] * (len(self.chain) - len(self.bins))

    def _read(self, tokens: Sequence[int]) -> None:
        """Keep the runs of text that was chosen."""
        text = [*self._tail, *map(int, tokens)]
        for place in range(len(text) - RUN):
            self._note(text[place], text[place + 1 : place + 1 + RUN])
        self._tail = text[-RUN:]

    def _note(self, first: int, run: Sequence[int]) -> None:
        """Keep a run, as the newest of its first token."""
        if not run:
            return
        kept, new = self.pool.setdefault(first, []), tuple(run)
        if new in kept:
            kept.remove(new)
        kept.append(new)
        del kept[:-BRANCHES]
        self.pool.move_to_end(first)
        if len(self.pool) > POOL_TOKENS:
            self.pool.popitem(last=False)


class LookaheadDrafter:
    """A chain of seven guesses, and up to four known runs that begin behind the root."""

    name = "lookahead"
    wants_picks = True

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}

    def follow(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Begin anew: a chain is worth a few steps only."""
        self._windows[seq_id] = _Window(tokens)

    def propose(self, contexts: Sequence[DraftContext], max_rows: Sequence[int]) -> list[DraftTree]:
        """One tree for each context."""
        return [self._tree(context, rows) for context, rows in zip(contexts, max_rows, strict=True)]

    def observe(self, seq_id: int, accepted: Accepted) -> None:
        """The next chain, and runs."""
        window = self._windows.get(seq_id)
        if window is not None and accepted.tree is not None:
            window.learn(accepted, accepted.tree)

    def drop(self, seq_id: int) -> None:
        """Free the window."""
        self._windows.pop(seq_id, None)

    def _tree(self, context: DraftContext, max_rows: int) -> DraftTree:
        if context.seq_id not in self._windows:
            self.follow(context.seq_id, context.tokens)
        window, root = self._windows[context.seq_id], int(context.tokens[-1])
        window.fill(context.tokens)
        runs = window.pool.get(root, [])
        paths = [(window.chain, window.bins)]
        paths += [(run, [RUNS + age] * RUN) for age, run in enumerate(reversed(runs))]
        ids, parents, chance, bins = [root], [0], [1.0], [0]
        rows: dict[tuple[int, int], int] = {}
        for path, scores in paths:
            row = 0
            for token, score in zip(path, scores, strict=False):
                parent, row = row, rows.setdefault((row, token), len(ids))
                if row == len(ids):
                    ids.append(token)
                    parents.append(parent)
                    chance.append(chance[parent] * CHANCE[score])
                    bins.append(score)
        return DraftTree.of(ids, parents, chance, bins, self.name).best(max_rows)


def _run(tree: DraftTree, picks: Sequence[int | None], row: int) -> list[int]:
    """What the model picks behind a row, as far as the tree guessed it too."""
    run: list[int] = []
    place: int | None = row
    while place is not None and len(run) < RUN and (pick := picks[place]) is not None:
        run.append(pick)
        place = tree.child(place, pick)
    return run
