"""Ours: the spec of a shape, and what stands in for a tokenizer where no text is wanted."""

from collections.abc import Sequence

from workload import Shape

from rl.models.spec import ModelConfig, ModelSpec


def make_spec(shape: Shape) -> ModelSpec:
    config = ModelConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=True,
    )
    return ModelSpec(config, None, "float32")


class NoText:
    """No token ends a text, and none has one."""

    eos_ids: tuple[int, ...] = ()
    pad_id = 0

    def decode(self, ids: Sequence[int]) -> str:
        return ""
