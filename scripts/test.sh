#!/usr/bin/env bash
# bash scripts/test.sh [pytest arguments]: makes the environment, then checks style, types, layers and docs, and runs the tests.
set -euo pipefail
source "$(dirname "$0")/env.sh"
if ! command -v chromedriver >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 ||
        echo "chromium could not be installed: the tests of reports in a browser are skipped" >&2
fi
.venv/bin/python -c "from bench.accuracy import install_timm; install_timm()"
.venv/bin/ruff check .
.venv/bin/lint-imports
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet
# Types take over a minute of one core without a cache, so they are checked beside the tests.
types=$(mktemp)
.venv/bin/mypy >"$types" 2>&1 &
checks_types=$!
trap 'kill "$checks_types" 2>/dev/null || true; rm -f "$types"' EXIT
# A test that hangs for 10 minutes ends its worker, which names it and shows where each of its threads waits.
.venv/bin/python -m pytest -n 2 --dist loadfile --max-worker-restart 2 -rs -m 'not slow' \
    -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true "$@" && tested=0 || tested=$?
if ! wait "$checks_types"; then
    cat "$types" >&2
    exit 1
fi
exit "$tested"
