"""What a stage may ask of the process that runs it."""

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

    memory: object
    progress: Callable[[str], None]
    check_alive: Callable[[], None]
