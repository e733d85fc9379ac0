"""What one can do in a chat, by key, palette or slash command. Knows ports; draws nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

from textual import on, work

from chatkv.errors import ChatKVError, UsageError, plural
from sessions.port import GONE, ChatPort, TurnView
from tui.actions import bindings
from tui.chat_view import Drafting, read_chat, sibling_ids
from tui.messages import LinkChosen
from tui.safe_text import NOTHING, SafeText, safe_line
from tui.screens.commands import run_command
from tui.screens.context import ContextScreen
from tui.screens.dialogs import AskLine, Confirm, ShowLink, ShowTable, ask_fork_name
from tui.screens.talk import Talk
from tui.screens.tree import Choice, TreeScreen, open_turn
from tui.slash import Slash
from tui.threads import in_thread
from tui.turns import spans, which_turns
from tui.widgets.turn_view import TurnHead, cards
from tui.wording import price_text, redact_words, usage_rows

AGAIN_S = 2.0
"""A second Ctrl+C within this time quits."""

_BLOCK = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*\s*$|\Z)", re.M | re.S)


class ChatScreen(Talk):
    """The screen of a chat."""

    BINDINGS: ClassVar = [*bindings("box", priority=True), *bindings("transcript")]

    def __init__(self) -> None:
        super().__init__()
        self._interrupted_at = 0.0
        self._next_code: dict[int, int] = {}
        self._goal: int | None = None
        """The turn the cursor is on its way to."""

    # Stopping and leaving.

    def action_leave(self) -> None:
        """Esc: stop; else take the waiting message back; else leave edit, turn or notice."""
        if self.stop():
            return
        if self.waiting is not None:
            text, self.waiting, self.held = self.waiting.text, None, False
            self.give_back(text)
        elif self.editing is not None:
            self.stop_editing()
        elif self.chosen is not None:
            self.prompt.focus()
        else:
            self.notice.clear()
        self.refresh_lines()

    def stop(self) -> bool:
        """Stop the reply of this chat. False if none runs or it is stopping already."""
        reply = self.live.reply if self.live else None
        if reply is None or not reply.stop():
            return False
        self.held = self.waiting is not None
        self.app.cancel(reply)
        self.refresh_lines()
        return True

    def action_interrupt(self) -> None:
        """Ctrl+C: copy a selection; else stop; else clear the box; else, twice, quit."""
        selected = self.prompt.selected_text or self.get_selected_text()
        if selected:
            self.copy(selected)
            self.clear_selection()
        elif self.stop():
            pass
        elif self.prompt.text:
            self.prompt.clear()
        elif time.monotonic() - self._interrupted_at < AGAIN_S:
            self.app.action_quit_soon()
        else:
            self._interrupted_at = time.monotonic()
            self.say("Ctrl+C again quits.", kind="leaving")

    # Turns.

    def action_again(self) -> None:
        if self.turns:
            self.again(self.turns[-1])

    def action_again_turn(self) -> None:
        self._on_chosen(self.again)

    def again(self, turn: TurnView) -> None:
        """Another reply to that turn's prompt."""
        if not self._free() or self.view is None:
            return
        if float(self.view.sampling.get("temperature", 1.0)) == 0.0:
            self.say(
                "At temperature 0 the reply would be the same.", "/set temperature 0.7 changes it."
            )
            return
        last = turn.id == self.turns[-1].id
        self.start("again" if last else "edit", turn.prompt, turn)

    def action_edit(self) -> None:
        if self.turns:
            self.edit(self.turns[-1])

    def action_edit_turn(self) -> None:
        self._on_chosen(self.edit)

    def edit(self, turn: TurnView) -> None:
        """Take that turn's prompt into the box, to be asked anew."""
        if not self._free():
            return
        if self.editing is None:
            self._before_edit = self.prompt.draft
        self.notice.clear()
        self.editing, self.prompt.dimmed = turn, True
        self.prompt.put(turn.prompt)
        self.prompt.focus()
        self.refresh_lines()

    def action_fork(self) -> None:
        if self.turns:
            self.name_fork(self.turns[-1])

    def action_fork_turn(self) -> None:
        self._on_chosen(self.name_fork)

    def name_fork(self, turn: TurnView) -> None:
        """Fork after that turn, under a name that is asked for."""

        def named(name: str | None) -> None:
            if name is not None:
                self.fork(turn, name)

        if self._free():
            self.app.push_screen(ask_fork_name(turn.number), named)

    def action_tree(self) -> None:
        if self.chat is not None and self.turns and self._free():
            self.app.push_screen(TreeScreen(self.chat, self.chosen_turn), self._leave_tree)

    def _leave_tree(self, choice: Choice | None) -> None:
        """Go to the turn that was chosen in the tree, or fork there."""
        if choice is None or self.chat is None:
            return
        chat, turn = self.chat, choice.turn
        if choice.fork is not None:
            name = choice.fork
            self.open(
                lambda: chat.fork(turn.id, name),
                f"A fork that shares turns 1 to {turn.number}.",
                "What is said here stays here.",
            )
        elif turn.on_path or turn.chat_id == chat.id:
            self._show_branch(chat, None if turn.on_path else turn.id, turn.number)
        else:
            self.open(partial(open_turn, self.app.chats, turn))

    def fork(self, turn: TurnView | None, name: str) -> None:
        """Go on in a new chat that shares everything up to that turn."""
        if not self.turns or self.chat is None or not self._free():
            return
        chat, at = self.chat, turn or self.turns[-1]
        self.open(
            lambda: chat.fork(at.id, name),
            f"A fork that shares turns 1 to {at.number}.",
            "What is said here stays here.",
        )

    def action_sibling(self, step: int) -> None:
        self._on_chosen(lambda turn: self._select(turn, step))

    def _select(self, turn: TurnView, step: int) -> None:
        ids = sibling_ids(turn)
        if turn.id not in ids or len(ids) < 2:
            self.say("This turn has no other version.", "r makes one.")
        elif self._free() and self.chat is not None:
            goal = ids[(ids.index(turn.id) + step) % len(ids)]
            self._show_branch(self.chat, goal, turn.number)

    @work(exclusive=True, group="chat")
    async def _show_branch(self, chat: ChatPort, turn_id: int | None, number: int) -> None:
        """Show a turn; one that is not on the open path is named, and its branch opened first."""
        try:
            if turn_id is not None:
                await in_thread(chat.select, turn_id)
            view = await in_thread(read_chat, chat)
        except ChatKVError as error:
            self.tell(error)
            return
        await self.show_view(view)
        if (index := view.place(number)) is not None:
            self._point_at(await self.transcript.reveal(index))

    # What the model sees.

    @work(group="context")
    async def action_context(self) -> None:
        """F6: every turn, whether the model sees it, and what a change costs."""
        chat = self.chat
        if chat is None or not self.turns:
            self.say("There is nothing in this chat yet.")
            return
        try:
            view = await in_thread(chat.context)
        except ChatKVError as error:
            self.tell(error)
            return
        usages = [turn.usage for turn in self.turns]
        if await self.app.push_screen_wait(ContextScreen(chat, view, usages)):
            await self._change(lambda _: None, NOTHING)

    @work(group="context")
    async def forget(self, numbers: list[int]) -> None:
        """Put turns out of sight from the next turn on."""
        said = f"From the next turn on the model does not see {which_turns(numbers)}."
        await self._change(lambda chat: chat.forget(numbers), SafeText(said))

    @work(group="context")
    async def recall(self, numbers: list[int]) -> None:
        """Bring turns back, after a look at the price."""
        chat = self.chat
        if chat is None or not numbers:
            self.say("Nothing is out of the model's sight.")
            return
        facts = [SafeText("Nothing is computed before the next turn.")]
        try:
            if self.app.engine_free:
                price = await in_thread(partial(chat.price, (), numbers))
                words = price_text(price, [turn.usage for turn in self.turns])
                live = plural(price.live, "token")
                facts = [SafeText(f"The next turn then stands on {live}: {words}.")]
        except ChatKVError as error:
            self.tell(error)
            return
        question = SafeText(f"Bring back {which_turns(numbers)}?")
        if await self.app.push_screen_wait(Confirm(question, facts)):
            said = SafeText(f"From the next turn on the model sees {which_turns(numbers)} again.")
            await self._change(lambda chat: chat.recall(numbers), said)

    @work(group="context")
    async def pin(self, numbers: list[int], *, pinned: bool) -> None:
        """Keep turns from every policy, or no longer."""
        said = f"{'Pinned' if pinned else 'No longer pinned'}: {spans(numbers)}."

        def act(chat: ChatPort) -> str:
            return chat.pin(numbers, pinned=pinned)

        await self._change(act, SafeText(said))

    def action_toggle_turn(self) -> None:
        self._on_chosen(self._toggle)

    def _toggle(self, turn: TurnView) -> None:
        view = self.view.context if self.view else None
        gone = turn.seen in (*GONE, "partly")
        waits = view is not None and turn.number in (view.recall if gone else view.forget)
        if gone != waits:
            self.recall([turn.number])
        else:
            self.forget([turn.number])

    def action_pin_turn(self) -> None:
        if (turn := self.chosen_turn) is not None:
            self.pin([turn.number], pinned=not turn.pinned)

    @work(group="change")
    async def redact(self, numbers: list[int], *, purge: bool) -> None:
        """Take turns from the model, after a look at who shares them."""
        chat = self.chat
        if chat is None or not self._free():
            return
        ids = [self.turns[number - 1].id for number in numbers]
        try:
            forks = await in_thread(chat.shared_with, ids)
            words = redact_words(numbers, forks, purge=purge)
            if not await self.app.push_screen_wait(Confirm(*words)) or not self._free():
                return
            gone = await in_thread(partial(chat.redact, ids, purge=purge))
            view = await in_thread(read_chat, chat)
        except ChatKVError as error:
            self.tell(error)
            return
        await self.show_view(view)
        said = f"Redacted: {spans(list(gone.turns))} ({plural(gone.num_tokens, 'token')})."
        self.say(said, f"{plural(gone.pages, 'stored page')} deleted.")

    def action_copy_turn(self) -> None:
        self._on_chosen(lambda turn: self.copy(turn.reply or turn.prompt))

    def action_copy_code(self) -> None:
        self._on_chosen(lambda turn: self.copy_code(turn, None))

    def copy_code(self, turn: TurnView, number: int | None) -> None:
        """Copy a code block of a reply, as it was written; without a number, the next one."""
        blocks = [block[2] for block in _BLOCK.finditer(turn.reply)]
        if not blocks:
            self.say(f"Turn {turn.number} has no code block.")
            return
        place = self._next_code.get(turn.id, 0) if number is None else number - 1
        if not 0 <= place < len(blocks):
            self.say(f"Turn {turn.number} has {plural(len(blocks), 'code block')}.")
            return
        self._next_code[turn.id] = (place + 1) % len(blocks)
        self.copy(blocks[place], f"code block {place + 1} of {len(blocks)}")

    def copy(self, text: str, what: str = "") -> None:
        """Put a source text on the clipboard."""
        self.app.copy_to_clipboard(text)
        self.say(f"Copied {what or plural(len(text), 'character')}.")

    def _on_chosen(self, act: Callable[[TurnView], None]) -> None:
        if (turn := self.chosen_turn) is not None:
            act(turn)

    def _free(self) -> bool:
        """Whether the chat can change; says why not."""
        if self.busy:
            self.say("A reply is on its way.", "Esc stops it.")
        elif not self.app.engine_free:
            self.say("The engine is not free yet.", "Try again when the header says ready.")
        else:
            return True
        return False

    # The chat.

    def action_new(self, name: str = "") -> None:
        self.open(partial(self.app.chats.new, name))

    def action_rename(self) -> None:
        if self.view is not None:
            ask = AskLine(SafeText("Name of this chat"), safe_line(self.view.name))
            self.app.push_screen(ask, self._named)

    def _named(self, name: str | None) -> None:
        if name:
            self.rename(name)

    @work(group="change")
    async def rename(self, name: str) -> None:
        await self._change(lambda chat: chat.rename(name), NOTHING)

    async def _change(self, act: Callable[[ChatPort], Any], done: SafeText) -> bool:
        """Change the chat in a thread and show what came of it. False if it was refused."""
        if self.view is None:
            return False
        view = self.view
        try:
            warning = await in_thread(act, view.chat)
            fresh = await in_thread(read_chat, view.chat)
            shown = await in_thread(cards, fresh.turns)
        except ChatKVError as error:
            self.tell(error)
            return False
        if self.view is view:
            self.view = fresh
            self.transcript.mark(shown)
        if isinstance(warning, str) and warning:
            self.say(safe_line(warning), kind="warning")
        elif done:
            self.say(done)
        self.refresh_lines()
        return True

    @work(group="change")
    async def action_stats(self) -> None:
        usage = self.view.usage if self.view else None
        rows = usage_rows(usage)
        engine: dict[str, Any] = {}
        if self.app.engine_free:
            try:
                engine = await in_thread(self.app.engine.call, "kv_stats")
            except ChatKVError as error:
                self.tell(error)
        rows += [(safe_line(name.replace("_", " ")), safe_line(v)) for name, v in _flat(engine)]
        self.app.push_screen(ShowTable(SafeText("Numbers of the last reply"), rows))

    def action_restart(self) -> None:
        if self.app.engine.state.phase == "lost":
            self.app.start_engine()
        else:
            self.say("The engine is not lost.")

    # The view.

    def action_scroll_by(self, unit: str, step: int) -> None:
        if unit == "page":
            self.transcript.page(step)
        else:
            self.transcript.scroll_lines(step)

    @work(group="view")
    async def action_view_start(self) -> None:
        await self.transcript.go_to_start()

    @work(group="view")
    async def action_view_end(self) -> None:
        await self.transcript.go_to_end()

    def action_turn(self, step: int) -> None:
        """Move the cursor over turns; below the last is the box."""
        count = len(self.transcript.cards)
        here = self.chosen if self._goal is None else self._goal
        index = (count if here is None else here) + step
        if index >= count:
            self._goal = None
            self.prompt.focus()
            self.action_view_end()
        elif index >= 0 and self._goal is None and (head := self.transcript.head(index)):
            self._point_at(head)
        elif index >= 0:
            self._goal = index
            self._move_cursor(index)

    @work(group="view")
    async def _move_cursor(self, index: int) -> None:
        head = await self.transcript.reveal(index)
        if self._goal == index:  # else the key was pressed again meanwhile
            self._point_at(head)
            self._goal = None

    def _point_at(self, head: TurnHead) -> None:
        self.set_focus(head, scroll_visible=False)
        self.transcript.bring(head)

    @on(LinkChosen)
    def show_link(self, event: LinkChosen) -> None:
        event.stop()
        self.app.push_screen(ShowLink(event.address))

    # Slash commands.

    def obey(self, command: Slash) -> None:
        try:
            run_command(self, command)
        except ChatKVError as error:
            self.give_back(f"/{command.name} {command.rest}".rstrip())
            self.tell(error)

    def numbered(self, number: int) -> TurnView:
        """The turn of that number; -1 is the last. Raises UsageError."""
        wanted = number + len(self.turns) + 1 if number < 0 else number
        for turn in self.turns:
            if turn.number == wanted:
                return turn
        raise UsageError(
            f"There is no turn {number}.", hint=f"This chat has {plural(len(self.turns), 'turn')}."
        )

    @work(group="change")
    async def set_sampling(self, key: str, value: Any) -> None:
        """Change a sampling setting."""
        said = SafeText(f"{safe_line(key)} is {safe_line(str(value))} from the next turn on.")
        if not await self._change(lambda chat: chat.set(key, value), said):
            self.give_back(f"/set {key} {value}")

    @work(group="change")
    async def set_spec(self, mode: str) -> None:
        """Change how replies are drafted."""
        if isinstance(self.chat, Drafting):
            said = SafeText(f"Drafting is {safe_line(mode)} from the next turn on.")
            await self._change(partial(_set_spec, mode=mode), said)
        else:
            self.say("This chat cannot change how it drafts.")

    @work(group="change")
    async def explain_spec(self) -> None:
        """Say who drafts and what comes of it."""
        if not isinstance(self.chat, Drafting) or not self.app.engine_free:
            self.say("The engine is busy; ask when the reply is there.")
            return
        try:
            self.say(safe_line(await in_thread(self.chat.explain_spec)))
        except ChatKVError as error:
            self.tell(error)


def _set_spec(chat: ChatPort, *, mode: str) -> None:
    if isinstance(chat, Drafting):
        chat.set_spec(mode)


def _flat(found: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values, those of a part behind its name."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name} ")
        elif value is not None:
            shown = f"{value:,.0f}" if isinstance(value, float) else str(value)
            yield prefix + name, shown
