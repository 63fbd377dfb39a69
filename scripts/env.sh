# Sourced by the other scripts: makes .venv at the project's root, once for each state of the dependency files.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "the development environment (constraints.txt) needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
want=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/.memfit-env 2>/dev/null)" != "$want" ]; then
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation \
        -e '.[jobs,deepspeed,lightning,accelerate,tensorboard,wandb,docs,dev]'
    echo "$want" > .venv/.memfit-env
fi
# Each process would compile these again where PYTHONDONTWRITEBYTECODE is set; pip compiles what it installs.
.venv/bin/python -m compileall -q -j 2 memfit testing bench
