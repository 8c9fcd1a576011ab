#!/usr/bin/env bash
# Runs measurements on a machine with a GPU, part by part: tests of the kernels, their bench, steps of whole models,
# transfers between two processes, and serving. A part that fails does not stop the next, and each writes its results
# to the given folder.
set -uo pipefail

usage() {
    cat <<'END'
usage: kernels/gpu_session.sh FOLDER PART...      (from anywhere; exit code 1 when a part failed)
       kernels/gpu_session.sh wheels FOLDER       (where packages can be had, after .ci/setup)

parts, and the seconds after which each is stopped:
  tests      270  tests/kernels/triton on the GPU
  quick      150  the bench: all checks, few cases
  bench      540  the bench whole; it ends by itself after some eight minutes
  tiles      540  tiles of the attention kernels against each other; it ends by itself after some eight minutes
  model      330  whole-model steps of random-weight models of real shapes, with graphs and without: 110 each
  transfer   250  NIXL between two processes on one GPU: its tests; producer idle, then computing, without and with MPS
  serve      400  `tandem serve` with two workers that share the GPU, the real model in float32 against transformers

Six calls of less than ten minutes each, none of which leaves more than eight files. Half an hour may be too short for
all; the last are those that can wait:
  kernels/gpu_session.sh FOLDER transfer
  SHAPES=llama-3.1-8b kernels/gpu_session.sh FOLDER model
  kernels/gpu_session.sh FOLDER bench
  SHAPES="qwen3-8b llama-3.2-1b" kernels/gpu_session.sh FOLDER model
  kernels/gpu_session.sh FOLDER tests
  kernels/gpu_session.sh FOLDER serve

Needed there: python3 with torch for CUDA, its Triton, numpy, pytest and pytest-xdist, and msgspec; for `model` also llguidance,
safetensors and tokenizers; for `transfer` nixl-cu13; for `serve` all that `tandem serve` needs. `wheels FOLDER` downloads what may be
missing, for Python 3.12 on x86-64, as six parcels FOLDER/1 to FOLDER/6 of at most 56 MiB. They are looked for in .whl/
of the repository (which git ignores) or in WHEELS: `transfer` needs parcel 1, `model` parcel 2, `serve` all of them,
the rest either of the first two. So each of the six calls can bring the next one to a machine that keeps what it was brought.

PYTHON (python3), WHEELS (.whl), SHAPES (llama-3.1-8b qwen3-8b llama-3.2-1b), PYTEST_WORKERS (6) may be set.
SESSION_DEVICE=cpu runs these but bench and tests without a GPU, all but serve at toy sizes, to see that they run.
END
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
device=${SESSION_DEVICE:-cuda}
failed=0

# part LOG SECONDS COMMAND...: runs a command with a time limit, appends its output to LOG.log and prints the last lines.
part() {
    local log=$out/$1.log limit=$2 began=$SECONDS code=0
    shift 2
    local command=$*
    echo "== ${command:0:500}" >>"$log"
    timeout -k 10 "$limit" "$@" >>"$log" 2>&1 || code=$?
    tail -n 30 "$log"
    echo "== exit code $code after $((SECONDS - began)) s" | tee -a "$log"
    [ "$code" = 0 ] || failed=1
}

# found PATTERN: lists files of the parcels, whether they are in numbered folders or not.
found() { find "${WHEELS:-.whl}" -maxdepth 2 -name "$1" 2>/dev/null | sort; }

install=("$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target)

unpack() {
    local wheels
    mapfile -t wheels < <(found '*.whl')
    [ ${#wheels[@]} = 0 ] && return
    "${install[@]}" "$scratch/site" "${wheels[@]}" && export PYTHONPATH=$PYTHONPATH:$scratch/site
}

# Without the configuration of pytest, whose plugins may be missing, and without the conftest of all tests, which needs
# what only servers need.
pytest=("$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider --import-mode=importlib -W ignore -q)

tests() {
    part tests 270 "${pytest[@]}" --confcutdir tests/kernels/triton -n "${PYTEST_WORKERS:-6}" -m "not nightly" \
        tests/kernels/triton
}

bench() {
    local name=$1 limit=$2 budget=$3
    shift 3
    part "$name" "$limit" "$python" -m tandem_kernels.bench "$@" --budget-s "$budget" \
        --json "$out/$name.json" --markdown "$out/$name.md"
}

tiles() {
    local settings=() sizes=(--budget-s 480)
    if [ "$device" = cpu ]; then settings=(TRITON_INTERPRET=1) sizes=(--device cpu --tiny); fi
    part tiles 540 env "${settings[@]}" "$python" -m tandem_kernels.bench.autotune "${sizes[@]}" --json "$out/tiles.json"
}

model() {
    local sizes=(--device cuda) shape
    if [ "$device" = cpu ]; then
        sizes=(--batches "1,2" --contexts 32 --chunks 16 --cached 0 --steps 2 --kv-gib 0.05 --threads 1)
    fi
    for shape in ${SHAPES:-llama-3.1-8b qwen3-8b llama-3.2-1b}; do
        part model 110 "$python" -m loadtest model --shape "$shape" "${sizes[@]}" --json "$out/model-$shape.json"
    done
}

# Measures transfers with an idle producer, then with a computing one, without and with MPS.
transfer() {
    if [ "$device" = cpu ]; then
        part transfer 60 "$python" -m loadtest gpu-transfer --device cpu --kib 64 --mib 1 --rounds 2 \
            --json "$out/transfer.json"
        return
    fi
    part transfer 50 "${pytest[@]}" --confcutdir tests/contract/transfer tests/contract/transfer/test_cuda_memory.py
    part transfer 80 "$python" -m loadtest gpu-transfer --json "$out/transfer.json"
    local way
    for way in " --busy" " --busy --mps"; do
        # shellcheck disable=SC2086 # two options
        part transfer 60 "$python" -m loadtest gpu-transfer $way --kib 2048,8192 --rounds 10 \
            --json "$out/transfer${way// --/-}.json"
    done
}

# What was carried goes before what the machine has, and is all that an index would serve: the model comes from one.
serve() {
    local rest=$scratch/rest pieces settings=()
    mapfile -t pieces < <(found 'rest.tar.*')
    if [ ${#pieces[@]} != 0 ]; then
        mkdir "$rest"
        cat "${pieces[@]}" | tar -x -C "$rest"
        part serve 90 "${install[@]}" "$scratch/serve" "$rest"/*.whl
        settings=("PYTHONPATH=$root/services:$root/kernels:$root:$scratch/serve:$PYTHONPATH")
        settings+=(PIP_NO_INDEX=1 "PIP_FIND_LINKS=$rest")
    fi
    part serve 310 env "${settings[@]}" "${pytest[@]}" --confcutdir tests/e2e/serve -k "$device" tests/e2e/serve/test_exact.py
}

case ${1:-} in
    -h | --help) usage; exit ;;
    wheels)
        PYTHONPATH=$root/services:$root exec "${PYTHON:-$root/.venv/bin/python}" -m loadtest.processes.gpu_wheels \
            "${2:?wheels needs a folder}"
        ;;
esac
[ $# -gt 1 ] || { usage >&2; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$root" || exit
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$root/services:$root/kernels:$root${PYTHONPATH:+:$PYTHONPATH}
# Without a GPU, tests would be skipped or interpreted, and pass.
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU: SESSION_DEVICE=cpu shows what runs without one" >&2
    exit 1
fi
unpack || failed=1
for name in "$@"; do
    case $name in
        tests) tests ;;
        quick) if [ "$device" = cpu ]; then bench quick 60 30 --device cpu --tiny; else bench quick 150 120 --quick; fi ;;
        bench) bench bench 540 480 ;;
        tiles) tiles ;;
        model) model ;;
        transfer) transfer ;;
        serve) serve ;;
        *) echo "no part is named $name" >&2; failed=1 ;;
    esac
done
exit $failed
