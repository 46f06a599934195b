"""Snakemake whose SLURM executor looks every second, where it would wait 10 s longer each time."""

import sys

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

Executor.next_seconds_between_status_checks = property(lambda self: 1, lambda self, value: None)
sys.exit(main())
