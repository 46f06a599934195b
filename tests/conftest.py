"""JAX is made strict for every test: an implicit broadcast across ranks is an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
