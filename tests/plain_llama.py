"""A Llama forward pass written for reading, in float64 numpy: one sequence, every position anew."""

import numpy as np


def plain_logits(config, lora, parameters, tokens):
    """Logits [T, V] of one whole sequence, from the same flat parameter dict."""
    weights = {name: np.asarray(value, np.float64) for name, value in parameters.items()}
    x = np.stack([weights["embed_tokens.embedding"][token] for token in tokens])
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}"
        normed = _norm(config, x, weights[f"{at}.input_layernorm.scale"])
        kind = config.attention_kind(layer)
        x = x + _attention(config, lora, weights, f"{at}.self_attn", normed, kind)
        normed = _norm(config, x, weights[f"{at}.post_attention_layernorm.scale"])
        gate = _linear(lora, weights, f"{at}.mlp.gate_proj", normed)
        up = _linear(lora, weights, f"{at}.mlp.up_proj", normed)
        gated = gate / (1 + np.exp(-gate)) * up
        x = x + _linear(lora, weights, f"{at}.mlp.down_proj", gated)
    x = _norm(config, x, weights["norm.scale"])
    is_tied = config.tie_word_embeddings
    logits = x @ (weights["embed_tokens.embedding"].T if is_tied else weights["lm_head.kernel"])
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * np.tanh(logits / cap)


def plain_scores(config, lora, parameters, prompt, completion, temperature):
    """(log-probability, entropy) of each completion token, each [T]."""
    logits = plain_logits(config, lora, parameters, [*prompt, *completion])
    scaled = logits[len(prompt) - 1 : -1] / temperature
    scaled -= scaled.max(axis=1, keepdims=True)
    logprobs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
    return logprobs[np.arange(len(completion)), completion], entropy


def _norm(config, x, scale):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps) * scale


def _linear(lora, weights, stem, x):
    kernel = weights[f"{stem}.kernel"]
    if f"{stem}.lora_a" in weights:
        adapter = weights[f"{stem}.lora_a"] @ weights[f"{stem}.lora_b"]
        kernel = kernel + adapter * lora.alpha / lora.rank
    return x @ kernel + weights.get(f"{stem}.bias", 0.0)


def _attention(config, lora, weights, at, x, kind):
    heads, kv_heads, size = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    query = _linear(lora, weights, f"{at}.q_proj", x)
    key = _linear(lora, weights, f"{at}.k_proj", x)
    value = _linear(lora, weights, f"{at}.v_proj", x)
    outputs = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        q = _rotated(config, query[:, head * size : (head + 1) * size])
        k = _rotated(config, key[:, shared * size : (shared + 1) * size])
        v = value[:, shared * size : (shared + 1) * size]
        output = np.zeros_like(v)
        for t in range(len(x)):
            first = 0 if kind.window is None else max(t + 1 - kind.window, 0)
            scores = k[first : t + 1] @ q[t] / np.sqrt(size)
            if kind.soft_cap is not None:
                scores = kind.soft_cap * np.tanh(scores / kind.soft_cap)
            weight = np.exp(scores)
            output[t] = weight @ v[first : t + 1] / weight.sum()
        outputs.append(output)
    return _linear(lora, weights, f"{at}.o_proj", np.concatenate(outputs, axis=1))


def _rotated(config, x):
    """Channels c and c + C/2 as one complex number, turned by position * theta ** (-2c / C)."""
    half = config.head_dim // 2
    angles = np.outer(
        np.arange(len(x)), config.rope_theta ** (-2 * np.arange(half) / config.head_dim)
    )
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)
