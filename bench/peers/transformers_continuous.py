"""Hugging Face's continuous batching: a paged cache, a request in as soon as another is out."""

import torch
import transformers
from serving import Repeat, serve
from torch_model import make_model
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from workload import SHAPES, make_requests


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    model = make_model(shape, job["cores"]).eval()
    requests = make_requests(shape, **job["requests"])
    sampling = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=128,
        eos_token_id=-1,
        pad_token_id=0,
    )
    batching = ContinuousBatchingConfig(
        page_size=16,
        num_blocks=2048,
        max_batch_tokens=512,
        max_requests_per_batch=job["slots"],
        use_cuda_graph=False,
        max_memory_percent=0.3,
        return_logprobs=True,
    )
    settings = {"generation_config": sampling, "continuous_batching_config": batching}

    def repeat() -> dict:
        with model.continuous_batching_context_manager(**settings) as manager:
            for prompt, limit in requests.samples:
                manager.add_request(requests.prompts[prompt], max_new_tokens=limit)
            num_tokens = num_ended = 0
            while num_ended < len(requests.samples):
                result = manager.get_result(timeout=5)
                if result is not None and result.is_finished():
                    num_ended += 1
                    num_tokens += len(result.generated_tokens)
        assert num_tokens == requests.num_new_tokens, (num_tokens, requests.num_new_tokens)
        return {"tokens": num_tokens}

    return f"transformers {transformers.__version__}, torch {torch.__version__}", repeat


if __name__ == "__main__":
    serve(prepare)
