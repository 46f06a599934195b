"""tunix's sampler: left-padded batches, all decoded to the longest of their samples.

A step samples for every row of a batch; what comes after a sample's limit is not counted.
"""

import jax
import tunix
from serving import Repeat, serve
from tunix import CacheConfig, Sampler
from tunix_model import Numbers, make_mesh, make_model
from workload import SHAPES, make_requests


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    mesh = make_mesh()
    requests = make_requests(shape, **job["requests"])
    longest = max(map(len, requests.prompts))
    steps = max(map(max, requests.limits_PG))
    cache = CacheConfig(longest + steps, shape.layers, shape.kv_heads, shape.head_size)
    sampler = Sampler(make_model(shape, mesh), Numbers(), cache)
    texts = [Numbers().decode(requests.prompts[prompt]) for prompt, _ in requests.samples]
    batches = [texts[i : i + job["slots"]] for i in range(0, len(texts), job["slots"])]
    seeds = iter(range(10**9))

    def repeat() -> dict:
        with mesh:
            for batch in batches:
                found = sampler(
                    batch,
                    max_generation_steps=steps,
                    max_prompt_length=longest,
                    return_logprobs=True,
                    eos_tokens=[-1],
                    temperature=1.0,
                    top_p=1.0,
                    seed=next(seeds),
                )
                jax.block_until_ready(found.tokens)
                assert all(len(tokens) == steps for tokens in found.tokens)
        return {"tokens": requests.num_new_tokens, "row_steps": len(texts) * steps}

    return f"tunix {tunix.__version__}, jax {jax.__version__}", repeat


if __name__ == "__main__":
    serve(prepare)
