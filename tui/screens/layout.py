"""The lines and boxes of a chat, and what they say. Shows state; changes none of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Container, Horizontal
from textual.screen import Screen
from textual.widgets import Static

from chatkv.errors import ChatKVError
from sessions.port import ChatPort, EngineState, TurnView
from tui import slash
from tui.chat_view import ChatView, Waiting
from tui.live import Live
from tui.loading import LOADING, SLOW, SLOW_S, progress_words, stage_words
from tui.messages import CursorMoved, Typed
from tui.safe_text import NOTHING, SafeText, safe_line
from tui.widgets.prompt import PromptBox
from tui.widgets.status_bar import Header, KeyLine, Notice, SplitLine, StatusBar, key_hints
from tui.widgets.transcript import Transcript
from tui.widgets.turn_view import TurnHead
from tui.wording import bar, clip, coming_text, error_text, missing_text

if TYPE_CHECKING:
    from tui.app import ChatApp


class ChatLayout(Screen[None]):
    """The widgets of a chat and the state they show."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]  # noqa: RUF012
    AUTO_FOCUS = "#prompt"

    app: ChatApp

    def __init__(self) -> None:
        super().__init__()
        self.view: ChatView | None = None
        self.live: Live | None = None
        self.waiting: Waiting | None = None
        self.held = False
        """Whether the waiting message waits for the user, who has stopped a reply."""
        self.editing: TurnView | None = None
        self.starting = False
        """Whether a reply has begun that is not on the screen yet."""
        self.header = Header(id="header")
        self.banner = SplitLine(id="banner")
        self.transcript = Transcript()
        self.welcome = Static("", markup=False, id="welcome")
        self.pill = Static("", markup=False, id="pill")
        self.engine_notice = Notice(id="engine-notice")
        self.notice = Notice(id="notice")
        self.prompt = PromptBox()
        self.status = StatusBar(id="status")
        self.keys = KeyLine(id="keys")
        self._welcomed = NOTHING
        self._slow = False
        """Whether the engine has been loading for long."""

    def compose(self) -> ComposeResult:
        yield self.header
        yield self.banner
        with Container(id="middle"):
            yield self.welcome
            yield self.transcript
            yield self.pill
        yield self.engine_notice
        yield self.notice
        with Horizontal(id="box"):
            yield Static("›", id="caret")
            yield self.prompt
        yield self.status
        yield self.keys

    def on_mount(self) -> None:
        self.pill.display = self.banner.display = False
        self.watch(self.transcript, "missed", self._write_pill)
        self.watch(self.transcript, "following", self._write_pill)
        self.set_timer(SLOW_S, self._say_slow)
        self.refresh_lines()

    def _say_slow(self) -> None:
        self._slow = True
        if self.app.engine.state.phase in LOADING:
            self.engine_moved(self.app.engine.state)

    @property
    def chat(self) -> ChatPort | None:
        return self.view.chat if self.view else None

    @property
    def turns(self) -> list[TurnView]:
        return self.view.turns if self.view else []

    @property
    def busy(self) -> bool:
        """Whether a reply of this chat is on its way, up to its last word on the screen."""
        return self.starting or self.live is not None

    # What is typed before the box has the focus.

    def on_key(self, event: events.Key) -> None:
        """A key from before the first frame goes to the box; those it takes never get here."""
        if self.focused not in (None, self.prompt):
            return
        if event.key in ("enter", "ctrl+j"):
            event.stop()
            self.prompt.action_send()
        elif event.is_printable:
            event.stop()
            self.prompt.post_message(events.Key(event.key, event.character))

    # Saying.

    def say(self, message: str, hint: str = "", *, kind: str = "info") -> None:
        """Show one sentence of our own, or safe text."""
        self.notice.say(SafeText(message), SafeText(hint), kind=kind)

    def tell(self, error: ChatKVError) -> None:
        """Show what went wrong and what to do."""
        self.notice.say(*error_text(error), kind="error")

    def engine_moved(self, state: EngineState) -> None:
        """The engine loads, is ready, or is lost."""
        if state.phase == "lost":
            reason = f"engine lost ({safe_line(state.detail)})" if state.detail else "engine lost"
            self.engine_notice.say(
                SafeText(reason), SafeText("F5 starts it again. What was said is saved."),
                kind="error",
            )  # fmt: skip
        elif state.phase in LOADING:
            progress = safe_line(stage_words(state))
            if state.total:
                blocks = bar(state.done, state.total, 12 if self.size.width >= 60 else 8)
                progress = SafeText(f"{progress}  {blocks}  {progress_words(state)}")
            ways = "Type now; it is sent when ready."
            ways += f" {SLOW}" if self._slow else ""
            self.engine_notice.say(progress, SafeText(ways))
        else:
            self.engine_notice.clear()
            if state.ready is not None and state.ready.notice and not self.app.said_ready:
                self.app.said_ready = True
                self.say(safe_line(state.ready.notice))
        self.refresh_lines()

    def engine_failed(self, message: SafeText, hint: SafeText) -> None:
        """The engine could not start: its own words, in place of the bare fact."""
        self.engine_notice.say(message, SafeText(f"{hint} F5 tries again.".lstrip()), kind="error")

    @on(Typed)
    def show_suggestions(self, event: Typed) -> None:
        event.stop()
        found = slash.suggest(event.text)
        if len(found) == 1:
            self.say(found[0].usage, found[0].help, kind="hint")
        elif found:
            self.say("  ".join(f"/{command.name}" for command in found), kind="hint")
        else:
            self.notice.clear("hint", "leaving")
            self.refresh_lines()

    @on(CursorMoved)
    def show_chosen(self, event: CursorMoved) -> None:
        event.stop()
        if self.focused is None:
            self.prompt.focus()  # the turn under the cursor has left the window
        self.refresh_lines()

    def refresh_lines(self) -> None:
        """Bring header, numbers, keys and placeholder up to date."""
        if not self.is_mounted:
            return
        engine, view = self.app.engine.state, self.view
        reply = self.live.reply if self.live else None
        self.header.left = view.title if view else NOTHING
        self.header.fork = view.fork_title if view else NOTHING
        self.header.parts = self.app.header_parts(reply)
        turn = self.chosen_turn
        self.status.prefix = SafeText(f"turn {turn.number}") if turn else NOTHING
        self.status.usage = turn.usage if turn else (view.usage if view else None)
        self._write_context(view)
        self.status.limit = engine.ready.context_limit if engine.ready else 0
        self.keys.keys = self._keys()
        self.prompt.placeholder = self._placeholder()
        self.welcome.display = not self.turns and self.live is None
        if self._welcomed != (welcome := self.app.welcome()):
            self._welcomed = welcome
            self.welcome.update(welcome)
        if self.waiting is not None and self.notice.kind in ("", "queued", "hint"):
            ways = "Esc Esc takes it back." if self.busy else "Esc takes it back."
            ways = f"Enter sends it. {ways}" if self.held else ways
            text = clip(safe_line(self.waiting.text), 50)
            self.say(f"queued 1: {text}", ways, kind="queued")
        elif self.waiting is None:
            self.notice.clear("queued")
        if self.editing is not None and self.notice.kind in ("", "editing", "hint"):
            self.say(f"editing turn {self.editing.number}", "Enter asks anew, Esc leaves it as it "
                     "was.", kind="editing")  # fmt: skip
        elif self.editing is None:
            self.notice.clear("editing")

    def _write_context(self, view: ChatView | None) -> None:
        """The banner, and what the next turn will forget."""
        seen = view.context if view else None
        self.banner.left = missing_text(seen) if seen else NOTHING
        self.banner.right = SafeText("F6 why, bring back")
        self.banner.display = bool(self.banner.left)
        self.status.coming, self.status.level = coming_text(seen) if seen else (NOTHING, "")

    @property
    def chosen(self) -> int | None:
        """Index of the turn under the cursor."""
        return self.focused.index if isinstance(self.focused, TurnHead) else None

    @property
    def chosen_turn(self) -> TurnView | None:
        """The stored turn under the cursor."""
        place = self.chosen
        return self.turns[place] if place is not None and place < len(self.turns) else None

    def _placeholder(self) -> str:
        if self.busy:
            return "Type on; Enter queues it"
        return "Message · Enter sends · / commands"

    def _keys(self) -> list[tuple[str, str, str]]:
        here = ["engine.restart"] if self.app.engine.state.phase == "lost" else []
        if self.chosen is not None:
            here += ["turn.copy", "turn.copy_code", "turn.edit_here", "turn.again_here",
                     "turn.fork_here", "turn.tree",
                     "turn.sibling_before+turn.sibling_after"]  # fmt: skip
            return [*key_hints(*here), ("Esc", "Back", "screen.leave")]
        if self.busy:
            here.append("chat.stop")
        elif self.turns:
            here += ["turn.again", "turn.edit", "turn.fork"]
        here += ["app.chats", "app.palette", "app.help"]
        return key_hints(*here, *([] if self.busy else ["app.quit"]))

    def _write_pill(self) -> None:
        missed, away = self.transcript.missed, not self.transcript.following
        self.pill.display = away and missed > 0
        self.pill.update(f"↓ {missed} new line{'' if missed == 1 else 's'} · End follows")
