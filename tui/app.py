"""The application: owns the engine's state and the running reply, and moves between screens.

Knows the ports of `sessions.port` only. Events come from a thread as messages; no call of a port is
made on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from textual import events, on, work
from textual.app import App
from textual.binding import Binding
from textual.command import Provider
from textual.driver import Driver
from textual.filter import LineFilter, NoColor
from textual.screen import Screen

from chatkv.errors import ChatKVError
from sessions.port import ChatPort, ChatsPort, EnginePort, EngineState
from tui.actions import bindings
from tui.chat_view import Waiting
from tui.drafts import Drafts
from tui.glyphs import PlainGlyphs
from tui.messages import EngineMoved, ReplyEnded, ReplyEvent
from tui.reply import Reply
from tui.safe_text import SafeText, safe_line
from tui.screens.chat import ChatScreen
from tui.screens.chats import ChatsScreen, Opener
from tui.screens.dialogs import NoRoom
from tui.screens.help import HelpScreen
from tui.threads import in_thread
from tui.wording import error_text

MIN_WIDTH, MIN_HEIGHT = 40, 12
QUIT_S = 3.0
"""How long leaving waits for a running reply to be saved."""


def _palette() -> type[Provider]:
    from tui.palette import ActionProvider

    return ActionProvider


class ChatApp(App[None]):
    """The terminal chat.

    Args:
        engine: Started here if it is not yet. The caller closes it after `run`.
        chats: All conversations.
        chat: The one to show first; None begins a new one.
        first_prompt: Sent as soon as the model is ready.
        pick: Begin with the list of chats.
        ephemeral: Say that nothing is saved.
        theme: A Textual theme.
        keys: Action ids to key lists, as in `[keys]`.
        plain_glyphs: Draw with ASCII only.
        drafts: Where what is typed and not sent is kept; None keeps it as long as the app runs.

    `run()` returns when the user leaves; `return_code` is the exit status.
    """

    COMMANDS: ClassVar = {_palette}
    CSS_PATH = "chatkv.tcss"
    TITLE = "chatkv"
    ENABLE_COMMAND_PALETTE = True
    NOTIFICATION_TIMEOUT = 4
    BINDINGS: ClassVar = [
        *bindings("anywhere", priority=True),
        Binding("ctrl+c", "quit_soon", show=False, system=True),
    ]

    def __init__(
        self,
        engine: EnginePort,
        chats: ChatsPort,
        chat: ChatPort | None = None,
        first_prompt: str | None = None,
        *,
        pick: bool = False,
        ephemeral: bool = False,
        theme: str = "textual-dark",
        keys: Mapping[str, str] | None = None,
        plain_glyphs: bool = False,
        drafts: Drafts | None = None,
        driver_class: type[Driver] | None = None,
    ) -> None:
        super().__init__(driver_class=driver_class)
        self.engine, self.chats, self.drafts = engine, chats, drafts or Drafts()
        self.reply: Reply | None = None
        """The reply the engine is making, whichever chat is shown."""
        self.said_ready = False
        self._expected: ChatPort | None = None
        """The chat that the engine prepares for."""
        self._first = (chat, first_prompt)
        self._pick, self._ephemeral, self._plain_glyphs = pick, ephemeral, plain_glyphs
        self._chat_screen = ChatScreen()
        self._leaving: int | None = None
        """The exit status, once leaving has begun."""
        self._warned: Waiting | None = None
        """The message that waited when leaving was asked for."""
        self.animation_level = "none"
        self.theme = theme
        if keys:
            self.set_keymap(dict(keys))

    # Starting.

    def get_default_screen(self) -> Screen[None]:
        return self._chat_screen

    def on_mount(self) -> None:
        self.engine.watch(self._watch_engine)
        self._chat_screen.engine_moved(self.engine.state)
        if self.engine.state.phase == "absent":
            self.start_engine()
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number, code in ((signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)):
                loop.add_signal_handler(number, self.leave, code)
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        self.call_after_refresh(self._open_first)

    def _open_first(self) -> None:
        chat, prompt = self._first
        self._chat_screen.open_first((lambda: chat) if chat else self.chats.new, prompt)
        if self._pick:
            self.action_chats()
        self._warm_up()

    @work(group="warm-up")
    async def _warm_up(self) -> None:
        """Import what the first reply needs, after the first frame."""
        await in_thread(__import__, "tui.widgets.markdown")

    @work(group="engine", exclusive=True)
    async def start_engine(self) -> None:
        """Start the engine, or start a lost one again."""
        try:
            await in_thread(self.engine.start)
        except ChatKVError as error:
            self._chat_screen.tell(error)

    # The engine and the running reply.

    @property
    def engine_free(self) -> bool:
        """Whether a request would be taken now."""
        state = self.engine.state
        return self.reply is None and state.ready is not None and state.phase != "lost"

    def expect(self, *, anew: bool = False) -> None:
        """Have a free engine prepare for the chat that is shown, while the user reads or types.

        Args:
            anew: Also if that was said before: to an engine that is lost, or of another branch.
        """
        chat = self._chat_screen.chat
        if anew:
            self._expected = None
        if self.engine_free and chat is not None and chat is not self._expected:
            self._expected = chat
            self._expect(chat)

    @work(group="expect", exclusive=True)
    async def _expect(self, chat: ChatPort) -> None:
        with contextlib.suppress(ChatKVError):
            await in_thread(chat.expect)

    def _watch_engine(self, state: EngineState) -> None:
        """Called from any thread, also when the screen is gone."""
        with contextlib.suppress(RuntimeError):
            self.post_message(EngineMoved(state))

    @on(EngineMoved)
    async def engine_moved(self, event: EngineMoved) -> None:
        event.stop()
        self._chat_screen.engine_moved(self.engine.state)
        self.expect(anew=event.state.phase == "lost")
        if event.state.phase == "lost" and self.reply is None:
            self._say_why()

    @work(group="engine", exclusive=True)
    async def _say_why(self) -> None:
        """A model that cannot be loaded says so in the error that waiting raises."""
        try:
            await in_thread(self.engine.wait_ready, 0.0)
        except ChatKVError as error:
            if self.engine.state.phase == "lost":
                self._chat_screen.engine_failed(*error_text(error))

    def run_reply(self, reply: Reply) -> None:
        """Start a reply. Its events come back as messages; one runs at a time."""
        assert self.reply is None, self.reply
        self.reply = reply
        threading.Thread(
            target=self._stream, args=(reply,), name="chatkv-reply", daemon=True
        ).start()

    def _stream(self, reply: Reply) -> None:
        """Runs in a thread: touches no widget, posts messages only."""
        error: ChatKVError | None = None
        bug: BaseException | None = None
        try:
            for event in reply.events():
                self.post_message(ReplyEvent(reply, event))
        except ChatKVError as raised:
            error = raised
        except BaseException as raised:  # noqa: BLE001 - raised again on the event loop
            bug = raised
        with contextlib.suppress(RuntimeError):  # the screen is gone
            self.post_message(ReplyEnded(reply, error, bug))

    @on(ReplyEvent)
    def reply_event(self, event: ReplyEvent) -> None:
        event.stop()
        event.reply.apply(event.event)
        self._chat_screen.reply_moved(event.reply)

    @on(ReplyEnded)
    def reply_ended(self, event: ReplyEnded) -> None:
        event.stop()
        if event.bug is not None:
            raise event.bug
        reply = event.reply
        reply.end(event.error)
        reply.over = True
        self.reply = None
        shown = self._chat_screen.chat
        if shown is not reply.chat:
            self._say_elsewhere(reply)
        self._chat_screen.reply_ended(reply)
        self.expect()
        if self._leaving is not None:
            self.exit(return_code=self._leaving)

    @work(group="elsewhere")
    async def _say_elsewhere(self, reply: Reply) -> None:
        try:
            name = await in_thread(lambda: reply.chat.name)
        except ChatKVError:
            name = ""
        what = "failed" if reply.error else "is finished"
        self.notify(f"The reply in {safe_line(name) or 'another chat'} {what}.", markup=False)

    @work(group="cancel")
    async def cancel(self, reply: Reply) -> None:
        """Ask for the end of a reply. Its deltas are dropped already."""
        await in_thread(reply.chat.cancel)

    # Screens.

    def action_help(self) -> None:
        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss(None)
        else:
            self.push_screen(HelpScreen())

    def action_chats(self) -> None:
        if isinstance(self.screen, ChatsScreen):
            self.screen.dismiss(None)
        elif self.screen is self._chat_screen:
            view = self._chat_screen.view
            self.push_screen(ChatsScreen(view.id if view else ""), self._open_chosen)

    def _open_chosen(self, opener: Opener | None) -> None:
        if opener is not None:
            self._chat_screen.open(opener)

    def trashed(self, chat_id: str) -> None:
        """The chat that is shown goes into the trash: a new one takes its place."""
        view = self._chat_screen.view
        if view is not None and view.id == chat_id:
            self._chat_screen.open(self.chats.new)

    async def action_quit(self) -> None:
        self.action_quit_soon()

    def action_quit_soon(self) -> None:
        """Leave; a running reply is stopped and saved first. Asked twice, leave at once."""
        screen = self._chat_screen
        if screen.waiting is not self._warned and screen.waiting and self._leaving is None:
            self._warned = screen.waiting
            kept = " without it" if self._ephemeral else "; it will be in the box"
            screen.say("One message is not sent yet.", f"Ctrl+Q again leaves{kept}.")
            return
        self.leave(0)

    def leave(self, code: int) -> None:
        """End the app with that exit status, as `action_quit_soon` does."""
        if self.reply is None or self._leaving is not None:
            self.exit(return_code=code)
            return
        self._leaving = code
        self._chat_screen.say("Saving the reply.", "Ctrl+Q again leaves at once.")
        self.reply.stop()
        self.cancel(self.reply)
        self.set_timer(QUIT_S, lambda: self.exit(return_code=code))

    def exit(self, *args: Any, **kwargs: Any) -> None:
        self._chat_screen.keep_draft()
        super().exit(*args, **kwargs)

    def on_resize(self, event: events.Resize) -> None:
        small = event.size.width < MIN_WIDTH or event.size.height < MIN_HEIGHT
        covered = isinstance(self.screen, NoRoom)
        if small and not covered:
            self.push_screen(NoRoom())
        elif covered and not small:
            self.pop_screen()

    # Words and looks.

    def header_parts(self, reply: Reply | None) -> tuple[SafeText, ...]:
        """Model, device, drafting, and one word for what goes on."""
        ready = self.engine.state.ready
        parts = [SafeText("not saved")] if self._ephemeral else []
        if ready is not None:
            parts += [safe_line(ready.model), safe_line(ready.device), safe_line(ready.drafting)]
        return (*parts, SafeText(self._word(self.engine.state, reply)))

    def _word(self, state: EngineState, reply: Reply | None) -> str:
        if self._leaving is not None:
            return "saving"
        if state.phase == "lost":
            return "engine lost"
        if reply is not None and not reply.over:
            return reply.word
        if self.reply is not None:
            return "busy in another chat"
        if state.phase == "loading" and state.total:
            return f"loading {100 * state.done // state.total}%"
        return {"absent": "starting", "starting": "loading"}.get(state.phase, state.phase)

    def welcome(self) -> SafeText:
        """What an empty chat says."""
        ready = self.engine.state.ready
        who = f"A new chat with {safe_line(ready.model)}." if ready else "A new chat."
        saved = (
            "Nothing of it is saved." if self._ephemeral else "It is saved as you go; F2 finds it."
        )
        limit = ""
        if ready and ready.limit_reason:
            limit = f"\nContext: {ready.context_limit:,} tokens, {ready.limit_reason}."
        return SafeText(
            f"{who} {saved}{limit}\n\nEnter sends · Ctrl+J new line · Esc stops\n"
            "Ctrl+P finds everything · F1 keys"
        )

    def get_line_filters(self) -> Sequence[LineFilter]:
        filters = [NoColor()] if self.no_color else list(super().get_line_filters())
        return [*filters, PlainGlyphs()] if self._plain_glyphs else filters
