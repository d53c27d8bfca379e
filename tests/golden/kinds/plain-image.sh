#!/bin/bash
# own, written by slurmddp 0.0.0 (submit --plain) for site leonardo. It runs without slurmddp: sbatch own.sbatch
#SBATCH --job-name=own
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gres=gpu:4
#SBATCH --time=01:00:00
#SBATCH --partition=boost_usr_prod
#SBATCH --account=my_project
#SBATCH --output=%x-%j.log

set -eu # not before: `module` and conda fail with it
cd /home/alice/project
mkdir -p "\$SCRATCH/slurmddp/cache" # for downloads
export SINGULARITYENV_PYTHONPATH='/home/alice/project:/own lib' # for the script's imports
export SINGULARITYENV_PYTHONUNBUFFERED=1 # python: unbuffered logs
export SINGULARITYENV_PYTHONNOUSERSITE=1 # the image's own packages, not those of ~/.local
export SINGULARITYENV_OMP_NUM_THREADS=8 # threads per rank
export SINGULARITYENV_HF_HOME="\$SCRATCH/slurmddp/cache/huggingface" # downloads, outside the home folder
export SINGULARITYENV_WANDB_MODE=offline # the job's own
export APPTAINER_NO_EVAL=1 SINGULARITY_NO_EVAL=1 # a shell in the container does not evaluate the variables' values
export SINGULARITYENV_WANDB_API_KEY="$WANDB_API_KEY"

# srun starts one torchrun per node; they meet on the first node, at a port that follows from the job id.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --ntasks-per-node=1 --cpu-bind=none --cpus-per-task=32 --kill-on-bad-exit=1 \
  singularity exec --nv --pwd /home/alice/project --bind /leonardo:/leonardo:rw --bind /leonardo_scratch:/leonardo_scratch:rw --bind /leonardo_work:/leonardo_work:rw --bind /home/alice/project:/home/alice/project:rw --bind "\$SCRATCH/slurmddp/cache:\$SCRATCH/slurmddp/cache:rw" \
  /images/torch.sif \
  torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=4 \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$((10000 + SLURM_JOB_ID % 20000))" --rdzv-id="$SLURM_JOB_ID" \
  /home/alice/project/src/train.py --lr 3e-4 --text "it's \$HOME"
