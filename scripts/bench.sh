#!/usr/bin/env bash
# bash scripts/bench.sh [BENCHMARK ...]: runs the benchmarks that take minutes, or those that are named, one after another,
# and makes the tables of the documentation from their results. The machine should do nothing else meanwhile.
# Named alone, since they take an hour or more: accuracy, cards, planner, accumulation, timing, plan_speed.
set -euo pipefail
source "$(dirname "$0")/env.sh"
export OMP_NUM_THREADS=1
minutes=(thousand_ranks creep sequence loading loop saving samplers latentsync_story published variants faults kills probe
    peers batch_finders second_questions titan large_mesh)
[ $# -gt 0 ] || set -- "${minutes[@]}"
for name in "$@"; do
    printf '\n== python -m bench.%s\n' "$name"
    .venv/bin/python -m "bench.$name"
done
.venv/bin/python docs/blocks.py
