"""How numbers, times and states are said. Pure functions on records; no widget."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from chatkv.errors import ChatKVError, plural
from chatkv.events import ForgetPlanned, Usage
from sessions.port import ContextView, Moment, Price
from tui.answer import NO_REPLY
from tui.safe_text import NOTHING, SafeText, safe_line, safe_text
from tui.turns import spans, which_turns

DAY_S = 86_400


def count(number: int) -> str:
    """`950`, `2.7k`, `31k`, `1.2M`."""
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}" if number < 10 * size else f"{number // size}{unit}"
    return str(number)


def clock(at_ms: int, now_s: float | None = None) -> str:
    """`11:02` today, `Sat` within a week, else `27 Nov`, with the year when it is another one."""
    now = time.time() if now_s is None else now_s
    then = time.localtime(at_ms / 1000)
    today = time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    if 0 <= now - at_ms / 1000 < 6 * DAY_S:
        return time.strftime("%a", then)
    return time.strftime("%d %b" if then.tm_year == today.tm_year else "%b %Y", then)


def clip(text: SafeText, cells: int) -> SafeText:
    """The text in at most that many cells, its cut end shown as `..`."""
    if cell_len(text) <= cells:
        return text
    return SafeText(set_cell_size(text, max(0, cells - 2)).rstrip() + ".."[: max(0, cells)])


def pad(text: SafeText, cells: int) -> SafeText:
    """The text in exactly that many cells."""
    return SafeText(set_cell_size(clip(text, cells), cells))


def bar(part: int, whole: int, cells: int) -> str:
    """A bar of blocks; anything above nothing shows."""
    if whole <= 0:
        return "░" * cells
    filled = min(cells, max(part > 0, round(cells * part / whole)))
    return "█" * filled + "░" * (cells - filled)


def error_text(error: ChatKVError) -> tuple[SafeText, SafeText]:
    """What happened, and what to do next."""
    return safe_text(error.message.strip()), safe_line(error.hint)


def reply_numbers(usage: Usage | None, *, length: bool = True) -> list[str]:
    """The short numbers of one reply, its length first."""
    if usage is None or not usage.predicted_n:
        return []
    parts = [f"{usage.predicted_n} tok"] if length else []
    if usage.predicted_ms:
        parts.append(f"{usage.tokens_per_second:.0f} tok/s")
    if usage.steps:
        parts.append(f"{usage.tokens_per_step:.1f} tok/step")
    return parts


def redact_words(
    numbers: Sequence[int], forks: Sequence[str], *, purge: bool
) -> tuple[SafeText, list[SafeText]]:
    """The question before a redaction, and what to know."""
    facts = [
        SafeText("The model never sees them again; stored pages that saw them are deleted."),
        SafeText("What comes behind them is computed again."),
    ]
    if purge:
        facts.append(SafeText("Their text goes too; exports and your own backups keep it."))
    if forks:
        facts.append(SafeText(f"Shared with {', '.join(map(safe_line, forks))}: gone there too."))
    verb = "Redact and purge" if purge else "Redact"
    return SafeText(f"{verb} {which_turns(numbers)}? Nothing brings them back."), facts


def moment_text(moment: Moment) -> SafeText:
    """What the rule in the transcript says where turns went out of sight, or came back."""
    which = which_turns(moment.turns)
    tokens = plural(moment.num_tokens, "token")
    if moment.back:
        return SafeText(f"{which} came back into the model's context ({tokens})")
    if moment.policy == "user":
        return SafeText(f"{which} left the model's context, as you said ({tokens}). /recall")
    if moment.policy == "summarize":
        left = f"{which} left the model's context ({tokens}); a summary stands for them"
        return SafeText(f"{left}. /recall, or [ at the summary goes back")
    oldest = f"{plural(len(moment.turns), 'oldest turn')} left the model's context ({tokens})"
    return SafeText(f"{oldest}. Still in history. /context, /recall")


def missing_text(view: ContextView) -> SafeText:
    """The banner while any turn of the path is out of sight."""
    if not view.missing:
        return NOTHING
    which = which_turns(view.missing)
    tokens = f" · {view.forgotten_tokens:,} tok" if view.forgotten_tokens else ""
    return SafeText(f"FORGOTTEN {which}{tokens} · the model cannot see them")


WAYS_OUT = "/forget turns of your own choice, /pin what must stay, or use a larger --context."


def ask_words(plans: Sequence[ForgetPlanned]) -> SafeText:
    """The question before a turn that makes the model forget."""
    if any(plan.policy == "summarize" for plan in plans):
        return SafeText("Send it, and let the model write a summary of what it forgets?")
    return SafeText("Send it, and let the model forget?")


def planned_text(plan: ForgetPlanned) -> SafeText:
    """What a turn will put out of sight, with the numbers before and after."""
    turns = sorted({*plan.turns, *plan.partly})
    which = which_turns(turns)
    return SafeText(
        f"{which} would leave the model's context ({plural(plan.num_tokens, 'token')}; "
        f"{plan.live_before:,} to {plan.live_after:,} of {plan.limit:,})"
    )


WARN_SHARE = 0.85
"""From this share of the context on the status line says what comes."""


def coming_text(view: ContextView) -> tuple[SafeText, str]:
    """What the next turn will put out of sight, and how much it matters: `error`, `warning`,
    `info` or nothing."""
    waits = [f"forgets {spans(list(view.forget))}"] if view.forget else []
    waits += [f"brings back {spans(list(view.recall))}"] if view.recall else []
    if view.warning.startswith("The next turn"):
        return SafeText("the next turn will not fit: /forget, /context"), "error"
    full = bool(view.limit) and (view.used_next or 0) >= WARN_SHARE * view.limit
    plan = next((one for one in view.plans if one.num_tokens), None)
    if full and plan is not None:
        turns = plural(len(plan.turns) or len(plan.partly), "turn")
        verb = "sum up" if plan.policy == "summarize" else "forget"
        said = f"next turn will {verb} {turns} ({plural(plan.num_tokens, 'token')})"
        return SafeText(f"{said}: /pin, /context"), "warning"
    if waits:
        return SafeText(f"next turn {', '.join(waits)}: /context"), "info"
    return NOTHING, "warning" if full else ""


def price_text(price: Price, usages: Sequence[Usage | None]) -> SafeText:
    """What a change of the context costs, with the time it took before where one is known."""
    parts = [f"{plural(price.computed, 'token')} computed{_about(price.computed, usages)}"]
    if price.disk:
        parts.append(f"{price.disk:,} read from disk")
    if price.pool:
        parts.append(f"{price.pool:,} in memory")
    return SafeText(" · ".join(parts))


def _about(tokens: int, usages: Sequence[Usage | None]) -> str:
    """How long that takes at the rate of the longest prompt that was computed here."""
    known = [usage for usage in usages if usage is not None and usage.prompt_n and usage.prompt_ms]
    if not known or not tokens:
        return ""
    best = max(known, key=lambda usage: usage.prompt_n)
    return f" (about {tokens * best.prompt_ms / best.prompt_n / 1000:.1f} s)"


REPLY_ENDS = {
    "length": "cut at max_tokens",
    "context_full": "context full",
    "dead_end": "the grammar let nothing follow",
}


def reply_end(state: str, finish_reason: str, usage: Usage | None, *, text: bool = True) -> str:
    """Why a reply is shorter than it might be, or nothing.

    Args:
        state: Of the turn.
        finish_reason: Of its reply.
        usage: Its numbers.
        text: Whether there is any of it.
    """
    tokens = usage.predicted_n if usage is not None else 0
    if state == "interrupted" and not text and not tokens:
        return NO_REPLY
    if state in ("open", "interrupted") or finish_reason == "cancelled":
        return f"interrupted after {tokens} tok" if tokens else "interrupted"
    if state == "error":
        return "failed"
    return REPLY_ENDS.get(finish_reason, "")


def reuse_words(usage: Usage) -> str:
    """Why no more was reused, with what goes with it."""
    words = usage.reuse_reason.replace("_", " ")
    return f"{words}: {safe_line(usage.reuse_detail)}" if usage.reuse_detail else words


def restored_words(usage: Usage) -> str:
    """`3 pages from disk, 2 from memory`."""
    words = f"{plural(usage.restored_pages, 'page')} from disk"
    return f"{words}, {usage.host_pages} from memory" if usage.host_pages else words


def _summary_row(usage: Usage) -> dict[str, str]:
    """What a summary took that was written before the reply."""
    if not usage.summary_n:
        return {}
    tokens = plural(usage.summary_n, "token")
    return {"summary": f"{tokens} in {usage.summary_ms:.0f} ms, before the rest"}


def usage_rows(usage: Usage | None) -> list[tuple[SafeText, SafeText]]:
    """All numbers of one reply, each with its name."""
    if usage is None:
        return [(SafeText("replies"), SafeText("none yet"))]
    tps = f"{usage.tokens_per_second:.0f} tok/s" if usage.predicted_ms else "unknown"
    rows = {
        "context": f"{usage.context_used:,} of {usage.context_limit:,} tokens",
        "prompt": plural(usage.prompt_tokens, "token"),
        "reused": f"{plural(usage.cached_tokens, 'token')} ({reuse_words(usage)})",
        "hit rate": "-"
        if usage.hit_rate is None
        else f"{100 * usage.hit_rate:.0f} % of what "
        f"could be reused ({plural(usage.reusable_tokens, 'token')})",
        "computed": f"{plural(usage.prompt_n, 'token')} in {usage.prompt_ms:.0f} ms",
        "restored": f"{restored_words(usage)} in {usage.restore_ms:.0f} ms",
        **_summary_row(usage),
        "reply": f"{plural(usage.predicted_n, 'token')} in {usage.predicted_ms:.0f} ms, {tps}",
        "steps": f"{usage.steps}, {usage.tokens_per_step:.2f} tokens a step",
        "drafted": f"{plural(usage.draft_n, 'token')}, {usage.draft_n_accepted} right",
        "pages": f"{usage.pages_used} of {usage.pages_total}",
    }
    return [(SafeText(name), safe_line(value)) for name, value in rows.items()]
