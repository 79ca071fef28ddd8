#!/bin/sh
# Checks and benchmarks on a machine with a CUDA device: tools/gpu.sh [FOLDER] [PART...], parts being tests, step and offline (default: all).
# Needs no environment of its own: PYTHON=python3 tools/gpu.sh results uses what that python has. Every part is run, whatever became of the
# one before; the exit code is 0 when all of them succeeded.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=${1:-docs/results}
[ $# -gt 0 ] && shift
[ $# -eq 0 ] && set -- tests step offline
for part in "$@"; do
    case $part in
        tests | step | offline) ;;
        *) echo "tools/gpu.sh: there is no part $part; there are tests, step and offline" >&2; exit 2 ;;
    esac
done
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH

"$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || {
    echo "tools/gpu.sh: torch finds no CUDA device with $python" >&2
    exit 1
}
gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name().lower().replace(" ", "-"))') || exit 1
mkdir -p "$folder"
failed=

run() { # NAME COMMAND...: what it prints is shown, and kept in NAME.txt
    name=$1
    shift
    echo "== $name: $*"
    { "$@" 2>&1; echo $? >"$folder/$gpu-$name.code"; } | tee "$folder/$gpu-$name.txt"
    [ "$(cat "$folder/$gpu-$name.code")" = 0 ] || failed="$failed $name"
    rm "$folder/$gpu-$name.code"
}

bench() { # NAME ARGUMENT...: figures to NAME.json
    name=$1
    shift
    run "$name" "$python" -m aengine.bench.cli "$@" --json "$folder/$gpu-$name.json"
}

for part in "$@"; do
    case $part in
        tests) run tests "$python" -m pytest -m gpu -rsfE -p no:cacheprovider --continue-on-collection-errors --durations=20 tests ;;
        step) bench step step --device cuda --shape qwen3-0.6b --shape qwen3-8b --shape llama-3.1-8b ;;
        offline)
            bench offline-qwen3-0.6b offline --device cuda --shape qwen3-0.6b --workload nano
            bench offline-qwen3-8b offline --device cuda --shape qwen3-8b --workload nano
            ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
