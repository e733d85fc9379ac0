"""Text to ids and back, and the ids a chat template puts around messages.

Knows the tokenizer file and the chat template that came with a model. Knows no model, no
sequence, no session. Loads `tokenizers` and `jinja2`, never torch.

Text a person typed is never parsed for special tokens: `<|im_start|>` in a message stays five
ordinary tokens. So a template is rendered with private-use marks in place of the contents, the
result is cut at the marks, its own pieces are encoded with special tokens and the contents
without. Ids of stored messages are kept by the caller and never made again from text.
"""

from __future__ import annotations

import codecs
import datetime
import hashlib
import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from chatkv.errors import BadWeights, ModelError

# Unassigned private-use code points: no template tests for them, no strip removes them.
_MARK = "\uf8e0{}\uf8e1"
_SYSTEM, _USER, _REPLY, _NEXT = (_MARK.format(c) for c in "surn")


class Tokenizer:
    """The tokenizer and chat template of one model.

    Args:
        core: The `tokenizers` object.
        template: Jinja source of the chat template.
        special: Texts of special tokens by name (`bos_token`, `eos_token`), for the template.
        eos_ids: Ids that end a reply.
        fingerprint: What `tok_fp` returns, 32 bytes.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        template: str,
        special: Mapping[str, str],
        eos_ids: Sequence[int],
        fingerprint: bytes,
    ) -> None:
        self._core = core
        self._lock = threading.Lock()
        self._special = dict(special)
        self._template = _compile(template)
        self._fingerprint = fingerprint
        self._bytes: dict[int, bytes] = {}
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = core.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`; the model's template and stop ids lie beside it in `chat.json`.

        Raises:
            BadWeights: A file is missing or cannot be read.
        """
        path = Path(path)
        try:
            raw = path.read_bytes()
            chat_raw = path.with_name("chat.json").read_bytes()
            chat = json.loads(chat_raw)
            core = tokenizers.Tokenizer.from_buffer(raw)
            template, special, eos = chat["template"], chat["special"], chat["eos_ids"]
        # tokenizers raises plain Exception for a file it cannot read.
        except Exception as error:
            raise BadWeights(
                f"The tokenizer at {path} cannot be read: {error}.",
                hint="Delete that folder; it is made again from the model file.",
            ) from error
        digest = hashlib.blake2b(digest_size=32, person=b"chatkv-tok")
        for part in (raw, chat_raw):
            digest.update(len(part).to_bytes(8, "little") + part)
        return cls(core, template, special, eos, digest.digest())

    def tok_fp(self) -> bytes:
        """32 bytes that change when tokenizer, template or stop ids change."""
        return self._fingerprint

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text, nothing put around it.

        Args:
            text: Any text; a lone surrogate becomes a question mark.
            special: Whether `<|im_end|>` and the like become their special id.
        """
        text = text.encode("utf-8", "replace").decode("utf-8") if _has_surrogates(text) else text
        with self._lock:  # the switch is state of the shared object
            self._core.encode_special_tokens = not special
            return self._core.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special ids give nothing, bytes that are no UTF-8 give U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def stream(self) -> TextStream:
        """A decoder that is fed ids as they come."""
        return TextStream(self)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id; empty for special ids and ids outside the vocabulary."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._look_up(int(token))
        return found

    def token_text(self, token: int) -> str | None:
        """How the tokenizer's file spells an id, special ids included; None for an id it lacks."""
        return self._core.id_to_token(token)

    def _look_up(self, token: int) -> bytes:
        added = self._core.get_added_tokens_decoder().get(token) if self._is_added(token) else None
        if added is not None:
            return b"" if added.special else added.content.encode()
        text = self._core.id_to_token(token)
        if text is None:
            return b""
        table = _byte_of_char()
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()

    def _is_added(self, token: int) -> bool:
        return token in self._added

    @property
    def _added(self) -> frozenset[int]:
        if not hasattr(self, "_added_ids"):
            self._added_ids = frozenset(self._core.get_added_tokens_decoder())
        return self._added_ids

    def render(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False
    ) -> str:
        """The template over messages, as text.

        Raises:
            ModelError: The template refuses these messages.
        """
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except jinja2.TemplateError as error:
            raise ModelError(
                f"The model's chat template failed: {error}.",
                hint="Some templates take no system text, or want user and reply in turn.",
            ) from error

    def head_ids(self, system: str | None = None) -> list[int]:
        """What the template puts before the first user message, a built-in system text too."""
        head, _ = self._opening(system)
        return self._encode_marked(head, {_SYSTEM: system or ""})

    def user_ids(self, text: str, first: bool, system: str | None = None) -> list[int]:
        """A user message and the prompt for the reply.

        Args:
            text: What the user typed.
            first: Whether it is the first message after `head_ids(system)`.
            system: Only read with `first`: some templates put it inside the first message.
        """
        before = self._opening(system)[1] if first else self._shape[1]
        marked = before + _USER + self._shape[2]
        return self._encode_marked(marked, {_USER: text, _SYSTEM: system or ""})

    def closing_ids(self, ended_by_eos: bool) -> list[int]:
        """What follows a reply before the next message; the stop id the model chose is not
        repeated when `ended_by_eos`."""
        ids = self.encode(self._shape[0])
        return ids[1:] if ended_by_eos and ids and ids[0] in self.eos_ids else ids

    def prefix_stable(self) -> bool:
        """Whether the template only ever adds at the end, for histories of 1 to 4 turns.

        True means that head, user, reply and closing pieces joined are what the template gives
        for the whole history.
        """
        messages: list[dict[str, str]] = []
        built = self._opening(None)[0]
        for turn in range(4):
            user, reply = _MARK.format(f"u{turn}"), _MARK.format(f"a{turn}")
            before = self._opening(None)[1] if turn == 0 else self._shape[1]
            built += before + user + self._shape[2]
            messages.append({"role": "user", "content": user})
            if self.render(messages, add_generation_prompt=True) != built:
                return False
            built += reply + self._shape[0]
            messages.append({"role": "assistant", "content": reply})
            # The closing may be longer than what the last reply of a render gets (a newline).
            if not built.startswith(self.render(messages)):
                return False
        return True

    @property
    def _shape(self) -> tuple[str, str, str]:
        """(closing, text before a later user message, text after one with the reply's prompt)."""
        if not hasattr(self, "_shape_texts"):
            self._shape_texts = self._find_shape()
        return self._shape_texts

    def _find_shape(self) -> tuple[str, str, str]:
        history = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _REPLY},
        ]
        after_user = self.render(history[:1], add_generation_prompt=True).partition(_USER)[2]
        closing = self.render(history).partition(_REPLY)[2]
        longer = self.render([*history, {"role": "user", "content": _NEXT}])
        between = longer.partition(_REPLY)[2].partition(_NEXT)[0]
        if not between.startswith(closing):
            closing = ""  # the template rewrites the end of an old reply: all of it is "before"
        return closing, between[len(closing) :], after_user

    @lru_cache(maxsize=8)  # noqa: B019 - a tokenizer lives as long as its model
    def _opening_for(self, with_system: bool) -> tuple[str, str]:
        first = [{"role": "user", "content": _USER}]
        system = [{"role": "system", "content": _SYSTEM}] if with_system else []
        text = self.render(system + first, add_generation_prompt=True).partition(_USER)[0]
        before = self._shape[1]
        return (text.removesuffix(before), before) if text.endswith(before) else ("", text)

    def _opening(self, system: str | None) -> tuple[str, str]:
        """(head, text before the first user message), with a mark for the system text."""
        return self._opening_for(bool(system))

    def _encode_marked(self, text: str, contents: Mapping[str, str]) -> list[int]:
        ids: list[int] = []
        while text:
            places = {mark: text.find(mark) for mark in contents if mark in text}
            if not places:
                return ids + self.encode(text)
            mark = min(places, key=places.__getitem__)
            before, _, text = text.partition(mark)
            ids += self.encode(before) if before else []
            content = contents[mark].strip() if self._trims(mark) else contents[mark]
            ids += self.encode(content, special=False) if content else []
        return ids

    @lru_cache(maxsize=4)  # noqa: B019
    def _trims(self, mark: str) -> bool:
        """Whether the template strips a content of this kind."""
        padded = f" {mark} "
        messages = [{"role": "user", "content": padded if mark == _USER else _USER}]
        if mark == _SYSTEM:
            messages.insert(0, {"role": "system", "content": padded})
        return padded not in self.render(messages)


class TextStream:
    """Ids in, whole code points out. Joined, the pieces are `Tokenizer.decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is certain after these ids; bytes of an unfinished code point wait."""
        return self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        """The rest: U+FFFD for a code point that never was finished, else nothing."""
        return self._decoder.decode(b"", final=True)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    chars = {chr(b): b for b in plain}
    return chars | {chr(256 + i): b for i, b in enumerate(rest)}


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text)


def _compile(source: str) -> jinja2.Template:
    """A chat template as transformers compiles it: sandboxed, immutable, trimmed blocks."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise BadWeights(
            f"The model's chat template cannot be parsed: {error}.", hint="Use another file."
        ) from error
