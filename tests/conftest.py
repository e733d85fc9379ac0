"""What every test gets: the folder of shared fakes on the path, user folders out of the way."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "engine")]

settings.register_profile(
    "chatkv", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("chatkv")
