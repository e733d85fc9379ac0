"""Time to the first token of a reopened conversation: stored pages against computing it again; and
what saving pages takes of the decode rate, and of the time after a reply.

    python -m benchmarks.reopen [--tokens 3000] [--rounds 3] [--json FILE]

Both ways run in this process on the same loaded model, in ABBA order, each with a fresh engine and
an empty pool; the peer is our own fastest prefill, and for saving an engine without a store. Stored
pages are always read here, whatever the planner would do. Medians.

What saving takes is less than what a shared machine's speed changes by within seconds: so it is the
median over pairs of short replies, one behind the other, with pages saved and without.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.about import about, write
from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.events import Delta, Done
from chatkv.models import catalog
from chatkv.models.decoder import Decoder
from sessions.chat import Chats
from sessions.local import LocalEngine
from sessions.pages import SqlitePageStore
from sessions.service import EngineService
from sessions.store import ChatStore

REPLY_TOKENS = 128
PAIRS = 8
"""Of replies, a round."""
TEXT = "The page holds sixteen tokens, and a fork copies at most fifteen of them. "


class Program:
    """A store, pages or none, and a fresh engine on a loaded model."""

    def __init__(self, model: Decoder, folder: Path, kv: str | None) -> None:
        identity = model.identity(model.page_size)
        self.pages = (
            None if kv is None else SqlitePageStore(folder / kv, identity, limit_bytes=4 << 30)
        )
        salt = b"" if self.pages is None else self.pages.salt
        self.engine = LocalEngine(
            EngineService(
                Engine(
                    model,
                    EngineConfig(spec="none", drafters=(), restore="always"),
                    store=self.pages,
                    salt=salt,
                    costs={1: 8.0},
                ),
                self.pages,
            )
        )
        self.engine.start()
        self.store = ChatStore(folder / "chat.db")
        sampling = {"temperature": 0.7, "seed": 5, "max_tokens": 48}
        self.chats = Chats(self.store, self.engine, settings={"sampling": sampling})

    def close(self) -> None:
        """Pages reach the disk; files are closed."""
        self.engine.close()
        if self.pages is not None:
            self.pages.close()
        self.store.close()


def first_token(program: Program, chat_id: str, prompt: str) -> tuple[float, Done]:
    """Milliseconds from send to the first token, and how the reply ended."""
    chat = program.chats.open(chat_id).fork()
    begun, first = perf_counter(), 0.0
    for event in chat.send(prompt):
        if isinstance(event, Delta) and not first:
            first = 1000 * (perf_counter() - begun)
        if isinstance(event, Done):
            return first, event
    raise RuntimeError("the reply did not end")


def decode_rate(model: Decoder, folder: Path, kv: str | None) -> tuple[float, float]:
    """Tokens a second of one reply in a new conversation, its pages saved or not; and how many
    milliseconds after it the last of them was on disk."""
    program = Program(model, folder, kv)
    chat = program.chats.new()
    chat.set("max_tokens", REPLY_TOKENS)
    (*_, done) = chat.send("Write a long story about the sea, in many sentences.")
    ended, saver = perf_counter(), program.engine.service.engine.saver
    assert saver is None or saver.flush(60.0), saver.notice
    after_ms = 1000 * (perf_counter() - ended)
    program.close()
    assert isinstance(done, Done), done
    return done.usage.tokens_per_second, after_ms


def main() -> None:
    """Build the conversation, then reopen it both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--json", metavar="FILE", help="where the raw result goes")
    args = parser.parse_args()
    model = Decoder.load(catalog.find(args.model))
    facts = about(model)
    folder = Path(tempfile.mkdtemp(prefix="chatkv-bench-"))
    folder.chmod(0o700)
    try:
        program = Program(model, folder, "kv.db")
        chat = program.chats.new("long")
        used = 0
        while used < args.tokens:
            text = TEXT * max(1, min(20, (args.tokens - used) // 20))
            (*_, done) = chat.send(text + "Say it shorter.")
            assert isinstance(done, Done), done
            used = done.usage.context_used
        program.close()
        times: dict[str, list[float]] = {"stored": [], "computed": []}
        usage, restore_ms = None, list[float]()
        for round_ in range(args.rounds):
            order = ["stored", "computed", "computed", "stored"]
            for way in order if round_ % 2 == 0 else reversed(order):
                program = Program(model, folder, "kv.db" if way == "stored" else None)
                ms, done = first_token(
                    program, chat.id, f"And now, {sum(map(len, times.values()))}?"
                )
                times[way].append(ms)
                program.close()
                if way == "stored":
                    usage = done.usage
                    restore_ms.append(usage.restore_ms)
        rates: dict[str, list[float]] = {"saved": [], "unsaved": []}
        after_ms: list[float] = []
        for pair in range(PAIRS * args.rounds):
            for way in ["saved", "unsaved"] if pair % 2 == 0 else ["unsaved", "saved"]:
                # A file of its own each time: a page that is stored already costs nothing.
                kv = f"kv-{pair}.db" if way == "saved" else None
                rate, ms = decode_rate(model, folder, kv)
                rates[way].append(rate)
                if way == "saved":
                    after_ms.append(ms)
        ratios = [a / b for a, b in zip(rates["saved"], rates["unsaved"], strict=True)]
        share, low, high = (1 - found for found in (median(ratios), max(ratios), min(ratios)))
        saved, unsaved = median(rates["saved"]), median(rates["unsaved"])
        assert usage is not None
        stored, computed = median(times["stored"]), median(times["computed"])
        write(
            args.json,
            "reopen",
            facts,
            tokens=used,
            cached_tokens=usage.cached_tokens,
            prompt_tokens=usage.prompt_tokens,
            restored_pages=usage.restored_pages,
            verified=usage.verified,
            restore_ms=median(restore_ms),
            stored_ms=stored,
            computed_ms=computed,
            ratio=computed / stored,
            samples_ms=times,
            saved_tok_s=saved,
            unsaved_tok_s=unsaved,
            saving_share=share,
            samples_tok_s=rates,
            saved_after_ms=median(after_ms),
        )
        print(
            f"conversation of {used} tokens: {usage.cached_tokens} of {usage.prompt_tokens} tokens "
            f"reused, {usage.restored_pages} pages, verified {usage.verified}, "
            f"restore {median(restore_ms):.0f} ms"
        )
        print(f"first token, pages stored   {stored:8.1f} ms")
        print(
            f"first token, all computed   {computed:8.1f} ms ({1000 * used / computed:.0f} tok/s)"
        )
        print(f"ratio {computed / stored:.1f}")
        print(
            f"decode {saved:.1f} tok/s with pages saved, {unsaved:.1f} without: "
            f"saving takes {100 * share:.1f} % (median of {len(ratios)} pairs, "
            f"{100 * low:.1f} to {100 * high:.1f}), and "
            f"{median(after_ms):.0f} ms after the reply ({REPLY_TOKENS} tokens)"
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
