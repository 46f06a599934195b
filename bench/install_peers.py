"""Install what the benchmarks compare us with: each family in an environment of its own.

    python bench/install_peers.py              # all of them, into .peers/
    python bench/install_peers.py torch        # transformers, TRL and PyTorch alone
    python bench/install_peers.py tunix --into /somewhere

What a family holds is the extra `bench-...` of pyproject.toml; their versions exclude each other,
which is why no environment has two. llama.cpp is compiled for this machine, which takes minutes.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from alternating import ENVIRONMENTS, extras


def main() -> None:
    families = extras()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"some of {', '.join(families)}")
    parser.add_argument("--into", type=Path, default=ENVIRONMENTS)
    arguments = parser.parse_args()
    for family in arguments.families or families:
        if family not in families:
            sys.exit(f"no family {family!r}, expected some of {', '.join(families)}")
        folder = arguments.into / family
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install"]
        subprocess.run([*pip, *families[family]], check=True)


if __name__ == "__main__":
    main()
