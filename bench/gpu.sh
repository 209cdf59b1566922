#!/usr/bin/env bash
# Everything that needs a GPU, in four parts of less than 9 minutes each, with what is installed: it needs no network.
#
#   bash bench/gpu.sh OUTDIR [tests | benchmarks | decoding | large | all] [PYTHON]
#
#   tests        the tests of the kernels and of the drop-in, and those of decoding that need a GPU
#   benchmarks   kernel_*.py
#   decoding     the shipped pair: calibrate, plan, decoding.py
#   large        large.py: decoding at the shapes of Llama-2-7B
#
# Installs this checkout without its dependencies first. Leaves logs, JSON and pictures in OUTDIR, and prints a summary
# of at most 60 lines for each part last. Without a GPU it says so and runs what it can.
set -uo pipefail
[ $# -ge 1 ] || { echo "usage: bash bench/gpu.sh OUTDIR [tests | benchmarks | decoding | large | all] [PYTHON]" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
part=${2:-all}
python=${3:-python3}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
failed=()

wants() { [ "$part" = all ] || [ "$part" = "$1" ]; }

step() { # step NAME SECONDS COMMAND...: run it, stop it after SECONDS, and write what it prints to OUTDIR/NAME.log
    local name=$1 seconds=$2 begin=$SECONDS
    shift 2
    echo "$name ..."
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1 || failed+=("$name (exit $?)")
    echo "$name: $((SECONDS - begin)) s"
}

"$python" -m pip install --quiet --no-deps --no-build-isolation --no-index -e . >"$out/install.log" 2>&1 ||
    { cat "$out/install.log"; exit 1; }
rm "$out/install.log"
"$python" - <<'PYTHON' | tee "$out/environment.log"
import platform, torch, transformers, triton
gpu = torch.cuda.is_available()
print("device", torch.cuda.get_device_name() if gpu else "none: no GPU was found, kernels run in Triton's interpreter")
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__,
      "transformers", transformers.__version__)
PYTHON
gpu=$("$python" -c 'import torch; print(int(torch.cuda.is_available()))')
workers=$("$python" -c 'import importlib.util as u; print("-n8" if u.find_spec("xdist") else "")')

# Kernels are compiled once for each shape, so the tests are spread over processes where pytest-xdist is installed.
# Warnings are no errors here: the project does not pin the versions on such a machine.
tests=(tests/test_tree_attention.py tests/test_ordering.py tests/test_huggingface.py
    tests/test_sampling.py tests/test_verification_kernel.py tests/test_cache_compaction.py tests/test_commit.py)
wants tests && OMP_NUM_THREADS=2 step tests 400 "$python" -m pytest -q -W default $workers "${tests[@]}"
[ "$gpu" = 1 ] && wants tests && OMP_NUM_THREADS=2 step tests-gpu 130 "$python" -m pytest -q -W default $workers -m gpu \
    tests/test_decoder.py tests/test_step.py
if wants benchmarks; then
    step kernel_attention 150 "$python" bench/kernel_attention.py \
        --json "$out/kernel_attention.json" --plot "$out/kernel_attention.png"
    step kernel_sampling 100 "$python" bench/kernel_sampling.py --json "$out/kernel_sampling.json"
    step kernel_verification 100 "$python" bench/kernel_verification.py --json "$out/kernel_verification.json"
    step kernel_ordering 80 "$python" bench/kernel_ordering.py --json "$out/kernel_ordering.json"
    step kernel_compaction 60 "$python" bench/kernel_compaction.py --json "$out/kernel_compaction.json"
fi
if wants decoding; then
    step calibrate 180 "$python" -m heavypath.speculative calibrate --out "$out/profile.json"
    step plan 30 "$python" -m heavypath.speculative plan "$out/profile.json" --svg "$out/tree.svg"
    step decoding 300 "$python" bench/decoding.py --prompts 8 --max-new-tokens 64 --json "$out/decoding.json"
fi
small=(--target 8 512 16 1024 --draft 2 384 12 512 --vocabulary 1500 --new-tokens 32 --prompts 2 --batches 1)
[ "$gpu" = 1 ] && small=()
wants large && step large 525 "$python" bench/large.py "${small[@]}" --json "$out/large.json"

echo
echo "=== summary"
head -1 "$out/environment.log"
for log in tests tests-gpu; do [ -f "$out/$log.log" ] && echo "$log: $(tail -1 "$out/$log.log")"; done
grep -hs "^FAILED\|^ERROR" "$out"/tests*.log | cut -c1-140 | head -8
for log in kernel_attention kernel_sampling kernel_verification plan decoding large; do
    [ -f "$out/$log.log" ] && grep -v "^demo\|^\[" "$out/$log.log" | cut -c1-140 | head -30
done
echo "in $SECONDS s; failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
