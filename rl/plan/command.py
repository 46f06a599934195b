"""`meshdial plan`: its arguments. What it takes to plan is imported when it runs."""

import argparse
import json
from pathlib import Path

DESCRIPTION = """\
Print what a run will cost, from its config and its model's sizes alone: bytes per device and
whether they fit, the bytes and seconds of a sync, the seconds of each stage at the bound of the
device, and of an iteration, under the config's dial and under others. No weight is read and no
device is touched, so that it works for models that fit no machine here."""
EPILOG = """\
devices: H100, H200, A100-40, A100-80, L40S, RTX4090, TPU-v5e, TPU-v5p, TPU-v6e, CPU-core
examples:
  meshdial plan --configfile configs/addition.yaml --device CPU-core
  meshdial plan --configfile mine.yaml --model llama-70b/config.json --device H100 --devices 64
  meshdial plan --configfile mine.yaml --link nvme=3.5 --sync-over infiniband-ndr
  meshdial plan --configfile mine.yaml --measured results/mine"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--configfile", required=True, type=Path, help="the run's config, or a sweep's")
    add("--run", help="which run of a sweep; the first by default")
    add("--model", help="config.json, or a folder with one, in place of the config's model")
    add("--device", help="a device by name (default: H100)")
    add("--flops", type=float, metavar="TFLOP/S", help="of one device, in place of its own")
    add("--bandwidth", type=float, metavar="GB/S", help="of its memory, likewise")
    add("--memory", type=float, metavar="GB", help="of one device, likewise")
    add("--inside", type=float, metavar="GB/S", help="between the devices of a mesh, likewise")
    add("--link", action="append", default=[], metavar="NAME=GB/S", help="set or add a link")
    add("--sync-over", default="nvme", metavar="LINK", help="from mesh to mesh (default: nvme)")
    add("--disk", default="nvme", metavar="LINK", help="of exports and checkpoints")
    add("--devices", type=int, metavar="N", help="of the alternatives; as many as today by default")
    add("--prompt-tokens", type=int, metavar="N", help="length of a prompt")
    add("--completion-tokens", type=int, metavar="N", help="of a completion; rollout.max_tokens")
    add("--measured", type=Path, metavar="RUN", help="a run's results, to compare with")
    add("--json", action="store_true", help="print JSON, in bytes and seconds")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; MeshdialError for what cannot be planned."""
    from rl.plan.planning import plan_of
    from rl.plan.report import report
    from rl.plan.table import text

    found = report(plan_of(arguments))
    print(json.dumps(found, indent=2, sort_keys=True) if arguments.json else text(found))
    return 0
