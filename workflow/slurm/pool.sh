#!/usr/bin/env bash
# A whole run inside one allocation on two nodes: Snakemake on the first, and for each mesh a warm
# worker that srun starts where it belongs.
#   sbatch workflow/slurm/pool.sh --configfile configs/disaggregated.yaml
# or, over two partitions,
#   sbatch -N1 -p actor : -N1 -p rollout --gres=gpu:1 workflow/slurm/pool.sh --configfile ...
# from the root of the repository, in the environment in which snakemake runs. Options for sbatch go
# before the script and override those below; what stands behind it is for snakemake. Submit it again
# to go on with a run that did not finish.
#
# Adapt: the partition, GPUs a node, memory and time, and below where each mesh is.
#SBATCH --job-name=meshdial
#SBATCH --partition=gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:INT@120
# The last line: two minutes before its time is over, Snakemake is told to stop, as by Ctrl-C.
set -euo pipefail

if [[ -n ${SLURM_HET_SIZE:-} ]]; then # over two partitions
  first="--het-group=0" second="--het-group=1"
else
  first="--relative=0" second="--relative=1"
fi
# For each mesh of the config, MESHDIAL_SRUN_ and its name: options of the srun that starts its
# worker, among them as many GPUs as the mesh has devices.
export MESHDIAL_SRUN_TRAIN="$first --gres=gpu:1"
export MESHDIAL_SRUN_DECODE="$second --gres=gpu:1"

export PYTHONUNBUFFERED=1
exec snakemake --cores 4 --default-resources "launcher='pool'" "$@"
