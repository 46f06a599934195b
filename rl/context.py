"""What a stage may ask of the process that runs it."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Context:
    """Handed to every stage, by the resident worker and by the cold launcher alike.

    `memory` is a dict that lives as long as the process and is emptied after any failure: a stage
    may keep there whatever it can make again from its input files, and nothing else. `progress`
    shows one line to whoever asked for the stage. `check_alive` raises `ClientGone` once the client
    or its workflow has died; it is called before an output is renamed into place, and wherever a
    stage can stop cheaply.
    """

    memory: dict
    progress: Callable[[str], None]
    check_alive: Callable[[], None]

    def occasionally(self, prefix: str, seconds: float = 10.0) -> Callable[[str], None]:
        """`progress` for long work that reports often: a line at most every `seconds`."""
        last = time.monotonic()

        def say(line: str) -> None:
            nonlocal last
            if time.monotonic() - last >= seconds:
                last = time.monotonic()
                self.progress(f"{prefix}: {line}")

        return say

    def watched(self, stage: str) -> Callable[[str], None]:
        """`occasionally`, of work that also stops when nobody waits for it any more."""
        say = self.occasionally(stage)

        def tell(line: str) -> None:
            self.check_alive()
            say(line)

        return tell
