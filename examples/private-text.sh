#!/usr/bin/env bash
# Calibrate on text that must not leave this machine.
#
#   examples/private-text.sh MODEL CALIBRATION.txt HELD-OUT.txt TEST.txt [flags of kl-lens run]
#
# The three texts must not overlap. The run folder keeps their names, sizes and hashes, not their words; the samples
# of text in the report continue public prompts.
set -euo pipefail
model=${1:?usage: private-text.sh MODEL CALIBRATION HELD-OUT TEST} text=${2:?} held_out=${3:?} test=${4:?}
shift 4
export HF_HUB_OFFLINE=1  # nothing is asked of the hub, not even for the model

kl-lens run "$model" --run runs/private --target gguf \
  --text "$text" --held-out "$held_out" --evaluation-text "$test" --without benchmark "$@"

# Does the choice of text matter? The same ranking, calibrated on public text.
kl-lens paper --run runs/private --evaluation-text "$test" --evaluation-windows 2 --other-text wikitext2:train
