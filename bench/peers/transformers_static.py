"""Hugging Face `generate`: left-padded batches, each decoded until its last sample has ended.

It is not asked for log-probabilities, which it would compute from scores that it keeps.
"""

import torch
import transformers
from serving import Repeat, serve
from torch_model import make_model
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from workload import SHAPES, Requests, make_requests


class EachAtItsLimit(StoppingCriteria):
    """A row ends after so many new tokens; `generate` pads it from then on."""

    def __init__(self, prompt_length: int, limits_B: list[int]):
        self.prompt_length, self.limits_B = prompt_length, torch.tensor(limits_B)

    def __call__(self, tokens_BT, scores, **_):
        return tokens_BT.shape[1] - self.prompt_length >= self.limits_B


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    model = make_model(shape, job["cores"]).eval()
    requests = make_requests(shape, **job["requests"])

    def repeat() -> dict:
        steps = [run(model, requests, start, job["slots"]) for start in starts]
        return {"tokens": requests.num_new_tokens, "row_steps": sum(steps)}

    starts = range(0, len(requests.samples), job["slots"])
    return f"transformers {transformers.__version__}, torch {torch.__version__}", repeat


@torch.inference_mode()
def run(model, requests: Requests, start: int, slots: int) -> int:
    """Generate one batch; returns how many tokens it decoded, those after a limit included."""
    samples = requests.samples[start : start + slots]
    rows = [requests.prompts[prompt] for prompt, _ in samples]
    limits = [limit for _, limit in samples]
    T = max(map(len, rows))
    tokens_BT = torch.tensor([[0] * (T - len(row)) + row for row in rows])
    mask_BT = torch.tensor([[0] * (T - len(row)) + [1] * len(row) for row in rows])
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max(limits),
        eos_token_id=None,
        pad_token_id=0,
    )
    found_BT = model.generate(
        tokens_BT,
        attention_mask=mask_BT,
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([EachAtItsLimit(T, limits)]),
    )
    return len(rows) * (found_BT.shape[1] - T)


if __name__ == "__main__":
    serve(prepare)
