"""A chat from Enter to the settled reply. What blocks runs in a thread; keys are in `chat.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from textual import on, work

from chatkv.errors import ChatKVError
from chatkv.forget import SummarizePolicy, asks_first
from sessions.port import ChatPort, EngineState, TurnView
from tui import slash
from tui.chat_view import ChatView, Waiting, read_chat
from tui.live import Live
from tui.messages import Submitted, Typed
from tui.reply import Kind, Reply
from tui.safe_text import NOTHING, SafeText, safe_line
from tui.screens.dialogs import Confirm
from tui.screens.layout import ChatLayout
from tui.threads import in_thread
from tui.widgets.turn_view import GONE, card, cards
from tui.wording import WAYS_OUT, ask_words, planned_text

SUMMARIZE = SummarizePolicy.name
KEEP_S = 0.3
"""What is typed is on disk after this time."""


class Talk(ChatLayout):
    """One conversation. The app owns the engine and the running reply; this shows both."""

    def __init__(self) -> None:
        super().__init__()
        self._draft_of = ""
        """The chat that the box's draft is kept under; "" until it has an id."""
        self._kept = ("", "")
        """That chat and its draft, as they were saved last."""
        self._keeping = False
        """Whether they will be saved within a moment."""
        self._before_edit = ""
        self._moments = 0
        """Of the running reply: how many forgettings the transcript shows."""
        self.prompt.completer = slash.complete

    @work(exclusive=True, group="chat")
    async def open(self, get: Callable[[], ChatPort], message: str = "", hint: str = "") -> None:
        """Show another chat and a word about it. `get` may block; an error changes nothing."""
        if self.starting:
            return
        try:
            chat = await in_thread(get)
            running = self.app.reply
            if running is not None and chat.id and running.chat.id == chat.id:
                chat = running.chat  # the one that knows what is being written
            view = await in_thread(read_chat, chat)
        except ChatKVError as error:
            self.tell(error)
            return
        await self.show_view(view)
        if running is not None and running.chat is chat and self.live is None:
            await self.show_view(await in_thread(read_chat, chat))  # it has ended meanwhile
        if message:
            self.say(message, hint)

    @work(group="first")
    async def open_first(self, get: Callable[[], ChatPort], prompt: str | None) -> None:
        """Show the first chat, and send a prompt in it when the model is ready."""
        await self.open(get).wait()
        if prompt and prompt.strip() and self.view is not None:
            self._queue(Waiting("send", prompt))
            self.refresh_lines()

    async def show_view(self, view: ChatView) -> None:
        """Show a chat that has been read."""
        shown = await in_thread(cards, view.turns)
        first = self.view is None  # what was typed before there was a chat is meant for this one
        typed, waiting = self.prompt.draft if first else "", self.waiting if first else None
        await self._put_away()
        draft = await in_thread(self.app.drafts.load, view.id)
        self.view, self.waiting, self._draft_of = view, waiting, view.id
        self._kept = view.id, draft
        self.prompt.put("\n".join(text for text in (draft, typed) if text.strip()))
        self.prompt.earlier(view.prompts)
        self.prompt.focus()
        await self.transcript.show(shown)
        running = self.app.reply
        if running is not None and running.chat is view.chat:
            begun = bool(view.turns) and view.turns[-1].id not in running.known
            index = len(view.turns) - begun
            running.rewind()
            await self._draw(running, index)
        self.refresh_lines()
        self.send_waiting()
        self.app.expect(anew=True)

    async def _put_away(self) -> None:
        """Leave the chat that is shown; what was typed or queued comes back with it."""
        if self.live is not None:
            self.live.close()
            self.live = None
        self.stop_editing()
        if self.view is not None:
            await in_thread(self.app.drafts.keep, *self._draft())
        self.waiting, self.held = None, False
        self.notice.clear()

    # What is not sent.

    @property
    def unsent(self) -> str:
        """What was queued, and typed behind it. The edit of a turn is none of it."""
        queued = self.waiting.text if self.waiting else ""
        typed = self.prompt.draft if self.editing is None else self._before_edit
        return "\n".join(text for text in (queued, typed) if text.strip())

    def keep_draft(self) -> None:
        """Save it before the screen goes."""
        if self.view is not None:
            self.app.drafts.keep(*self._draft())

    def _draft(self) -> tuple[str, str, str]:
        """What `Drafts.keep` takes; the first message of a chat gives it its id."""
        assert self.view is not None
        before, self._draft_of = self._draft_of, self.view.chat.id
        return before, self._draft_of, self.unsent

    @on(Typed)
    def keep_soon(self) -> None:
        """Save it within a moment, if it is not."""
        if self.view is None or self._keeping or (self.view.chat.id, self.unsent) == self._kept:
            return
        self._keeping = True
        self.set_timer(KEEP_S, self._keep)

    async def _keep(self) -> None:
        self._keeping = False
        if self.view is not None:
            draft = self._draft()
            self._kept = draft[1:]
            await in_thread(self.app.drafts.keep, *draft)

    def refresh_lines(self) -> None:
        super().refresh_lines()
        if self.is_mounted:
            self.keep_soon()

    # Sending.

    @on(Submitted)
    def submit(self, event: Submitted) -> None:
        """Enter in the box."""
        event.stop()
        self.notice.clear()
        text = event.text
        try:
            meaning = text if self.editing else slash.parse(text)
        except ChatKVError as error:
            self.give_back(text)
            self.tell(error)
            return
        if isinstance(meaning, slash.Slash):
            self.obey(meaning)
        elif meaning.strip():
            kind: Kind = "edit" if self.editing else "send"
            self._queue(Waiting(kind, meaning, self.editing))
        elif self.waiting is not None:
            self.held = False
            self.send_waiting()
        self.refresh_lines()

    def _queue(self, waiting: Waiting) -> None:
        if self.waiting is not None:
            self.give_back(waiting.text)
            self.say("One message is waiting already.", "Esc takes it back into the box.")
            return
        self.waiting, self.held = waiting, False
        if waiting.kind == "edit":
            self.stop_editing()
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send the waiting message if the engine is free for it."""
        waiting = self.waiting
        if waiting is None or self.held or self.busy or not self.app.engine_free or not self.view:
            return
        self.waiting = None
        if asks_first(self.view.chat.policy):
            self.starting = True
            self._ask_first(waiting, self.view)
        else:
            self.start(waiting.kind, waiting.text, waiting.turn)

    @work(exclusive=True, group="ask-first")
    async def _ask_first(self, waiting: Waiting, view: ChatView) -> None:
        """Send only what makes the model forget nothing, or what the user says yes to."""
        beside = waiting.turn.id if waiting.turn else None
        agreed = False
        try:
            plans = await in_thread(partial(view.chat.plan, waiting.text, beside))
            agreed = not plans
            facts = [planned_text(plan) for plan in plans]
            if plans and view.chat.policy == "stop":
                self.say(f"Not sent: {facts[0]}.", WAYS_OUT)
            elif plans:
                ways = SafeText(f"Or go back: {WAYS_OUT}")
                question = ask_words(plans)
                agreed = bool(await self.app.push_screen_wait(Confirm(question, [*facts, ways])))
        except ChatKVError as error:
            self.tell(error)
        self.starting = False
        if agreed and self.view is view:
            self.start(waiting.kind, waiting.text, waiting.turn)
        else:
            self.give_back(waiting.text)
            self.refresh_lines()

    def start(self, kind: Kind, text: str, turn: TurnView | None = None) -> None:
        """Begin a reply. The caller has made sure that nothing runs."""
        assert self.view is not None
        self.starting = True
        index = len(self.turns)
        if turn is not None:
            index = next((i for i, known in enumerate(self.turns) if known.id == turn.id), index)
        reply = Reply(self.view.chat, kind, text, turn.id if turn else None)
        reply.known = frozenset(known.id for known in self.turns)
        self.view = replace(self.view, turns=self.turns[:index])
        self.app.run_reply(reply)
        self._begin(reply, index)

    @work(group="begin")
    async def _begin(self, reply: Reply, index: int) -> None:
        await self._draw(reply, index)
        self.prompt.focus()

    async def _draw(self, reply: Reply, index: int) -> None:
        """Show a reply on its way at that place of the transcript."""
        self.live = live = Live(reply, self, self.transcript)
        self._moments = 0
        self.starting = False
        await live.begin(index, index + 1)
        self.refresh_lines()
        if reply.over and self.live is live:
            self.settle(reply)

    def reply_moved(self, reply: Reply) -> None:
        """An event of the running reply has been applied."""
        if self.live is not None and self.live.reply is reply:
            self._show_moments(reply)
            self.live.wake()
            self.refresh_lines()

    @work(exclusive=True, group="rebranch")
    async def _rebranch(self, reply: Reply) -> None:
        """Show the branch that a reply has gone to: a summary, and the turns behind it."""
        try:
            view = await in_thread(read_chat, reply.chat)
            shown = await in_thread(cards, view.turns[:-1])
        except ChatKVError:
            return  # the end of the reply tells
        if self.live is None or self.live.reply is not reply or reply.over:
            return
        self.live.close()
        self.view = replace(view, turns=view.turns[:-1])
        await self.transcript.show(shown)
        reply.rewind()
        await self._draw(reply, len(shown))

    def _show_moments(self, reply: Reply) -> None:
        """Turns go dim at the moment the model loses them."""
        fresh = reply.moments[self._moments :]
        if any(moment.policy == SUMMARIZE for moment in fresh) and not reply.moved:
            reply.moved = True
            self._rebranch(reply)
        for moment in fresh:
            shown = [replace(card) for card in self.transcript.cards]
            for one in shown:
                if one.number in moment.turns:
                    one.gone = NOTHING if moment.back else SafeText(GONE["forgotten"])
            self.transcript.mark(shown)
        self._moments = len(reply.moments)

    def reply_ended(self, reply: Reply) -> None:
        """The running reply is over."""
        if self.live is not None and self.live.reply is reply and self.live.begun:
            self.settle(reply)
        elif not self.starting:
            self.send_waiting()

    @work(group="settle")
    async def settle(self, reply: Reply) -> None:
        """Show how a reply ended, and what it cost."""
        live = self.live
        if live is None or live.reply is not reply or live.closed:
            return
        live.close()
        error = reply.error
        try:
            view = await in_thread(read_chat, reply.chat)
        except ChatKVError as unread:
            view, error = None, error or unread
        if self.live is not live:
            return  # another chat is shown by now
        committed = reply.heard
        if view is not None:
            self.view = view
            committed = any(turn.id not in reply.known for turn in view.turns)
            if committed and len(view.turns) == len(self.transcript.cards):
                await self.transcript.settle(card(view.turns[-1]))
                self.transcript.mark(await in_thread(cards, view.turns))
            else:
                await self.transcript.show(await in_thread(cards, view.turns))
            self.prompt.earlier(view.prompts)
        self.live = None
        if error is not None:
            self.tell(error)
            if not committed and reply.kind != "again":
                self.give_back(reply.prompt)
        elif reply.done is not None and reply.done.notice:
            self.say(safe_line(reply.done.notice))
        self.refresh_lines()
        self.send_waiting()

    def obey(self, command: slash.Slash) -> None:
        """Run a slash command."""
        raise NotImplementedError

    def stop_editing(self) -> None:
        """Leave the edit of an earlier prompt; what was in the box before comes back."""
        if self.editing is not None:
            self.editing, self.prompt.dimmed = None, False
            self.prompt.put(self._before_edit)
            self._before_edit = ""

    def give_back(self, text: str) -> None:
        """Put a text back into the box, before what has been typed since."""
        typed = self.prompt.draft
        self.prompt.put(f"{text}\n{typed}" if typed.strip() else text)

    def engine_moved(self, state: EngineState) -> None:
        super().engine_moved(state)
        self.send_waiting()
