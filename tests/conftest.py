"""JAX is made strict for every test: an implicit broadcast across ranks is an error."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shell starts what runs in its background with SIGINT ignored, and every child would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
