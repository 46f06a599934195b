"""PyTorch: padded rows in one backward pass, logits of completion tokens only, fused AdamW."""

import torch
from serving import Repeat, serve
from torch_model import make_model
from workload import SHAPES, Batch, make_batch


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    model = make_model(shape, job["cores"]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    batch = make_batch(shape, **job["batch"])
    rows = padded(batch)
    loss_of = torch.compile(clipped_ratio_loss) if job.get("compile") else clipped_ratio_loss

    def repeat() -> dict:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, *rows)
        loss.backward()
        optimizer.step()
        return {"tokens": batch.num_trained_tokens, "loss": loss.item()}

    return f"torch {torch.__version__}", repeat


def padded(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens_BT, trained_BT of the completion tokens, advantages_B); prompts are of one length."""
    T = max(len(prompt) + len(completion) for prompt, completion, _ in batch.rows)
    num_prompt = len(batch.prompts[0])
    tokens, trained = [], []
    for prompt, completion, _ in batch.rows:
        padding = [0] * (T - len(prompt) - len(completion))
        tokens.append(prompt + completion + padding)
        trained.append([1.0] * len(completion) + [0.0] * len(padding))
        assert len(prompt) == num_prompt
    advantages = torch.tensor([advantage for *_, advantage in batch.rows])
    return torch.tensor(tokens), torch.tensor(trained), advantages


def clipped_ratio_loss(model, tokens_BT, trained_BT, advantages_B) -> torch.Tensor:
    """PPO's loss (arXiv:1707.06347) at its own policy, averaged over tokens. Rows are padded on
    the right, so causal attention needs no mask."""
    num_kept = trained_BT.shape[1] + 1
    logits_BTV = model(tokens_BT, use_cache=False, logits_to_keep=num_kept).logits[:, :-1]
    targets_BT = tokens_BT[:, 1 - num_kept :]
    logprobs_BT = -torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
    ).view_as(targets_BT)
    ratio_BT = torch.exp(logprobs_BT - logprobs_BT.detach())
    advantages_BT = advantages_B[:, None]
    clipped_BT = ratio_BT.clamp(0.8, 1.2) * advantages_BT
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, clipped_BT)
    return (loss_BT * trained_BT).sum() / trained_BT.sum()


if __name__ == "__main__":
    serve(prepare)
