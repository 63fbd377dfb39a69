#!/usr/bin/env bash
# bash scripts/test.sh [pytest arguments]: makes the environment, then checks style, types, layers and runs the tests.
set -euo pipefail
source "$(dirname "$0")/env.sh"
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/lint-imports
.venv/bin/python -m pytest -n 2 -m 'not slow' "$@"
