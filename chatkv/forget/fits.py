"""Whether a path with what it forgot can be computed here. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence

from chatkv.errors import ConfigError, ContextFull, UsageError
from chatkv.forget.layout import Limits
from chatkv.kv.layout import stages
from chatkv.kv.ops import Op, check_ops


def expect_fits(ops: Sequence[Op], num_ids: int, limits: Limits) -> None:
    """Refuse ops that do not fit the path or the model, and a path that does not fit."""
    try:
        check_ops(ops, num_ids - 1)
        steps = stages(ops, limits.page_tokens)
    except ValueError as error:
        raise UsageError(
            f"What was forgotten does not fit the conversation: {error}",
            hint="It was recorded for other ids; fork from an earlier turn.",
        ) from error
    if limits.no_rebase and any(op.rebase for op in ops):
        raise ConfigError(
            f"The model has {limits.no_rebase}, so positions cannot move.",
            hint="Begin anew at that op: see chatkv.forget.flatten.",
        )
    ends = [*(stage.base for stage in steps[1:]), num_ids + 1]
    for stage, end in zip(steps, ends, strict=True):
        if end - stage.shift > limits.trained:
            first = stage.base - stage.shift
            raise ContextFull(used=first, needed=end - stage.base, limit=limits.trained, least=0)
        # Captured passes have room for tables twice as long as the context.
        if len(stage.spans) * limits.page_tokens + end - stage.base > 2 * limits.trained:
            raise UsageError(
                f"What is left in sight lies in {len(stage.spans)} pieces of pages.",
                hint="Unpin, or forget, some of the short turns.",
            )
    live, new = steps[-1].live, num_ids + 1 - steps[-1].base
    if live + new > limits.context:
        raise ContextFull(used=live, needed=new, limit=limits.context, least=live + new)
