"""The optional packages that check answers: where they are missing, only CI must not go on."""

import importlib.util
import os

import pytest

_MISSING = [
    name for name in ("reasoning_gym", "math_verify") if importlib.util.find_spec(name) is None
]
needs_verifiers = pytest.mark.skipif(
    bool(_MISSING) and "CI" not in os.environ, reason=f"not installed: {', '.join(_MISSING)}"
)
