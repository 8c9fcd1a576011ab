#!/usr/bin/env bash
# What a machine with a GPU is asked, part by part: tests of the kernels there, their bench, steps of whole models, and
# transfers between two processes. A part that fails does not stop the next, and each writes into the folder given.
set -uo pipefail

usage() {
    cat <<'END'
usage: kernels/gpu_session.sh FOLDER PART...      (from anywhere; exit code 1 when a part failed)
       kernels/gpu_session.sh wheels FOLDER       (where packages can be had)

parts, and the seconds after which each is stopped:
  tests      270  tests/kernels/triton on the GPU
  quick      150  the bench: all checks, few cases
  bench      540  the bench whole; it ends by itself after some eight minutes
  model      330  whole-model steps of random-weight models of real shapes, with graphs and without: 110 each
  transfer   250  NIXL between two processes on one GPU: its tests; giver idle, then computing, without and with MPS

Three calls of less than ten minutes each, none of which leaves more than eight files:
  kernels/gpu_session.sh FOLDER tests quick
  kernels/gpu_session.sh FOLDER bench
  kernels/gpu_session.sh FOLDER model transfer

Needed there: python3 with torch for CUDA, its Triton, numpy, pytest and pytest-xdist; for `model` also llguidance, safetensors and
tokenizers; for `transfer` nixl-cu13. What is missing can come as wheels, in .whl/ of the repository (which git ignores)
or in WHEELS; they are unpacked first. `wheels FOLDER` downloads llguidance and nixl-cu13 for Python 3.12 on x86-64: 59
MiB, nearly all of it nixl-cu13. Where that is too much for one call, let each carry what its parts need: `model` only
llguidance, `transfer` only nixl-cu13, all others nothing.

PYTHON (python3), WHEELS (.whl), SHAPES (llama-3.1-8b qwen3-8b llama-3.2-1b), PYTEST_WORKERS (6) may be set.
SESSION_DEVICE=cpu runs quick, model and transfer at toy sizes without a GPU, to see that they run.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
device=${SESSION_DEVICE:-cuda}
failed=0

# part LOG SECONDS COMMAND...: all that it prints is added to LOG.log, the end of it goes to the terminal too.
part() {
    local log=$out/$1.log limit=$2 began=$SECONDS code=0
    shift 2
    echo "== $*" >>"$log"
    timeout -k 10 "$limit" "$@" >>"$log" 2>&1 || code=$?
    tail -n 30 "$log"
    echo "== exit code $code after $((SECONDS - began)) s" | tee -a "$log"
    [ "$code" = 0 ] || failed=1
}

wheels() {
    local tags=() tag
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do tags+=(--platform "${tag}_x86_64"); done
    "$python" -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${tags[@]}" \
        --dest "$1" llguidance==1.6.1 nixl-cu13==1.5.1
}

unpack() {
    local found=("${WHEELS:-$root/.whl}"/*.whl)
    [ -e "${found[0]}" ] || return 0
    local site
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "${found[@]}" &&
        export PYTHONPATH=$PYTHONPATH:$site
}

# Without the configuration of pytest, whose plugins may be missing, and without the conftest of all tests, which needs
# what only servers need.
tests() {
    part tests 270 "$python" -m pytest -c /dev/null --rootdir . --confcutdir tests/kernels/triton -p no:cacheprovider \
        --import-mode=importlib -W ignore -n "${PYTEST_WORKERS:-6}" -q -m "not golden" tests/kernels/triton
}

bench() {
    local name=$1 limit=$2 budget=$3
    shift 3
    part "$name" "$limit" "$python" -m tandem_kernels.bench "$@" --budget-s "$budget" \
        --json "$out/$name.json" --markdown "$out/$name.md"
}

model() {
    local sizes=(--device cuda) shape
    if [ "$device" = cpu ]; then
        sizes=(--batches 1,2 --contexts 32 --chunks 16 --cached 0 --steps 2 --kv-gib 0.05 --threads 1)
    fi
    for shape in ${SHAPES:-llama-3.1-8b qwen3-8b llama-3.2-1b}; do
        part model 110 "$python" -m loadtest model --shape "$shape" "${sizes[@]}" --json "$out/model-$shape.json"
    done
}

# Both ways of sharing a GPU while the giver computes, and both alone.
transfer() {
    if [ "$device" = cpu ]; then
        part transfer 60 "$python" -m loadtest gpu-transfer --device cpu --kib 64 --mib 1 --rounds 2 \
            --json "$out/transfer.json"
        return
    fi
    part transfer 50 "$python" -m pytest -c /dev/null --rootdir . --confcutdir tests/contract/transfer -p no:cacheprovider \
        --import-mode=importlib -W ignore -q tests/contract/transfer/test_cuda_memory.py
    part transfer 80 "$python" -m loadtest gpu-transfer --json "$out/transfer.json"
    local way
    for way in " --busy" " --busy --mps"; do
        # shellcheck disable=SC2086 # two options
        part transfer 60 "$python" -m loadtest gpu-transfer $way --kib 2048,8192 --rounds 10 \
            --json "$out/transfer${way// --/-}.json"
    done
}

case ${1:-} in
    -h | --help) usage; exit ;;
    wheels) wheels "${2:?wheels needs a folder}"; exit ;;
esac
[ $# -gt 1 ] || { usage >&2; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$root"
export PYTHONPATH=$root/services:$root/kernels:$root${PYTHONPATH:+:$PYTHONPATH}
unpack || failed=1
for name in "$@"; do
    case $name in
        tests) tests ;;
        quick) if [ "$device" = cpu ]; then bench quick 60 30 --device cpu --tiny; else bench quick 150 120 --quick; fi ;;
        bench) bench bench 540 480 ;;
        model) model ;;
        transfer) transfer ;;
        *) echo "no part is named $name" >&2; failed=1 ;;
    esac
done
exit $failed
