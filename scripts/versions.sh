#!/usr/bin/env bash
# bash scripts/versions.sh [VERSION[@PYTHON]]...: runs the tests of bench/versions.py with each version of torch.
#
# One environment at a time, removed afterwards: a CUDA build takes 7 to 8 GB of disk and 3 to 5 minutes to install,
# and its tests 4 to 8 minutes on two cores. The newest transformers, diffusers, accelerate, lightning and DeepSpeed that
# go with the version are installed beside it. Results: bench/results/versions.json and the table in docs/versions.md.
#
# VERSION is an exact release. "==2.13.0" takes what pip prefers (a CPU build where one is offered), "===2.13.0" the
# build without a local version (on Linux: CUDA). Without arguments: every minor version that memfit supports.
#
#   TESTS=none         runs the self-test, the checks of libraries and the comparison of bytes alone: 3 minutes a version.
#   TESTS=folders      runs the folders of device, trace, replay, apply and planner whole: 10 to 25 minutes a version.
#   TESTS=again        runs the tests that failed in the committed results of the version, keeps their other
#                      counts, and checks the libraries again.
#   ENVIRONMENTS=DIR   where environments are made (default: a temporary folder). One that is there is used, and kept.
#   PARTS=DIR          where each version's part is written (default: a temporary folder).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
environments=${ENVIRONMENTS:-$(mktemp -d)}
parts=${PARTS:-$(mktemp -d)}
tests=${TESTS:-subset}
mkdir -p "$environments" "$parts"
[ $# -gt 0 ] || set -- ==2.6.0 ==2.7.1 ==2.8.0 ==2.9.1 ==2.10.0 ==2.11.0 ==2.12.1 ==2.13.0 ===2.13.0 ==2.14.1 ==2.15.0

for asked in "$@"; do
    version=${asked%@*}
    python=python3
    [ "$version" = "$asked" ] || python=${asked#*@}
    name=torch${version//[^0-9.=]/}-$("$python" -c 'import platform; print(platform.python_version())')
    folder=$environments/${name//=/_}
    kept=yes
    if [ ! -x "$folder/bin/python" ]; then
        kept=no
        "$python" -m venv "$folder"
        "$folder/bin/pip" install -q "torch$version"
        "$folder/bin/pip" install -q "torch$version" setuptools wheel numpy scipy click rich safetensors tomli-w nvidia-ml-py \
            psutil msgspec jinja2 plotly pytest pytest-xdist hypothesis transformers diffusers accelerate lightning peft pillow \
            soundfile torchdata "tomli; python_version < '3.11'"
        DS_BUILD_OPS=0 "$folder/bin/pip" install -q --no-build-isolation "torch$version" deepspeed ||
            echo "torch$version: no DeepSpeed" >&2
    fi
    echo "torch$version: $(du -sh "$folder" | cut -f1)"
    XDG_CACHE_HOME=$folder/cache "$folder/bin/python" bench/versions.py --measure "$parts/${name//=/_}.json" --tests "$tests" ||
        echo "torch$version: no result" >&2
    [ "$kept" = yes ] || rm -rf "$folder"
done
python3 bench/versions.py --collect "$parts"
