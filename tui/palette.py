"""The command palette, read off the table of actions. Knows no chat."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from tui.actions import ACTIONS, Action, key_names


class ActionProvider(Provider):
    """Offers every action that makes sense where one is."""

    def _offered(self) -> Iterator[tuple[str, Action]]:
        for action in ACTIONS:
            if action.palette and action.run and self._runs_here(action):
                keys = f"   {key_names(action)}" if action.keys else ""
                yield f"{action.help}{keys}", action

    def _runs_here(self, action: Action) -> bool:
        if action.run.startswith("app."):
            return True
        name = action.run.removeprefix("screen.").partition("(")[0]
        return hasattr(self.screen, f"action_{name}") and action.where not in ("chats", "tree")

    async def discover(self) -> Hits:
        for words, action in self._offered():
            yield DiscoveryHit(words, partial(self.app.run_action, action.run, self.screen))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for words, action in self._offered():
            if (score := matcher.match(words)) > 0:
                run = partial(self.app.run_action, action.run, self.screen)
                yield Hit(score, matcher.highlight(words), run)
