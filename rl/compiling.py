"""What JAX has compiled so far in this process, so that a stage can tell its own share."""

import functools
from typing import NamedTuple

_PREPARING = "/jax/core/compile/"  # tracing, lowering, and compiling or finding in the cache
_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"


class Compiled(NamedTuple):
    """Seconds spent on making programs ready, and how many no cache had."""

    seconds: float = 0.0
    num_programs: int = 0

    def __sub__(self, before: "Compiled") -> "Compiled":
        return Compiled(self.seconds - before.seconds, self.num_programs - before.num_programs)


class _Listener:
    """Hears JAX's own events; registered once, as it cannot be taken back."""

    def __init__(self):
        import jax.monitoring

        self.total = Compiled()
        jax.monitoring.register_event_duration_secs_listener(self._took)
        jax.monitoring.register_event_listener(self._happened)

    def _took(self, event: str, seconds: float, **_) -> None:
        if event.startswith(_PREPARING):
            self.total = self.total._replace(seconds=self.total.seconds + seconds)

    def _happened(self, event: str, **_) -> None:
        change = {_REQUEST: 1, _HIT: -1}.get(event, 0)
        self.total = self.total._replace(num_programs=self.total.num_programs + change)


@functools.cache
def _listener() -> _Listener:
    return _Listener()


def compiled() -> Compiled:
    """Since the first call."""
    return _listener().total
