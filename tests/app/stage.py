"""Runs the app on scripted ports and reads its screen as lines of text."""

from __future__ import annotations

import asyncio
import difflib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.fake_engine import FakeEngine
from app.fakes import FakeChats
from textual import events
from textual.keys import _character_to_key
from textual.pilot import Pilot

from sessions.port import ChatPort
from tui.app import ChatApp
from tui.screens.chat import ChatScreen

SCREENS = Path(__file__).parent / "screens"
PATIENCE_S = 5.0


@dataclass(slots=True)
class Stage:
    """A running app, its ports, and what is on its screen."""

    app: ChatApp
    pilot: Pilot[None]
    chats: FakeChats
    engine: FakeEngine

    @property
    def chat_screen(self) -> ChatScreen:
        return self.app._chat_screen

    @property
    def lines(self) -> list[str]:
        """The screen, without trailing blanks."""
        return [strip.text.rstrip() for strip in self.app.screen._compositor.render_strips()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until something holds; fail with the screen if it never does."""
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, f"never came true; the screen was\n{self.text}"
            await asyncio.sleep(0.03)

    async def shows(self, *words: str) -> None:
        """Wait until all words are on the screen."""
        await self.until(lambda: all(word in self.text for word in words))

    async def hides(self, *words: str) -> None:
        """Wait until none of the words is on the screen."""
        await self.until(lambda: not any(word in self.text for word in words))

    async def press(self, *keys: str) -> None:
        """Press keys, each once all widgets have seen the one before. Pilot's own waits longer."""
        for key in keys:
            char = key if len(key) == 1 else None
            self.app.post_message(events.Key(_character_to_key(key) if char else key, char))
            for _ in range(2):  # the app passes it on, the widget acts on it
                await self.pilot._wait_for_screen()

    def type(self, text: str) -> None:
        """Put text into the box at once."""
        self.chat_screen.prompt.insert(text)

    async def enter(self, text: str) -> None:
        """Put text into the box at once and press Enter."""
        self.type(text)
        await self.press("enter")

    async def idle(self) -> None:
        """Wait until no reply runs and the last one is settled."""
        await self.until(lambda: self.app.reply is None and not self.chat_screen.busy)

    async def snapshot(self, name: str) -> None:
        """Compare the screen at rest with `screens/NAME.WxH.txt`; UPDATE_SNAPSHOTS writes it."""
        text = ""
        while text != self.text:
            text = self.text
            await self.pilot.pause(0.06)
        size = self.app.size
        path = SCREENS / f"{name}.{size.width}x{size.height}.txt"
        if os.environ.get("UPDATE_SNAPSHOTS"):
            SCREENS.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.exists(), f"{path.name} is missing: make snapshots writes it"
        expected = path.read_text(encoding="utf-8").splitlines()
        changes = list(difflib.unified_diff(expected, f"{text}\n".splitlines(), n=0))
        assert not changes, "\n".join(changes)

    async def calm(self) -> None:
        """Wait until the transcript has mounted what it wants."""
        transcript = self.chat_screen.transcript
        while True:
            before = (transcript.window.start, transcript.window.stop, transcript.virtual_size)
            await self.pilot.pause(0.1)
            if before == (transcript.window.start, transcript.window.stop, transcript.virtual_size):
                return


@asynccontextmanager
async def stage(
    chats: FakeChats | None = None,
    chat: ChatPort | None = None,
    *,
    engine: FakeEngine | None = None,
    size: tuple[int, int] = (80, 24),
    **options: Any,
) -> AsyncIterator[Stage]:
    """The app with the first chat shown."""
    chats, engine = chats or FakeChats(), engine or FakeEngine()
    app = ChatApp(engine, chats, chat, **options)
    async with app.run_test(size=size, notifications=True) as pilot:
        running = Stage(app, pilot, chats, engine)
        await running.until(lambda: running.chat_screen.view is not None)
        await pilot.pause()
        yield running
