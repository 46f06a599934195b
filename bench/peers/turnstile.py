"""Lets a trainer that runs a loop of its own go on by one iteration at a time."""

import queue
import threading
from collections.abc import Callable


class Turnstile:
    """The trainer calls `wait` before each iteration; `once` lets one run, up to the next wait."""

    def __init__(self):
        self._begin: queue.Queue = queue.Queue()
        self._arrived: queue.Queue = queue.Queue()

    def start(self, train: Callable[[], object]) -> None:
        """Run the trainer in a thread, up to its first wait."""
        threading.Thread(target=self._run, args=(train,), daemon=True).start()
        self._await()

    def wait(self) -> None:
        self._arrived.put(None)
        self._begin.get()

    def once(self) -> None:
        """Raises what the trainer raised."""
        self._begin.put(None)
        self._await()

    def _run(self, train: Callable[[], object]) -> None:
        try:
            train()
            self._arrived.put(RuntimeError("the trainer has ended"))
        except BaseException as error:
            self._arrived.put(error)

    def _await(self) -> None:
        error = self._arrived.get()
        if error is not None:
            raise error
