"""A suffix automaton over one conversation. Knows ids; no tree, no chance.

Blumer et al. 1985, online: one state for each set of places where a string ends. The state of the
longest suffix that occurred before is the suffix link of the newest state, so finding the match
costs nothing. Counts and newest places are kept for the longest suffixes only, which are the ones
that are asked for; they are a function of the ids alone, however those were added.
"""

from __future__ import annotations

from collections.abc import Iterable

COUNTED_SUFFIXES = 16
"""Suffixes, longest first, whose count is kept up to date: long loops have very many."""


class SuffixAutomaton:
    """All that occurred in a growing list of ids. State 0 is the empty string."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.tip = 0
        """State of the whole text."""
        self.next: list[dict[int, int]] = [{}]
        """Token -> state, by state."""
        self.link: list[int] = [-1]
        """State of the longest suffix with other places."""
        self.length: list[int] = [0]
        """Tokens of the longest string of a state."""
        self.count: list[int] = [0]
        """Times the state occurred (a lower bound beyond `COUNTED_SUFFIXES`)."""
        self.newest: list[int] = [0]
        """Length of the text when it last occurred."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append ids: constant time a token on average."""
        for token in tokens:
            self._append(int(token))

    def match(self) -> int:
        """State of the longest suffix of the text that also occurred before; 0 if there is none."""
        return max(self.link[self.tip], 0)

    def followers(self, state: int) -> list[tuple[int, int]]:
        """(token, state) after a state, most frequent first, then newest."""
        count, newest = self.count, self.newest
        return sorted(
            self.next[state].items(), key=lambda item: (-count[item[1]], -newest[item[1]])
        )

    def _append(self, token: int) -> None:
        following, link, length = self.next, self.link, self.length
        self.ids.append(token)
        size = len(self.ids)
        state = self._state({}, size, 1, size)
        place = self.tip
        while place != -1 and token not in following[place]:
            following[place][token] = state
            place = link[place]
        if place == -1:
            link[state] = 0
        else:
            known = following[place][token]
            if length[known] != length[place] + 1:
                copy = self._state(
                    dict(following[known]), length[place] + 1, self.count[known], self.newest[known]
                )
                link[copy] = link[known]
                link[known] = copy
                while place != -1 and following[place].get(token) == known:
                    following[place][token] = copy
                    place = link[place]
                known = copy
            link[state] = known
        self.tip = state
        suffix = link[state]
        for _ in range(COUNTED_SUFFIXES):
            if suffix <= 0:
                break
            self.count[suffix] += 1
            self.newest[suffix] = size
            suffix = link[suffix]

    def _state(self, following: dict[int, int], length: int, count: int, newest: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.count.append(count)
        self.newest.append(newest)
        return len(self.next) - 1
