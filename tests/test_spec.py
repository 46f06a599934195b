"""Which attention a model's layers have, and what a config.json says of it."""

import pytest

from rl.errors import MeshdialError
from rl.models.config_file import read_model_config, write_model_config
from rl.models.spec import AttentionKind, ModelConfig

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def kinds_of(**options):
    config = ModelConfig(**SIZES, **options)
    return [config.attention_kind(layer) for layer in range(3)]


def test_every_layer_slides_unless_layer_types_say_which():
    assert kinds_of() == [AttentionKind(None, None)] * 3
    assert kinds_of(sliding_window=5) == [AttentionKind(5, None)] * 3
    types = ("full_attention", "sliding_attention", "full_attention")
    found = kinds_of(sliding_window=5, layer_types=types, attn_logit_softcapping=50.0)
    assert found == [AttentionKind(w, 50.0) for w in (None, 5, None)]


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ({"model_type": "mistral"}, 4096),  # as transformers' MistralConfig has it
        ({"model_type": "mistral", "sliding_window": 7}, 7),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "llama", "sliding_window": 7}, None),  # a Llama has none, whatever it says
    ],
)
def test_a_mistral_has_a_window_and_a_llama_none(values, window):
    config = read_model_config(SIZES | values)
    assert config.sliding_window == window
    assert read_model_config(write_model_config(config)) == config
    assert write_model_config(config)["model_type"] == values["model_type"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', supported are llama, mistral, "),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window is 0, expected at least 1",
        ),
    ],
)
def test_what_is_not_computed_is_refused(values, message):
    with pytest.raises(MeshdialError, match=message):
        read_model_config(SIZES | values)
