"""JAX is strict in every test, an implicit broadcast across ranks is an error; and the processor
counts as four devices."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)

# A shell starts what runs in its background with SIGINT ignored, and every child would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _compiled_programs_go_with_their_module():
    """Or a whole session would hold gigabytes of them."""
    yield
    jax.clear_caches()
