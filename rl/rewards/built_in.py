"""The built-in reward functions. Raise a version when its results change."""

import hashlib
import re
from decimal import Decimal
from typing import NamedTuple

# A sign counts unless it stands right behind a word or a bracket, where it subtracts.
_NUMBER = re.compile(
    r"(?<![\w.])(?P<sign>(?<![)\]])[-+])?"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<exponent>[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)


def exact_match(completion: str, ground_truth: str) -> float:
    """Whether the completion is the ground truth, but for white space around either."""
    return float(completion.strip() == ground_truth.strip())


def numeric_match(completion: str, ground_truth: str) -> float:
    """Whether the last number of the completion equals the ground truth, which is one number.

    Values are compared exactly, not digits: 1,000 and 1e3 and 1000.0 are equal. `$` and `%` are
    left out of account. ValueError if the ground truth is anything but one number.
    """
    bare = ground_truth.strip().strip("$%").strip()
    wanted = _numbers(bare)
    if len(wanted) != 1 or len(wanted[0][0]) != len(bare):
        raise ValueError(f"the ground truth {ground_truth!r:.40} is not a number")
    found = _numbers(completion)
    return float(bool(found) and found[-1][1] == wanted[0][1])


def regex(completion: str, pattern: str) -> float:
    """Whether the whole completion, stripped, matches `pattern` (`.` matches a newline too)."""
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)


def random(seed: int, sample_id: str) -> float:
    """A fair coin for each sample, whatever the completion: the control of an experiment."""
    return float(hashlib.sha256(f"random reward/{seed}/{sample_id}".encode()).digest()[0] & 1)


def _numbers(text: str) -> list[tuple[str, Decimal]]:
    """Every number in the text as it is written, and its value."""
    matches = _NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-"))
    return [(match.group(), Decimal(match.group().replace(",", ""))) for match in matches]


class BuiltIn(NamedTuple):
    """A built-in: the file beside this one that defines it, its version, and how it is called.

    One that may hang, or that needs a package which takes long to import, runs in a process that
    can be ended. `package` is the distribution of the extra `verifiers` that it needs.
    """

    module: str
    version: int
    is_trusted: bool = False
    package: str | None = None


BUILT_INS = {
    "exact_match": BuiltIn("built_in", 1, is_trusted=True),
    "numeric_match": BuiltIn("built_in", 1, is_trusted=True),
    "regex": BuiltIn("built_in", 1),
    "random": BuiltIn("built_in", 1, is_trusted=True),
    "format_tags": BuiltIn("structure", 1, is_trusted=True),
    "json_schema": BuiltIn("structure", 1),
    "math_verify": BuiltIn("mathematics", 1, package="math-verify"),
    "reasoning_gym": BuiltIn("procedural", 1, package="reasoning-gym"),
}
