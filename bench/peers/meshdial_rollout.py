"""Ours: `generate` with a limit for each sample, and log-probabilities, as always."""

import jax
from meshdial_model import NoText, make_spec
from serving import Repeat, serve
from workload import SHAPES, make_requests

from rl.models.transformer import init_parameters
from rl.rollout.sampler import EngineConfig, generate
from rl.rollout.sampling import SamplingConfig


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    spec = make_spec(shape)
    parameters = jax.block_until_ready(init_parameters(spec.config, 0))
    requests = make_requests(shape, **job["requests"])
    sampling = SamplingConfig(max_tokens=max(map(max, requests.limits_PG)))
    engine = EngineConfig(max_rows=job["slots"], backend=job["backend"])
    numbers = range(len(requests.prompts))
    iterations = iter(range(10**9))

    def repeat() -> dict:
        figures: dict = {}
        groups = generate(
            spec,
            parameters,
            {},
            NoText(),
            requests.prompts,
            (0, next(iterations), numbers),
            len(requests.limits_PG[0]),
            sampling,
            engine,
            figures=figures,
            limits_PG=requests.limits_PG,
        )
        lengths = [[len(completion.tokens) for completion in group] for group in groups]
        assert lengths == requests.limits_PG
        return figures | {"tokens": requests.num_new_tokens}

    return f"jax {jax.__version__}", repeat


if __name__ == "__main__":
    serve(prepare)
