"""Imported by the process that others are forked off (`forked.py`), and by no other.

Loads what a tiny model needs to compute, without leaving a thread behind, and the modules that a
child which becomes another user could not read any more.
"""

from __future__ import annotations

import tomllib  # noqa: F401

import sqlite_utils  # noqa: F401
import torch
from fakes import TinyModel
from program import COSTS

from chatkv.config import EngineConfig
from chatkv.engine import Engine
from chatkv.sampling import SamplingParams
from tui import cli, wiring  # noqa: F401
from tui.commands import ask  # noqa: F401

torch.set_num_threads(1)  # threads do not survive a fork, and what waits for them hangs


def one_reply() -> None:
    engine = Engine(TinyModel(), EngineConfig(spec="none"), costs=COSTS, guard=False)
    tokens = list(b"0123456789")
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=3)
    engine.generate([engine.add(tokens, [False] * len(tokens), params)])


one_reply()
