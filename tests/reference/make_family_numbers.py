"""What transformers says of tiny random models of every family, for tests/test_model_families.py.

    python tests/reference/make_family_numbers.py           writes family_numbers.json
    python tests/reference/make_family_numbers.py FOLDER    prints what it says of a folder of ours

Needs torch and transformers. Weights depend on (family, tensor name) alone, so that the test makes
the same ones.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from family_weights import LENGTHS, PLACES, PROMPT, TOKENS, probe, weights

SIZES = {
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 31,
}
WINDOWS = {"sliding_window": 5}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": {},
    "mistral": WINDOWS,
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma": {},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 16, "layer_types": KINDS},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16, "layer_types": KINDS},
}


def filled(model, family: str):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weights(family, name, tuple(parameter.shape))))
    return model.eval()


def config_of(family: str, **more):
    kind = transformers.AutoConfig.for_model(family)
    return type(kind)(**SIZES, **FAMILIES[family], **more, attn_implementation="eager")


def numbers(family: str) -> dict:
    config = config_of(family)
    model = filled(transformers.AutoModelForCausalLM.from_config(config), family)
    logits = model(torch.tensor([TOKENS])).logits[0]
    labelled = config_of(family, num_labels=1)
    scorer = filled(transformers.AutoModelForSequenceClassification.from_config(labelled), family)
    values = json.loads(config.to_json_string(use_diff=False))
    return {
        "config": {k: v for k, v in sorted(values.items()) if v is not None},
        "architecture": type(scorer).__name__,
        "logits": [rounded(row) for row in logits[PLACES]],
        "gradients": gradients(model, family, logits),
        "scores": scores(scorer),
    }


def gradients(model, family: str, logits) -> dict[str, float]:
    """Of the mean log-probability of what follows the prompt: each tensor's along its probe."""
    targets = torch.tensor(TOKENS[PROMPT:])
    logprobs = logits[PROMPT - 1 : -1].log_softmax(dim=1)
    logprobs.gather(1, targets[:, None]).mean().backward()
    found = {}
    for name, parameter in model.named_parameters():
        along = torch.from_numpy(probe(family, name, tuple(parameter.shape)))
        found[name] = round(float((parameter.grad * along).sum()), 6)
    return found


def rounded(values) -> list[float]:
    return [round(x, 6) for x in values.double().tolist()]


def scores(model) -> list[float]:
    """Of TOKENS cut to LENGTHS, in one padded batch."""
    pad = SIZES["pad_token_id"]
    rows = [TOKENS[:n] + [pad] * (max(LENGTHS) - n) for n in LENGTHS]
    mask = [[1] * n + [0] * (max(LENGTHS) - n) for n in LENGTHS]
    with torch.no_grad():
        found = model(torch.tensor(rows), attention_mask=torch.tensor(mask)).logits[:, 0]
    return rounded(found)


def main(folder: str | None = None) -> None:
    if folder is not None:
        architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
        kind = getattr(transformers, architecture)
        model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        model.config.pad_token_id = model.config.pad_token_id or SIZES["pad_token_id"]
        print(architecture, {k: v for k, v in report.items() if v})
        with torch.no_grad():
            is_scorer = architecture.endswith("SequenceClassification")
            print(scores(model) if is_scorer else model(torch.tensor([TOKENS])).logits[0, -1])
        return
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"made_with": made_with, "families": {name: numbers(name) for name in FAMILIES}}
    target = Path(__file__).with_name("family_numbers.json")
    target.write_text(json.dumps(result, sort_keys=True, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
