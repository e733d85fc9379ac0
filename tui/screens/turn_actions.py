"""What one can do to a turn, and what the model sees of it. Knows ports; draws nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from textual import work

from chatkv.errors import ChatKVError, UsageError, plural
from sessions.port import GONE, ChatPort, TurnView
from tui.chat_view import read_chat, sibling_ids
from tui.safe_text import NOTHING, SafeText, safe_line
from tui.screens.context import ContextScreen
from tui.screens.dialogs import Confirm, ask_fork_name
from tui.screens.talk import Talk
from tui.screens.tree import Choice, TreeScreen, open_turn
from tui.threads import in_thread
from tui.turns import spans, which_turns
from tui.widgets.turn_view import TurnHead, cards
from tui.wording import price_text, redact_words

_BLOCK = re.compile(r"^ {0,3}(`{3,}|~{3,})[^\n]*\n(.*?)(?:^ {0,3}\1[`~]*\s*$|\Z)", re.M | re.S)


class TurnActions(Talk):
    """The actions on turns of the chat that is shown."""

    def __init__(self) -> None:
        super().__init__()
        self._next_code: dict[int, int] = {}

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
                f"A fork that shares {which_turns(range(1, turn.number + 1))}.",
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
            f"A fork that shares {which_turns(range(1, at.number + 1))}.",
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
            self.point_at(await self.transcript.reveal(index))

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
            await self.change(lambda _: None, NOTHING)

    @work(group="context")
    async def forget(self, numbers: list[int]) -> None:
        """Put turns out of sight from the next turn on."""
        said = f"From the next turn on the model does not see {which_turns(numbers)}."
        await self.change(lambda chat: chat.forget(numbers), SafeText(said))

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
            await self.change(lambda chat: chat.recall(numbers), said)

    @work(group="context")
    async def pin(self, numbers: list[int], *, pinned: bool) -> None:
        """Keep turns from every policy, or no longer."""
        said = f"{'Pinned' if pinned else 'No longer pinned'}: {spans(numbers)}."

        def act(chat: ChatPort) -> str:
            return chat.pin(numbers, pinned=pinned)

        await self.change(act, SafeText(said))

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

    async def change(self, act: Callable[[ChatPort], Any], done: SafeText) -> bool:
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

    def point_at(self, head: TurnHead) -> None:
        self.set_focus(head, scroll_visible=False)
        self.transcript.bring(head)

    def numbered(self, number: int) -> TurnView:
        """The turn of that number; -1 is the last. Raises UsageError."""
        wanted = number + len(self.turns) + 1 if number < 0 else number
        for turn in self.turns:
            if turn.number == wanted:
                return turn
        raise UsageError(
            f"There is no turn {number}.", hint=f"This chat has {plural(len(self.turns), 'turn')}."
        )
