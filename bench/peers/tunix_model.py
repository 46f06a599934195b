"""tunix's Llama of a shape, with random weights, in float32, and a tokenizer of numbers."""

from collections.abc import Sequence

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from tunix.models.llama3.model import Llama3, ModelConfig
from workload import Shape


def make_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


def make_config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        num_layers=shape.layers,
        vocab_size=shape.vocabulary,
        embed_dim=shape.width,
        hidden_dim=shape.ffn,
        num_heads=shape.heads,
        head_dim=shape.head_size,
        num_kv_heads=shape.kv_heads,
        rope_theta=10_000,
        norm_eps=1e-5,
        weight_tying=True,
    )


def make_model(shape: Shape, mesh: Mesh) -> Llama3:
    """Its own initial values, made smaller: theirs have deviation 1, too much for random logits."""

    @nnx.jit
    def make() -> Llama3:
        model = Llama3(make_config(shape), rngs=nnx.Rngs(0))
        state = jax.tree.map(
            lambda value: 0.02 * value if value.ndim > 1 else value, nnx.state(model)
        )
        nnx.update(model, state)
        return model

    with mesh:
        model = make()
    count = sum(value.size for value in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count == shape.num_parameters, (count, shape.num_parameters)
    return model


class Numbers:
    """A text is token ids with blanks between. Its begin token is 0, which tunix leaves out."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0

    def pad_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2
