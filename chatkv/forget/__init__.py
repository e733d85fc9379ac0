"""What leaves the model's sight when a conversation is longer than its context, and when.

Decisions only: turns, sizes and pins in, an op out. Knows no text and no tensor. Plans are made and
checked before anything changes, by the same rule in a live chat and on resume.
"""

from chatkv.forget.fits import expect_fits
from chatkv.forget.layout import (
    SINK_TOKENS,
    Layout,
    Limits,
    TurnSpan,
    flatten,
    reserve_tokens,
    tail_of,
)
from chatkv.forget.parts import ForgetPlan, place_of
from chatkv.forget.plans import pin_warning, plan, plan_turns, plan_user
from chatkv.forget.policies import (
    ANSWERS,
    POLICIES,
    OldestPolicy,
    Policy,
    SummarizePolicy,
    TurnsPolicy,
    WindowPolicy,
    asks_first,
    check_policy,
    parse_policy,
    policy_text,
)
from chatkv.forget.slide import Slide

__all__ = [
    "ANSWERS",
    "POLICIES",
    "SINK_TOKENS",
    "ForgetPlan",
    "Layout",
    "Limits",
    "OldestPolicy",
    "Policy",
    "Slide",
    "SummarizePolicy",
    "TurnSpan",
    "TurnsPolicy",
    "WindowPolicy",
    "asks_first",
    "check_policy",
    "expect_fits",
    "flatten",
    "parse_policy",
    "pin_warning",
    "place_of",
    "plan",
    "plan_turns",
    "plan_user",
    "policy_text",
    "reserve_tokens",
    "tail_of",
]
