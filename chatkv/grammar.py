"""Grammars that a reply must follow: JSON schema, regular expression, Lark. Knows ids and their
bytes; no logits, no tree.

llguidance (Microsoft, MIT) does the parsing. Here its matcher becomes a pure function of the ids of
a reply: whoever asks about other ids than the last time, a guess for instance, makes it go back and
forth. So nothing has to be told what was accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from chatkv.errors import ConfigError
from chatkv.sampling import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WHITESPACE = r"( |\n {0,20})"
"""Between the parts of a JSON text: enough to be readable, too little to go on for ever. A schema
may say otherwise under "x-guidance"."""
MOST_REPEATS = 1_000_000
"""Of one part of a regular expression, nested counts multiplied: compiling this many takes seconds,
and nothing stops it once it runs."""
LONGEST_ERROR = 400
"""Characters of an error that are told."""
SPECIAL = b"\xff"
"""Begins a token that no text is made of; no byte of UTF-8."""
NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}

BoolArray = npt.NDArray[np.bool_]


class Vocabulary(Protocol):
    """Ids and their bytes; `chatkv.tokenizer.Tokenizer` is one."""

    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes: ...
    def token_text(self, token: int) -> str | None: ...


class Grammars:
    """Compiles grammars for one model.

    Args:
        tokenizer: The model's.
        vocab_size: Logits of a row.
        eos_ids: Ids that end a reply.
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._made: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> Matcher:
        """A fresh matcher.

        Raises:
            ConfigError: The package is not installed, the grammar does not compile, or the model
                cannot end a reply.
        """
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise ConfigError(
                "Grammars need the package llguidance, which is not installed.",
                hint="Install it: pip install 'chatkv[grammar]'",
            ) from None
        if not self._eos_ids:
            raise ConfigError(
                "The model has no token that ends a reply, so none could ever be whole.",
                hint="Use another model, or no grammar.",
            )
        if self._made is None:
            self._made = self._make()
        try:
            match grammar.kind:
                case "json_schema":
                    source = LLMatcher.grammar_from_json_schema(
                        grammar.text, defaults={"whitespace_pattern": WHITESPACE}
                    )
                case "regex":
                    _expect_repeats(grammar.text)
                    source = LLMatcher.grammar_from_regex(grammar.text)
                case _:
                    source = LLMatcher.grammar_from_lark(grammar.text)
            limits = LLParserLimits(verbose_errors=False)
            begin = partial(LLMatcher, self._made, source, log_level=0, limits=limits)
            matcher = Matcher(begin, self._vocab_size, self._eos_ids)
            problem = matcher.error
        except ConfigError:
            raise
        # What it raises for text that it cannot read is not documented.
        except Exception as error:  # noqa: BLE001
            problem, matcher = str(error) or type(error).__name__, None
        if problem or matcher is None:
            raise ConfigError(
                f"The {NAMES[grammar.kind]} does not compile: {_one_line(problem)}.",
                hint="Correct it, or lift it: -o grammar none.",
            )
        return matcher

    def _make(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        wrapper = TokenizerWrapper(_Tokens(self._tokenizer, self._vocab_size, self._eos_ids))
        return LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=list(self._eos_ids))


class Matcher:
    """One grammar, for one reply. Implements `chatkv.sampling.Constraint`.

    Args:
        begin: Makes a matcher before the first id. Copies of one would share its limits.
        vocab_size: Logits of a row.
        eos_ids: Ids that end a reply; they may come exactly where the grammar is complete.
    """

    def __init__(
        self, begin: Callable[[], LLMatcher], vocab_size: int, eos_ids: Collection[int]
    ) -> None:
        self._begin = begin
        self._vocab_size, self._eos_ids = vocab_size, frozenset(eos_ids)
        self._matcher = begin()
        self._taken: list[int] = []

    @property
    def error(self) -> str:
        """Why it cannot go on from here, or nothing."""
        return self._matcher.get_error()

    def mask(self, reply: Sequence[int]) -> BoolArray | None:
        """[V] True where a token may follow; None behind the end.

        Where nothing may follow, the end may, or no reply could ever leave a dead end.
        """
        found = np.zeros(self._vocab_size, bool)
        for _ in range(2):  # see `_go_to`
            if not self._go_to(reply):
                if any(token in self._eos_ids for token in reply):
                    return None
                break
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            if not self._matcher.is_error():
                known = min(8 * len(bits), self._vocab_size)
                found[:known] = np.unpackbits(bits, count=known, bitorder="little")
                break
        if not found.any():
            found[list(self._eos_ids)] = True
        return found

    def fitting(self, reply: Sequence[int], path: Sequence[int]) -> int:
        """How many ids of `path` may follow the reply, one after the other; none behind an end."""
        if not self._go_to(reply):
            return 0
        ends = [place for place, token in enumerate(path) if token in self._eos_ids]
        return self._matcher.validate_tokens(list(path[: ends[0] + 1] if ends else path))

    def accepts(self, reply: Sequence[int]) -> bool:
        """Whether the reply is whole and may end here."""
        return self._go_to(reply) and self._matcher.is_accepting()

    def _go_to(self, reply: Sequence[int]) -> bool:
        """Bring the matcher behind these ids; False if they do not follow the grammar, or end.

        A matcher that once met a limit never works again. What it met may have been a guess, so the
        ids are tried once more by a fresh one.
        """
        for _ in range(2):
            if self._matcher.is_error():
                self._matcher, self._taken = self._begin(), []
            if self._follow(list(reply)):
                return True
            if not self._matcher.is_error():
                return False
        return False

    def _follow(self, ids: list[int]) -> bool:
        same = min(len(ids), len(self._taken))
        if ids[:same] != self._taken[:same]:
            same = next(i for i in range(same) if ids[i] != self._taken[i])
        if same < len(self._taken):
            self._matcher.rollback(len(self._taken) - same)
            del self._taken[same:]
        for token in ids[same:]:
            if token in self._eos_ids or not self._matcher.try_consume_tokens([token]):
                return False
            self._taken.append(token)
        return True


class _Tokens:
    """A vocabulary as llguidance wants it."""

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_ids[0], None
        self.tokens = [self._bytes_of(token) for token in range(vocab_size)]
        self.special_token_ids = [
            token for token, text in enumerate(self.tokens) if text.startswith(SPECIAL)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode(whole, special=False)

    def _bytes_of(self, token: int) -> bytes:
        found = self._tokenizer.token_bytes(token)
        name = None if found else self._tokenizer.token_text(token)
        return found or (SPECIAL + name.encode() if name else b"")


def _expect_repeats(pattern: str) -> None:
    """Raise ConfigError where counted repeats multiply to more than MOST_REPEATS."""
    most = [1]  # of what was closed last, by depth; nested counts multiply
    unit = 1
    for found in re.finditer(
        r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(?:,(\d*))?\}|.", pattern, re.DOTALL
    ):
        match found[0][0]:
            case "(":
                most.append(1)
            case ")" if len(most) > 1:
                unit = most.pop()
                most[-1] = max(most[-1], unit)
            case "{" if found[1] is not None:
                unit *= max(int(found[1] or 0), int(found[2] or 0), 1)
                most[-1] = max(most[-1], unit)
            case "?" | "*" | "+":
                pass  # counts behind it still multiply
            case _:
                unit = 1
        if unit > MOST_REPEATS:
            raise ConfigError(
                f"The regular expression repeats a part {unit:,} times, nested counts multiplied.",
                hint=f"{MOST_REPEATS:,} is the most; * and + cost nothing.",
            )


def _one_line(error: str) -> str:
    """An error of llguidance without its drawing of the place, which the first words name too, and
    without most of what it repeats of a long grammar."""
    error = re.sub(r"<(state|grammar|non-verbose)\b.*", "", error, flags=re.DOTALL)
    lines = [line.strip() for line in error.splitlines()]
    told = " ".join(line for line in lines if line and not re.match(r"\d+ \||\^+$", line))
    if len(told) > LONGEST_ERROR:
        told = f"{told[: LONGEST_ERROR // 2]} ... {told[-LONGEST_ERROR // 2 :]}"
    return told.rstrip(".")
