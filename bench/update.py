"""Updates beside other trainers, in one run: trained tokens per CPU-second, ours against theirs.

    python bench/install_peers.py torch tunix          # once
    python bench/update.py --shape a                    # 32 rows of 192 tokens, nothing to pack
    python bench/update.py --shape b                    # 4 rows of 192
    python bench/update.py --shape a --batch groups     # 8 groups of 8, geometric lengths
    python bench/update.py --shape a --compile          # and torch.compile

The same clipped-ratio loss, AdamW, full fine-tuning in float32, random weights. `rows`: each row is
a prompt of one token and a completion of 191, all as long: no prompt is shared and nothing is
padded. `groups`: prompts of 64 tokens, completions of min(128, geometric of mean 48): PyTorch and
tunix pad rows to the longest and compute each prompt once a completion, ours packs.
"""

import alternating
import limits
from alternating import Contender
from workload import SHAPES, Batch, make_batch

CONTENDERS = (
    Contender("meshdial", "meshdial_update"),
    Contender("torch", "torch_update", "torch"),
    Contender("torch-compile", "torch_update", "torch", {"compile": True}),
    Contender("tunix", "tunix_update", "tunix"),
)
ROWS = {"tiny": 4, "a": 32, "b": 4}
GROUPS = {"tiny": 2, "a": 8, "b": 2}


def main() -> None:
    parser = alternating.parser(__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="a")
    parser.add_argument("--batch", choices=["rows", "groups"], default="rows")
    parser.add_argument("--number", type=int, help="of rows or groups")
    parser.add_argument("--micro-batch-tokens", type=int, default=2048, help="of ours")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which is slow")
    arguments = parser.parse_args()
    cores = alternating.pin(arguments)
    given = shape_of_batch(arguments)
    micro = arguments.micro_batch_tokens
    job = {"shape": arguments.shape, "batch": given, "micro_batch_tokens": micro}
    contenders = alternating.chosen(CONTENDERS, arguments.contenders)
    if not arguments.compile and not arguments.contenders:
        contenders = [contender for contender in contenders if "compile" not in contender.options]
    workers = alternating.take_turns(contenders, job, arguments)
    shape = SHAPES[arguments.shape]
    batch = make_batch(shape, **given)
    print(f"\nshape {arguments.shape}, {told(batch)}, {len(cores)} core(s)\n")
    print("\n".join(alternating.table(workers)))
    machine = limits.measure(len(cores))
    flops = batch.flops(shape) / batch.num_trained_tokens
    print("\n" + "\n".join(limits.share_lines(workers, flops, machine["flops"], len(cores))))
    alternating.write(arguments.json, workers, job=job, cores=cores, machine=machine)


def shape_of_batch(arguments) -> dict:
    """What `make_batch` is given."""
    if arguments.batch == "rows":
        number = arguments.number or ROWS[arguments.shape]
        return {"num_groups": number, "group_size": 1, "prompt_length": 1, "lengths": (191, 191)}
    number = arguments.number or GROUPS[arguments.shape]
    return {"num_groups": number, "group_size": 8, "prompt_length": 64, "lengths": (48, 128)}


def told(batch: Batch) -> str:
    groups, size = len(batch.prompts), len(batch.completions_PG[0])
    return f"{groups} x {size} completions, {batch.num_trained_tokens} trained tokens"


if __name__ == "__main__":
    main()
