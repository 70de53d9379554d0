#!/usr/bin/env bash
# The loop against an engine that is not ours: SkyRL 0.4.0 with its JAX backend, on this machine's CPU.
#
#   benchmarks/foreign_engine.sh [FOLDER]     FOLDER (default: ~/.cache/eval-loop/foreign-engine) keeps the environment
#
# Makes an environment of its own in FOLDER (Python 3.12, 6.7 GB, once), serves the project's small base model from
# there and runs foreign_engine.py: train, checkpoint, evaluate, second round, SIGKILL in the middle, resume, compared
# with a run that nobody killed. The project itself runs in its own environment (.venv, or PYTHON=...).
set -euo pipefail

if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-${EVAL_LOOP_CACHE:-$HOME/.cache/eval-loop}/foreign-engine}
python=${PYTHON:-$root/.venv/bin/python}
engine_packages=("skyrl[tinker,jax]==0.4.0" aiohttp uv)

if ! "$python" -c 'import tinker' 2>/dev/null; then
    echo "error: $python has not the project's packages. Run ./run_demo.sh once, or name another with PYTHON=..." >&2
    exit 2
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
venv="$folder/environment"
if [[ "$(cat "$venv/.installed" 2>/dev/null)" != "${engine_packages[*]}" ]]; then
    python312=${PYTHON312:-python3.12}
    # Run and not only looked up: a version manager may offer the name without the version behind it.
    if ! "$python312" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
        echo "error: SkyRL 0.4.0 needs Python 3.12, and $python312 is none that runs. Install it, or name one with" \
            "PYTHON312=/path/to/python3.12" >&2
        exit 2
    fi
    free_gb=$(( $(df -Pk "$folder" | awk 'NR == 2 {print $4}') / 1024 / 1024 ))
    if (( free_gb < 10 )); then
        echo "error: the environment takes 6.7 GB, 10 GB while it is made, and $folder has $free_gb GB free" >&2
        exit 2
    fi
    echo "Installing ${engine_packages[*]} into $venv (once; some minutes)"
    started=$SECONDS
    rm -rf "$venv"
    "$python312" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "${engine_packages[@]}"
    echo "${engine_packages[*]}" > "$venv/.installed"
    echo "installed in $(( SECONDS - started )) s, $(du -sh "$venv" | cut -f1)"
fi
exec "$python" "$root/benchmarks/foreign_engine.py" "$folder"
