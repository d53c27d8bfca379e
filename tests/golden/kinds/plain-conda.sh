#!/bin/bash
# own, written by slurmddp 0.0.0 (submit --plain) for site generic. It runs without slurmddp: sbatch own.sbatch
#SBATCH --job-name=own
#SBATCH --nodes=2-4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=01:00:00
#SBATCH --partition=gpu
#SBATCH --output=%x-%j.log

type module >/dev/null 2>&1 || source /etc/profile # a batch shell may lack `module`
module load cuda || exit
conda activate gpt || exit
set -eu # not before: `module` and conda fail with it
cd /home/alice/project
export PYTHONUNBUFFERED=1 # python: unbuffered logs
export OMP_NUM_THREADS=8 # threads per rank

# srun starts one torchrun per node; they meet on the first node, at a port that follows from the job id.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --ntasks-per-node=1 --cpu-bind=none --cpus-per-task=32 --kill-on-bad-exit=1 \
  torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=4 \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$((10000 + SLURM_JOB_ID % 20000))" --rdzv-id="$SLURM_JOB_ID" \
  -m pkg.train
