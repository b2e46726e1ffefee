#!/usr/bin/env bash
# Measure with several machines: one job per share, then one plan. The shares need a common file system.
#
#   examples/cluster.sh MODEL SIZE SHARES [flags of kl-lens measure]
#
# With Slurm, a job array measures; without, the shares run one after the other here.
# LIMIT=4 uses that many windows of text everywhere else, to try it.
set -euo pipefail
model=${1:?usage: cluster.sh MODEL SIZE SHARES [flags of kl-lens measure]} size=${2:?} shares=${3:?}
shift 3
run=runs/cluster

# Once, before the array: GPTQ and importance matrices learn from the same statistics in every share.
kl-lens calibrate "$model" --run "$run" ${LIMIT:+--windows "$LIMIT"}

measure=(kl-lens measure "$model" --run "$run" --target gguf "$@")
if command -v sbatch >/dev/null; then
  sbatch --wait --array="1-$shares" --gres=gpu:1 --job-name=kl-lens --wrap "$(printf '%q ' "${measure[@]}") --shard \$SLURM_ARRAY_TASK_ID/$shares"
else
  for share in $(seq "$shares"); do "${measure[@]}" --shard "$share/$shares"; done
fi
kl-lens merge "$run"

kl-lens plan --run "$run" --target gguf --max-bytes "$size" --name best --rivals --verify ${LIMIT:+--held-out-windows "$LIMIT"}
kl-lens export --run "$run" --target gguf --plan best
kl-lens evaluate --run "$run" --plan best --target gguf ${LIMIT:+--windows "$LIMIT"}
kl-lens report --run "$run"
