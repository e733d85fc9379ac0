"""Work for which nobody waits, done in pieces while there is no request. Knows iterators only."""

from __future__ import annotations

import logging
from collections.abc import Generator

from chatkv.errors import ChatKVError

logger = logging.getLogger(__name__)


class IdleWork:
    """At most one piece of work. A piece of it holds up a request that comes meanwhile."""

    def __init__(self) -> None:
        self._work: Generator[None] | None = None

    @property
    def is_left(self) -> bool:
        """Whether something is still to be done."""
        return self._work is not None

    def begin(self, work: Generator[None]) -> None:
        """Do this from now on, in place of what was left of something else."""
        self.stop()
        self._work = work

    def stop(self) -> None:
        """Leave the rest."""
        work, self._work = self._work, None
        if work is not None:
            work.close()

    def do_some(self) -> bool:
        """Do one piece. False if nothing is left."""
        if self._work is None:
            return False
        try:
            next(self._work)
        except StopIteration:
            self._work = None
        except ChatKVError as error:  # whoever sends the request that needs it is told then
            logger.info("What there was time for came to nothing: %s", error)
            self._work = None
        return self._work is not None
