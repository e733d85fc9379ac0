"""The table of settings: names, kinds, defaults and a line about each. Reads nothing."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatkv.errors import ConfigError
from chatkv.kv.format import NAMES as KV_NAMES
from tui import kinds

PREFIX = "CHATKV_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted name, how a value is read, and what it is for."""

    key: str
    read: Callable[[Any], Any]
    """Takes text or a TOML value; raises ValueError with what it wants."""
    default: Any
    about: str

    @property
    def env(self) -> str:
        """Its environment variable."""
        return PREFIX + self.key.upper().replace(".", "_")


SETTINGS: dict[str, Setting] = {
    setting.key: setting
    for setting in (
        Setting("model", kinds.text, "SmolLM2-135M-Instruct", "catalogue name, .gguf or folder"),
        Setting("device", kinds.device, "auto", "where the model runs: auto, cpu, cuda or npu"),
        Setting(
            "threads", kinds.whole(1), None, "CPU threads; unset: all that the process may use"
        ),
        Setting(
            "sampling.temperature",
            kinds.temperature,
            0.7,
            "0 always takes the likeliest token; else 0.01 to 2",
        ),
        Setting("sampling.top_p", kinds.number(0, 1, open_low=True), 0.95, "probability mass kept"),
        Setting("sampling.top_k", kinds.whole(0), 0, "tokens kept; 0 is all"),
        Setting(
            "sampling.min_p", kinds.number(0, 1), 0.0, "least share of the likeliest token kept"
        ),
        Setting(
            "sampling.seed", kinds.whole(0), None, "unset: drawn for each turn and stored with it"
        ),
        Setting(
            "sampling.max_tokens", kinds.whole(1), None, "unset: the smaller of 1024 and limit / 4"
        ),
        Setting("sampling.stop", kinds.texts, (), "texts that end a reply"),
        Setting(
            "sampling.repetition_penalty",
            kinds.number(0.01, 100),
            1.0,
            "above 1 makes tokens that occur before, prompt included, less likely",
        ),
        Setting(
            "sampling.presence_penalty",
            kinds.number(-2, 2),
            0.0,
            "above 0 makes tokens of the reply less likely to come again",
        ),
        Setting(
            "sampling.frequency_penalty",
            kinds.number(-2, 2),
            0.0,
            "the same, once for each time they came",
        ),
        Setting(
            "sampling.logit_bias",
            kinds.biases,
            None,
            'added to the logits of tokens by id: {"1234": -100}',
        ),
        Setting(
            "sampling.logprobs",
            kinds.whole(0, 20),
            None,
            "log probability of each token, and so many of the likeliest beside it",
        ),
        Setting(
            "sampling.grammar",
            kinds.grammar,
            None,
            "form of the reply: json_schema:TEXT, regex:RE or lark:TEXT; none lifts it",
        ),
        Setting(
            "context.limit", kinds.whole(1), None, "tokens of a conversation; unset: the model's"
        ),
        Setting(
            "context.on_overflow",
            kinds.overflow,
            None,
            "what to do when a turn does not fit; unset: turns in the chat, error elsewhere",
        ),
        Setting("spec.mode", kinds.mode, "auto", "drafting: none, auto, chain:N or tree:N"),
        Setting(
            "spec.drafters",
            kinds.names,
            ("auto",),
            "drafters to ask, first come first merged; auto: ngram, history, and heads if any",
        ),
        Setting(
            "spec.draft_model", kinds.text, None, "model of the drafter draft_model; unset: none"
        ),
        Setting(
            "kv.dtype",
            kinds.one_of(*KV_NAMES),
            "bf16",
            "how keys and values are held: bf16 (the model's dtype), int8, int4 or fp8",
        ),
        Setting(
            "kv.keep_layers",
            kinds.wholes(1),
            (),
            "layers, from 1, that stay plain where the others are quantised",
        ),
        Setting("kv.codec", kinds.one_of("exact", "off"), "exact", "pages on disk, or none"),
        Setting(
            "kv.restore",
            kinds.one_of("auto", "always", "never"),
            "auto",
            "stored pages are read where that is faster than computing them, always, or never",
        ),
        Setting(
            "kv.host_max",
            kinds.size,
            None,
            "bytes of host memory for pages that leave the pool; unset: a tenth, 4 GiB at most",
        ),
        Setting("kv.disk_max", kinds.size, None, "bytes of kv.db; unset: a tenth of the free disk"),
        Setting("ui.theme", kinds.text, "textual-dark", "theme of the screen"),
        Setting("ui.ascii", kinds.yes_no, False, "no characters beyond ASCII in frames and signs"),
        Setting("keys", kinds.bindings, {}, "keys of actions, by the action's name"),
    )
}


def read(key: str, raw: Any, where: str = "") -> Any:
    """The value of a setting. Raises ConfigError with what was wanted and what set it."""
    try:
        return SETTINGS[key].read(raw)
    except ValueError as error:
        shown = repr(raw) if isinstance(raw, str) else str(raw)
        hint = f"It was set by {where}." if where else f"{key}: {SETTINGS[key].about}."
        raise ConfigError(f"{key} is {shown}, but {error}.", hint=hint) from None


def key_of(name: str) -> str:
    """The setting an `-o NAME` means: a sampling setting by its last name, or any in full.

    Raises:
        ConfigError: No such setting.
    """
    for key in (f"sampling.{name}", name):
        if key in SETTINGS:
            return key
    short = [key.removeprefix("sampling.") for key in SETTINGS]
    raise ConfigError(f"There is no option {name!r}.", hint=nearest(name, short))


def nearest(
    name: str, names: list[str], otherwise: str = "`chatkv config show` lists all of them."
) -> str:
    """The hint of an unknown name."""
    close = difflib.get_close_matches(name, names, 1, 0.6)
    return f"Did you mean {close[0]}?" if close else otherwise
