"""A Hugging Face Llama of a shape, with random weights, in float32."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from workload import Shape


def make_model(shape: Shape, cores: int) -> LlamaForCausalLM:
    torch.set_num_threads(cores)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float()
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters
    return model
