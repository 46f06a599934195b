"""A whole iteration of GRPO beside other trainers: rollouts, rewards, advantages and the update.

    python bench/install_peers.py torch tunix     # once
    python bench/grpo.py --shape a                # 8 prompts of 64 tokens x 8 samples x 64 new ones

Each trainer's own loop in one process, colocated, float32, full fine-tuning by AdamW, no KL, random
weights, the same reward. Ours runs the functions of the stages on one another's results: the files
between the stages and the workflow, `bench/iteration.py`, are left out.
"""

import alternating
from alternating import Contender
from workload import GROUP_SIZE, SHAPES

CONTENDERS = (
    Contender("meshdial", "meshdial_grpo"),
    Contender("trl", "trl_grpo", "torch"),
    Contender("tunix", "tunix_grpo", "tunix"),
)


def main() -> None:
    parser = alternating.parser(__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="a")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--slots", type=int, default=64, help="of ours")
    parser.add_argument("--backend", default="auto", help="of ours")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of ours")
    arguments = parser.parse_args()
    cores = alternating.pin(arguments)
    lengths = (arguments.prompt_length, arguments.prompt_length)
    job = {
        "shape": arguments.shape,
        "requests": {"num_requests": arguments.prompts * GROUP_SIZE, "prompt_lengths": lengths},
        "group_size": GROUP_SIZE,
        "max_new": arguments.max_new,
        "slots": arguments.slots,
        "backend": arguments.backend,
        "micro_batch_tokens": arguments.micro_batch_tokens,
    }
    contenders = alternating.chosen(CONTENDERS, arguments.contenders)
    workers = alternating.take_turns(contenders, job, arguments)
    size = f"{arguments.prompts} x {GROUP_SIZE} x {arguments.max_new}"
    print(f"\nshape {arguments.shape}, {size} new tokens an iteration, {len(cores)} core(s)\n")
    print("\n".join(alternating.table(workers)))
    alternating.write(arguments.json, workers, job=job, cores=cores)


if __name__ == "__main__":
    main()
