#!/usr/bin/env bash
# From a workstation to a small board: measure here, ship one GGUF, time it there.
#
#   BOARD=pi@raspberrypi.local examples/board.sh MODEL SIZE [flags of kl-lens run]
#
# Without BOARD, this machine is the board. To time files, the board needs pip install 'kl-lens[gguf]' (1.7 GB). To
# use them, 270 MB without PyTorch are enough, and `generate` prints its speed too:
#   pip install --no-deps kl-lens && pip install numpy gguf xllamacpp psutil rich PyYAML
# xllamacpp's ARM wheel is slow; set LLAMA_CPP_LIB on the board to a llama.cpp built there (docs/targets.md).
set -euo pipefail
model=${1:?usage: board.sh MODEL SIZE [flags of kl-lens run]} size=${2:?a size such as 90MB}
shift 2
run=runs/board-$size there=kl-lens-board

on_board() { if [ -n "${BOARD:-}" ]; then ssh "$BOARD" "$(printf '%q ' "$@")"; else "$@"; fi; }
ship() { if [ -n "${BOARD:-}" ]; then scp -q "$@" "$BOARD:$there/"; else cp "$@" "$there/"; fi; }

# Here: the best file of that size, judged on test text. Speeds of this machine say nothing about the board.
kl-lens run "$model" --run "$run" --target gguf --max-bytes "$size" --without benchmark "$@"

on_board mkdir -p "$there"
ship "$run"/artifacts/gguf/recommended-gguf-*/*.gguf "$run"/artifacts/gguf/uniform_fp16/*.gguf

# There: the file beside FP16, then some text.
best=$(basename "$run"/artifacts/gguf/recommended-gguf-*/*.gguf) whole=$(basename "$run"/artifacts/gguf/uniform_fp16/*.gguf)
on_board kl-lens benchmark "$there/$best" "$there/$whole" --repeats 3 --prompt-lengths 32 --new-tokens 32
on_board kl-lens generate "$there/$best" --prompt "The history of the city" --max-new-tokens 20
