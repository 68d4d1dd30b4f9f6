# Sourced by the run_*.sh scripts: how they start a run.
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$([ -x "$ROOT/.venv/bin/python" ] && echo "$ROOT/.venv/bin/python" || command -v python3)}
DRY_RUN=${DRY_RUN:-0}   # 1 prints command, configuration and reshard plan, and stops; needs no GPU, no Ray, no weights
SUBMIT=${SUBMIT:-0}     # 1 submits the run to the cluster at RAY_ADDRESS as a Ray job, instead of being its driver
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# train RECIPE key=value ...: relative paths in the words are the caller's.
train() {
    local flags=()
    if [ "$DRY_RUN" = 1 ]; then flags+=(--dry-run); fi
    if [ "$SUBMIT" = 1 ] && [ "$DRY_RUN" != 1 ]; then flags+=(--submit); fi
    exec "$PYTHON" -m megaverl train "$ROOT/configs/yaml/$1.yaml" "${@:2}" "${flags[@]}"
}
