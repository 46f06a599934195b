#!/usr/bin/env bash
# A whole run inside one allocation on one node: Snakemake, and a warm worker for each mesh.
#   sbatch workflow/slurm/colocated.sh --configfile configs/addition.yaml
# from the root of the repository, in the environment in which snakemake runs. Options for sbatch go
# before the script and override those below; what stands behind it is for snakemake. Submit it again
# to go on with a run that did not finish.
#
# Adapt: the partition, as many GPUs as the meshes have devices together, and memory and time.
#SBATCH --job-name=meshdial
#SBATCH --partition=gpu
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:INT@120
# The last line: two minutes before its time is over, Snakemake is told to stop, as by Ctrl-C.
set -euo pipefail

export PYTHONUNBUFFERED=1
exec snakemake --cores "$SLURM_CPUS_PER_TASK" "$@"
