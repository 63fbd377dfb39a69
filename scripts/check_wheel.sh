#!/usr/bin/env bash
# bash scripts/check_wheel.sh WHEEL: installs a wheel without extras into an empty environment and runs every main verb.
#
# PYTHON: the interpreter. TORCH: what pip installs first, with options (default: torch). ENVIRONMENT: an environment
# that is there and is used as it is. Needs about 1 GB of disk with a CPU build of torch, 5 GB with a CUDA build.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
wheel=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
environment=${ENVIRONMENT:-$work/environment}
if [ -z "${ENVIRONMENT:-}" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    # shellcheck disable=SC2086
    "$environment/bin/pip" install --quiet ${TORCH:-torch}
fi
"$environment/bin/pip" install --quiet --force-reinstall --no-deps "$wheel"
"$environment/bin/pip" install --quiet "$wheel"
"$environment/bin/pip" check
cp "$root/examples/gan.py" "$work/job.py"
cat > "$work/data.py" <<'PYTHON'
from torch.utils.data import DataLoader, DistributedSampler


def loader(rank, world):
    samples = list(range(64))
    return DataLoader(samples, batch_size=4, sampler=DistributedSampler(samples, world, rank))
PYTHON
cd "$work"
export XDG_CACHE_HOME=$work/cache OMP_NUM_THREADS=1
unset PYTHONPATH

runs() { # runs CODE ARGUMENTS...: memfit ends with this code, and without a traceback
    local want=$1 code=0
    shift
    echo "memfit $*"
    "$environment/bin/memfit" "$@" > out.txt 2> err.txt || code=$?
    if [ "$code" != "$want" ] || grep -q Traceback err.txt; then
        echo "exit code $code, not $want:" >&2
        cat out.txt err.txt >&2
        exit 1
    fi
}

says() { # says TEXT: the last command wrote it
    grep -qF -- "$1" out.txt err.txt || { echo "nothing says $1:" >&2; cat out.txt err.txt >&2; exit 1; }
}

runs 0 --version
says "memfit $("$environment/bin/python" -c 'import importlib.metadata as m; print(m.version("memfit"))')"
runs 0 doctor --json
runs 0 devices
says rtx4090
runs 0 jobs
says gpt_sovits/s2
runs 2 predict gpt_sovits/tiny --device rtx4090
says "pip install 'memfit[jobs]'"
runs 0 predict job.py:Waves --device rtx4090 --micro-batch 64
runs 2 predict job.py:Waves --device rtx4090 --engine zero2 --world 2
says "pip install 'memfit[deepspeed]'"
runs 2 plan job.py:Waves --device rtx4090 --global-batch 64 --devices 2 --engine zero2
says "pip install 'memfit[deepspeed]'"
runs 0 plan job.py:Waves --memory 400MiB --global-batch 32 --micro-batch 16 --out plan.toml
runs 0 run plan.toml --out RUN --windows 3
runs 0 report RUN --out report.html
test -s report.html
runs 0 verify job.py:Waves --world-sizes 1,2 --windows 1
runs 0 audit data.py:loader --world-sizes 1,2
"$environment/bin/python" -m memfit --help > /dev/null
_MEMFIT_COMPLETE=bash_source "$environment/bin/memfit" | grep -q _memfit_completion
echo "the wheel works without extras"
