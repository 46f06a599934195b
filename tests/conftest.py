"""JAX is strict in every test, an implicit broadcast across ranks is an error; and the processor
counts as four devices."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_num_cpu_devices", 4)

# A shell starts what runs in its background with SIGINT ignored, and every child would inherit it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
