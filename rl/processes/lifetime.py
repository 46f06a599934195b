"""Until when a worker is of use: whom it has served, and how long ago.

A worker that has seen all its workflows end leaves soon after. It sees those of its own machine
only: one whose workflow runs on another node of a SLURM allocation takes it to be there, and
leaves when it was idle for MESHDIAL_WORKER_IDLE_S (600 s), or when the allocation ends. Until then
`meshdial worker stop` in the results folder, from any node of the allocation, sends it away.
"""

import time

from rl.processes import liveness, runtime

FIRST_REQUEST_S = 30.0  # a worker that nobody ever asked ends after this


class Lifetime:
    """The workflows that a worker serves, and the clock of its idleness."""

    def __init__(self):
        self.workflows: list[dict] = []
        self.num_served = 0
        self.active = time.monotonic()
        self._workflows_ended: float | None = None
        self._idle_s = runtime.seconds("MESHDIAL_WORKER_IDLE_S")
        self._linger_s = runtime.seconds("MESHDIAL_WORKER_LINGER_S")
        self._yield_s = runtime.seconds("MESHDIAL_WORKER_YIELD_S")

    def note_request(self, workflow: dict | None) -> None:
        self.active = time.monotonic()
        if workflow is not None and workflow not in self.workflows:
            self.workflows.append(workflow)

    def note_end(self) -> None:
        """The running stage is over."""
        self.active = time.monotonic()

    def idle_seconds(self) -> float:
        return time.monotonic() - self.active

    def end_reason(self, is_busy: bool, is_running: bool) -> str:
        """Why the worker should leave; empty while it should not."""
        self._forget_ended_workflows()
        if is_busy:
            return ""
        ended = self._workflows_ended
        if ended is not None and time.monotonic() - ended >= self._linger_s:
            return "its workflow has ended"
        limit = self._idle_s if self.num_served else min(self._idle_s, FIRST_REQUEST_S)
        is_idle = not is_running and self.idle_seconds() >= limit
        return f"it was idle for {limit:.0f} s" if is_idle else ""

    def _forget_ended_workflows(self) -> None:
        """Note since when there has been none, if there was one."""
        had_any = bool(self.workflows)
        self.workflows = [workflow for workflow in self.workflows if liveness.is_alive(workflow)]
        if self.workflows:
            self._workflows_ended = None
        elif had_any:
            self._workflows_ended = time.monotonic()

    def can_yield(self, theirs: list[dict]) -> bool:
        """Whether an idle worker may leave its devices to one that serves the workflows `theirs`:
        after a while, or when it has no workflow of its own but these."""
        own = [workflow for workflow in self.workflows if liveness.is_alive(workflow)]
        is_long_idle = self.idle_seconds() >= self._yield_s
        return is_long_idle or all(workflow in theirs for workflow in own)
