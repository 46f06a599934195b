"""Rollouts beside other engines, in one run: tokens per CPU-second, and how many times ours is.

    python bench/install_peers.py                  # once; a family at a time is possible
    python bench/rollout.py --shape a
    python bench/rollout.py --shape b --requests 64
    python bench/rollout.py --shape a --cores 2    # wall clock is in brackets

Prompts of 64 to 128 tokens, 8 samples of each, lengths min(128, geometric of mean 48) fixed by a
seed, end-of-text ignored, at most 64 samples at once, float32, temperature 1. Shape a has 5 M
parameters, b those of SmolLM2-135M; all weights are random. All but transformers' static batches
return log-probabilities. By how many CPU-seconds the first run took longer, compiling, is a column
of its own.
"""

import alternating
import limits
from alternating import Contender
from workload import SHAPES, make_requests

CONTENDERS = (
    Contender("meshdial-kernel", "meshdial_rollout", options={"backend": "cpu"}),
    Contender("meshdial-xla", "meshdial_rollout", options={"backend": "xla"}),
    Contender("transformers", "transformers_static", "torch"),
    Contender("transformers-continuous", "transformers_continuous", "torch"),
    Contender("llama.cpp", "llamacpp_rollout", "llamacpp", {"flash_attention": -1}),
    Contender("llama.cpp-no-flash", "llamacpp_rollout", "llamacpp", {"flash_attention": 0}),
    Contender("tunix", "tunix_rollout", "tunix"),
)


def main() -> None:
    parser = alternating.parser(__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="a")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64, help="most samples at once")
    parser.add_argument("--max-new", type=int, default=128)
    arguments = parser.parse_args()
    cores = alternating.pin(arguments)
    given = {"num_requests": arguments.requests, "max_new": arguments.max_new}
    job = {"shape": arguments.shape, "slots": arguments.slots, "requests": given}
    contenders = alternating.chosen(CONTENDERS, arguments.contenders)
    workers = alternating.take_turns(contenders, job, arguments)
    shape = SHAPES[arguments.shape]
    requests = make_requests(shape, **given)
    print(
        f"\nshape {arguments.shape}, {len(requests.samples)} requests, "
        f"{requests.num_new_tokens} tokens, {len(cores)} core(s)\n"
    )
    print("\n".join(alternating.table(workers)))
    machine = limits.measure(len(cores))
    flops = shape.flops_per_token(requests.mean_context)
    print("\n" + "\n".join(limits.share_lines(workers, flops, machine["flops"], len(cores))))
    alternating.write(arguments.json, workers, job=job, cores=cores, machine=machine)


if __name__ == "__main__":
    main()
