#!/bin/bash
# A run over the nodes of a Slurm job: Ray on every node, the run on the first. From a checkout on a file system that all nodes see:
#
#   sbatch --nodes=4 --gpus-per-node=8 deploy/slurm.sh --exp=aime_1p5b launch.trainer_hosts=1 launch.trainer_devices=8 \
#       launch.rollout_engines=24 launch.reward_workers=4
#
# The environment in $VENV (default: .venv, with `pip install -e ".[gpu,ray]"`) must be there on every node too.
# After a crash of the job: sbatch ... deploy/slurm.sh --resume=runs/NAME ...
#SBATCH --job-name=areal_jax
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

export PATH="$PWD/${VENV:-.venv}/bin:$PATH" RAY_USAGE_STATS_ENABLED=0
# Whoever reaches the cluster can run code in it: only who knows the token, which the job's processes get by their environment.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):6379

# The job's log holds what the first node says; each other node, which ends a minute after the run, writes a log of its own.
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" bash -c '
    [ "$SLURM_NODEID" = 0 ] || exec >"$SLURM_JOB_NAME-$SLURM_JOB_ID-$SLURMD_NODENAME.log" 2>&1
    exec "$@"' - \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    areal-train launch=ray launch.address="$address" "$@"
