"""The two exceptions that cross a stage's boundary."""


class MeshdialError(Exception):
    """Bad input, told in one sentence: the file, the key or column, what was found and expected."""


class ClientGone(Exception):
    """Whoever asked for this stage has died, so its output must not be published."""
