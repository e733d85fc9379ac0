"""The chat without a screen: prompt, streamed text, nothing that moves the cursor.

The way in for screen readers, dumb terminals and scripts of one line a turn. Knows the ports;
replies go to stdout, all else to stderr.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

from chatkv.errors import ChatKVError, UsageError, plural
from chatkv.events import Done, Event, ForgetEvent, RecallEvent, Summarizing
from chatkv.forget import asks_first
from sessions.port import ChatPort
from tui import actions, answer, output, prompt_text, schema, slash
from tui.command import Globals
from tui.commands.context import context_lines
from tui.conversation import demand, find_turn, set_spec
from tui.interrupts import Interrupts, Stopped
from tui.printers import TextPrinter
from tui.slash import Slash
from tui.turn_tree import tree_lines
from tui.turns import spans, turn_numbers, which_turns
from tui.wiring import Workspace
from tui.wording import WAYS_OUT, planned_text, price_text, redact_words


class Leave(Exception):
    """Ends the loop."""


class PlainChat:
    """Reads prompts, prints replies.

    Args:
        work: Stores, engine and conversations, opened.
        chat: The conversation to begin with.
        found: The global options.
    """

    def __init__(self, work: Workspace, chat: ChatPort, found: Globals) -> None:
        self._work, self._chat, self._found = work, chat, found
        self._interactive = output.is_terminal(sys.stdin)
        self._last: Done | None = None

    def run(self, first: str | None = None) -> int:
        """Chat until the input ends. Returns the exit status."""
        if self._interactive:
            self._found.note(
                f"{self._chat.name or 'new chat'} · /help lists commands, /exit leaves"
            )
            self._expect()
        try:
            for text in self._inputs(first):
                code = self._guarded(text)
                if code:
                    return code
        except Leave:
            pass
        return 0

    def _expect(self) -> None:
        """Have the engine prepare for this chat while the user types."""
        chat, engine = self._chat, self._work.engine

        def tell() -> None:
            with suppress(ChatKVError):
                engine.wait_ready()
                chat.expect()

        threading.Thread(target=tell, name="chatkv-expect", daemon=True).start()

    def _guarded(self, text: str) -> int:
        """One input; an error is shown and, for a person, not the end."""
        try:
            return self._take(text)
        except ChatKVError as error:
            if not self._interactive:
                raise
            output.write_error(error, as_json=False)
            return 0

    def _inputs(self, first: str | None) -> Iterator[str]:
        if first is not None:
            yield first
        while (line := self._read("> ")) is not None:
            if line.strip():
                yield line

    def _read(self, prompt: str) -> str | None:
        if sys.stdin is None:  # closed before we began: a service without input
            return None
        if not self._interactive:
            row = sys.stdin.buffer.readline()
            return prompt_text.decode(row, "stdin").rstrip("\r\n") if row else None
        import readline  # noqa: F401 - line editing and history for input()

        warned = False
        while True:
            try:
                return prompt_text.readable(input(prompt))
            except EOFError:
                return None
            except KeyboardInterrupt:
                if warned:
                    raise
                warned = True
                output.note("\nAgain to leave, or /exit.")

    def _take(self, text: str) -> int:
        parsed = slash.parse(text)
        if isinstance(parsed, str):
            return self._reply(lambda: self._chat.send(parsed)) if self._agreed(parsed) else 0
        return getattr(self, f"_do_{parsed.name}")(parsed) or 0

    def _agreed(self, text: str) -> bool:
        """Whether to send a text that makes the model forget, if the policy asks first."""
        if not asks_first(self._chat.policy) or not (plans := self._chat.plan(text)):
            return True
        said = "; ".join(planned_text(one) for one in plans)
        if self._chat.policy == "stop" or not self._interactive:
            raise UsageError(f"Not sent: it would need room. {said}.", hint=WAYS_OUT)
        return (self._read(f"{said}. Send? [y/N] ") or "").lower() == "y"

    def _reply(self, begin: Callable[[], Iterator[Event]]) -> int:
        """Print one reply. Ctrl-C ends the reply; for a script, and on TERM, the chat too."""
        form = TextPrinter()
        with Interrupts() as interrupts:
            chat, work = self._chat, self._work
            interrupts.guard(chat.cancel, lambda: work.replying)

            def pass_on(event: Event) -> None:
                interrupts.remind()
                if isinstance(event, ForgetEvent | RecallEvent):
                    self._found.note(answer.moment(event))
                if isinstance(event, Summarizing) and not event.done:
                    self._found.note(answer.summarizing(event))
                form.event(event, chat)

            try:
                self._last = answer.play(begin(), pass_on)
            except Stopped:
                self._last = None
            finally:
                form.finish()
                if not output.is_terminal(sys.stdout):
                    output.write("\n", exact=True)  # one line at least between two replies
        if self._last is not None and self._last.notice:
            self._found.note(self._last.notice)
        if self._last is not None and output.is_terminal(sys.stderr):
            self._found.note(answer.summary(self._last))
        stays = interrupts.exit_code == 130 and self._interactive
        return 0 if stays else interrupts.exit_code

    def _do_help(self, line: Slash) -> None:
        topic = slash.topic(line)
        told = [command for command in actions.COMMANDS if topic in ("", command.name)]
        rows = [[command.usage, command.help] for command in told]
        for text in output.columns(rows):
            output.note(text)

    def _do_new(self, line: Slash) -> None:
        self._go(self._work.chats.new(line.rest))

    def _do_open(self, line: Slash) -> None:
        if not line.rest:
            raise UsageError("/open needs a name or an id.", hint="chatkv list shows them.")
        self._go(self._work.chats.open(line.rest))
        turns = self._chat.turns()
        if turns:
            output.note(f"last prompt: {output.shorten(turns[-1].prompt, 70)}")

    def _do_rename(self, line: Slash) -> None:
        if not line.rest:
            raise UsageError("/rename needs a name.")
        self._chat.rename(line.rest)

    def _do_fork(self, line: Slash) -> None:
        number, name = slash.turn_and_name(line)
        turn = None if number is None else find_turn(self._chat, number).id
        self._go(self._chat.fork(turn, name))

    def _do_tree(self, _: Slash) -> None:
        for line in tree_lines(self._chat.tree()):
            output.note(line.lead + line.words())

    def _do_again(self, _: Slash) -> int:
        if self._chat.sampling.get("temperature") == 0:
            raise UsageError(
                "At temperature 0 every reply is the same.", hint="Try: /set temperature 0.7"
            )
        return self._reply(self._chat.again)

    def _do_edit(self, line: Slash) -> int:
        turn = find_turn(self._chat, line.rest or -1)
        output.note(f"was: {turn.prompt}\nThe next line takes its place.")
        text = self._read("edit> ")
        return self._reply(lambda: self._chat.edit(turn.id, text)) if text else 0

    def _do_set(self, line: Slash) -> None:
        if not line.rest:
            for key, setting in self._chat.sampling.items():
                output.note(f"{key} {setting}")
            return
        self._chat.set(*slash.setting(line))

    def _do_spec(self, line: Slash) -> None:
        if line.rest:
            set_spec(self._chat, schema.read("spec.mode", line.rest))
        else:
            output.note(self._chat.explain_spec())

    def _do_stats(self, _: Slash) -> None:
        output.note(answer.summary(self._last) if self._last else "No reply yet.")

    def _do_forget(self, line: Slash) -> None:
        turns = self._chat.turns()
        if line.words[:1] == ["--before"]:
            before = turn_numbers(" ".join(line.words[1:]), len(turns))[0]
            seen = [turn.number for turn in turns if turn.seen == "live" and not turn.pinned]
            numbers = [number for number in seen if number < before]
        else:
            numbers = turn_numbers(line.rest, len(turns))
        self._chat.forget(numbers)
        output.note(f"From the next turn on the model does not see {which_turns(numbers)}.")

    def _do_recall(self, line: Slash) -> None:
        count = len(self._chat.turns())
        every = list(self._chat.context().missing)
        numbers = every if line.words == ["--all"] else turn_numbers(line.rest, count)
        price = self._chat.price((), numbers)
        usages = [turn.usage for turn in self._chat.turns()]
        output.note(f"The next turn: {price_text(price, usages)}.")
        self._chat.recall(numbers)
        output.note(f"From the next turn on the model sees {which_turns(numbers)} again.")

    def _do_pin(self, line: Slash) -> None:
        numbers = turn_numbers(line.rest, len(self._chat.turns()))
        output.note(self._chat.pin(numbers) or f"Pinned: {spans(numbers)}.")

    def _do_unpin(self, line: Slash) -> None:
        numbers = turn_numbers(line.rest, len(self._chat.turns()))
        self._chat.pin(numbers, pinned=False)
        output.note(f"No longer pinned: {spans(numbers)}.")

    def _do_context(self, _: Slash) -> None:
        for text in context_lines(self._chat.context()):
            output.note(text)

    def _do_redact(self, line: Slash) -> None:
        words = line.words
        turns = [word for word in words if word != "--purge"]
        numbers = turn_numbers(" ".join(turns), len(self._chat.turns()))
        ids = [find_turn(self._chat, number).id for number in numbers]
        purge = "--purge" in words
        question, facts = redact_words(numbers, self._chat.shared_with(ids), purge=purge)
        for fact in facts:
            output.note(fact)
        if self._interactive and (self._read(f"{question} [y/N] ") or "").lower() != "y":
            return
        gone = self._chat.redact(ids, purge=purge)
        output.note(
            f"Redacted: {spans(list(gone.turns))}; {plural(gone.pages, 'stored page')} deleted."
        )

    def _do_copy(self, line: Slash) -> None:
        output.line(find_turn(self._chat, line.rest or -1).reply)

    def _do_restart(self, _: Slash) -> None:
        self._work.engine.start()

    def _do_exit(self, _: Slash) -> None:
        raise Leave

    def _go(self, chat: ChatPort) -> None:
        demand(self._work, chat)
        self._chat, self._last = chat, None
        if self._interactive:
            self._expect()
        output.note(f"{chat.name or 'new chat'} ({chat.fork_name})")
