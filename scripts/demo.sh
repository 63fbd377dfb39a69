#!/usr/bin/env bash
# bash scripts/demo.sh: predicts F5-TTS Base for a 24 GB card, then plans and trains a narrower F5-TTS on this machine.
# The speech is made on the spot by espeak-ng, which the PyPI package espeakng-loader ships. Under 10 minutes on 2 cores.
set -euo pipefail
source "$(dirname "$0")/env.sh"
out=${MEMFIT_DEMO_OUT:-out/demo}
rm -rf "$out" && mkdir -p "$out"
memfit=.venv/bin/memfit
narrow=(f5_tts/tiny --set dim=256 --set depth=6 --set windows=16)
budget=256MiB
batch=6000

say() { printf '\n== %s\n' "$*"; }

say "Does F5-TTS Base train 3200 frames on a 24 GB card? (predicted here, without the card)"
"$memfit" predict f5_tts/base --device rtx4090 --micro-batch 3200

say "A narrower F5-TTS (the same code, 256 wide, 6 blocks) on this machine: $batch frames at once in $budget"
"$memfit" predict "${narrow[@]}" --micro-batch "$batch" --memory "$budget" || [ $? -eq 3 ]

say "The same global batch, planned into $budget"
"$memfit" plan "${narrow[@]}" --global-batch "$batch" --memory "$budget" --out "$out/plan.toml"

say "Trained on speech made by espeak-ng, in a process that cannot take more than $budget"
"$memfit" run "$out/plan.toml" --out "$out/run"

say "The same as one HTML file"
"$memfit" report "$out/run"
