#!/usr/bin/env bash
# Everything that needs a GPU, in parts of less than 9 minutes each, most valuable first, with what is installed: it needs
# no network.
#
#   bash bench/gpu.sh OUTDIR [PART | all] [PYTHON]
#
#   first      what decides about the rest: what is installed, a step of an 8B target with an EAGLE-3 head; the tiles of
#              attention; how fast a copy and all weights of an 8B and a 7B target are in a graph, with requests ahead and
#              without; whether texts are those of a CPU and steps become CUDA graphs; the kernels of a layer beside
#              their references
#   large      large.py: decoding at the shapes of Llama-2-7B, with its phases and kernels, beside what was predicted;
#              the same of Llama-3.1-8B with an EAGLE-3 head
#   tests      a CUDA graph writes the text of the eager step, and the tests of decoding and of a step's usual kernels
#   kernels    kernels/: each kernel beside its peers, FlashInfer, FlexAttention and sdpa among them
#   others     the tests of all other kernels
#   stream     a target in the host's memory whose layers are copied for each pass writes its own text; scale.py device:
#              what that costs by trees of all sizes, beside accelerate's way
#   more       calibrate, plan, and decoding.py with the shipped pair: methods, phases, and verifiers (one of which may
#              then be the default on a GPU)
#   races      soak; compute-sanitizer, where it is there; ranks where there are two GPUs
#
# The first four fill half an hour. The limits of a part's steps add up to less than 9 minutes: each has its time whatever
# became of the others. Logs, JSON and pictures are in OUTDIR, and all of them in OUTDIR/PART.tar.gz, for where only few
# files can be fetched (all.tar.gz is written behind each part). Tables are printed as they come. A step that takes too
# long gets SIGINT, and prints what it has. If this script is told to stop (SIGINT or SIGTERM), it stops the present step
# so, packs what there is, and ends. This checkout need not be installed. Kernels that `bench/carry.py make build/carried`
# has compiled before, under the machine's Triton, are not compiled again; how many of them fit is printed, and behind each
# step how many it compiled. Without a GPU, or with MINIATURE=1, each script does the least that runs all its lines.
set -uo pipefail
parts=(first large tests kernels others stream more races)
usage() { echo "usage: bash bench/gpu.sh OUTDIR [$(IFS='|'; echo "${parts[*]}") | all] [PYTHON]" >&2; exit 2; }
[ $# -ge 1 ] || usage
part=${2:-all}
[[ " ${parts[*]} all " == *" $part "* ]] || usage
mkdir -p "$1"
out=$(cd "$1" && pwd)
python=${3:-python3}
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} LC_ALL=C.UTF-8
failed=() stopped="" running="" deadline=0
set -m # each step is a process group of its own, which signals can be sent to

stop() {
    stopped=yes
    [ -z "$running" ] || kill -INT -- "-$running" 2>/dev/null
}
trap stop INT TERM

compiled() { # how many kernels are in the cache that was carried
    find "${TRITON_CACHE_DIR:-/nowhere}" -name "*.cubin" 2>/dev/null | wc -l
}

step() { # step NAME SECONDS COMMAND...: run it, stop it after SECONDS or at the part's end, show the end of its log
    local name=$1 seconds=$2 begin=$SECONDS left=$((deadline - SECONDS)) code=0 before
    before=$(compiled)
    shift 2
    [ -z "$stopped" ] || return 0
    [ "$left" -ge "$seconds" ] || seconds=$left
    [ "$seconds" -gt 5 ] || { failed+=("$name (no time left)"); return 0; }
    timeout --foreground --signal=INT --kill-after=20 "$seconds" "$@" >"$out/$name.log" 2>&1 &
    running=$!
    wait "$running" || code=$?
    while kill -0 "$running" 2>/dev/null; do wait "$running" || code=$?; done # a signal ends wait before the step
    running=""
    [ "$code" = 0 ] || failed+=("$name ($([ "$code" = 124 ] && echo "cut after $seconds s" || echo "exit $code"))")
    echo "--- $name: $((SECONDS - begin)) s of $seconds$([ "$code" = 0 ] || echo ", exit $code")$([ -z "$carried" ] ||
        echo ", $(($(compiled) - before)) kernels compiled")"
    grep -v "^\[ *[0-9]* s\]\|^Loading weights\|^USDT" "$out/$name.log" | tail -40 | sed -E 's/^(.{180}).*/\1/'
}

predictions() { # predictions FILE...: what these measured beside what was predicted
    for file in "$@"; do
        [ -f "$out/$file.json" ] && "$python" bench/predict.py against "$out" --only "$file" | tee "$out/$file.predictions"
    done
}

# Where the Python does not import this checkout, it does by links such as setup.py makes, and a note of the version.
"$python" - <<'PYTHON' 2>/dev/null || {
import pathlib, sys
import heavypath.kernels.noise as module
sys.exit(pathlib.Path(module.__file__).resolve().parent.parent != pathlib.Path.cwd())
PYTHON
    mkdir -p .editable/heavypath .editable/heavypath.dist-info
    ln -sfn ../../speculative/package/__init__.py .editable/heavypath/__init__.py
    ln -sfn ../../kernels .editable/heavypath/kernels
    ln -sfn ../../speculative .editable/heavypath/speculative
    { echo "Metadata-Version: 2.1"; sed -nE 's/^(name|version) = "(.*)"/\1: \2/p' pyproject.toml; } \
        >.editable/heavypath.dist-info/METADATA
    export PYTHONPATH="$PWD/.editable${PYTHONPATH:+:$PYTHONPATH}"
}
carried=""
if [ -d build/carried ]; then # kernels that bench/carry.py has compiled elsewhere
    "$python" bench/carry.py place build/carried && export TRITON_CACHE_DIR="$PWD/build/carried" carried=yes
    # A Triton of another build would find none of them.
    echo "carried: $("$python" bench/carry.py make build/carried --case gate 2>&1 | tail -1)"
fi
"$python" - <<'PYTHON' >"$out/environment.log"
import importlib.util, platform, torch, transformers, triton
gpu = torch.cuda.is_available()
names = ("xdist", "pytest_timeout", "flashinfer", "peft")
has = {name: importlib.util.find_spec(name) is not None for name in names}
print(int(gpu), torch.cuda.device_count(), *(int(has[name]) for name in names[:2]))
print("device", torch.cuda.get_device_name() if gpu else "none: no GPU was found")
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__,
      "transformers", transformers.__version__, *(f"{name} {'yes' if there else 'no'}" for name, there in has.items()))
PYTHON
read -r gpu gpus xdist limits <"$out/environment.log" || exit 1
tail -2 "$out/environment.log"
[ "$gpu" = 1 ] && small=${MINIATURE:-} || small=1
mini=(${small:+--miniature})
small_models=(--miniature --target 8 384 12 896 --draft 2 384 12 512 --vocabulary 1100 --new-tokens 8) # of large.py
workers=() named=(-vv) # which undoes -q: the log has the name of each test
[ "$xdist" = 1 ] && workers=(-n "$([ -n "$small" ] && echo 0 || echo 12)")
[ "$limits" = 1 ] && named+=(--timeout 90 --timeout-method thread) # ends the process: a kernel that hangs is not asked
# Warnings are no errors here: the project does not pin the versions on such a machine. A test file may be cut: -rfE.
pytest=("$python" -m pytest -q -rfE -W default --durations=8 -p no:cacheprovider "${workers[@]}")
kernel() { # kernel NAME SECONDS [OPTIONS OF PYTEST]: its benchmark
    step "kernel_$1" "$2" "$python" -m pytest -q -rfE -p no:cacheprovider "bench/kernels/bench_$1.py" --benchmark-only \
        --benchmark-columns=median,iqr,rounds --benchmark-json "$out/kernel_$1.json" "${mini[@]}" "${@:3}"
}
played=() # where there is no GPU, as on one that is played
[ "$gpu" = 1 ] || played=(env "PYTHONPATH=$PWD/tests/support:$PWD/tests/support/stand_in${PYTHONPATH:+:$PYTHONPATH}")

head_step() { # head_step NAME SECONDS MINUTES [OPTIONS]: steps of an 8B target with an EAGLE-3 head
    step "$1" "$2" "$python" bench/large.py --head --methods sequoia --sizes 60 --batches 1 --minutes "$3" \
        --json "$out/head.json" "${mini[@]}" ${small:+--sizes 4 --new-tokens 8} "${@:4}"
}

run_first() {
    local tickets=test_the_tickets_of_a_thousand_verifications_are_found_at_zero few=()
    step first-machine 20 bash -c 'nvidia-smi; gcc --version | head -1; command -v compute-sanitizer ncu nvcc
        "$0" -m pip list | grep -iE "^(setuptools|pytest|hypothesis|numpy|numba|cuda|nvidia)"; df -h . | tail -1; nproc
        "$0" -c "import heavypath; print(heavypath.__version__, heavypath.__path__)"' "$python"
    head_step first-head 100 1.2 --temperatures 0.6 --prompts 1
    step first-attention 110 "$python" bench/tune_attention.py --json "$out/tune_attention.json" "${mini[@]}"
    step weight-stream 80 "$python" bench/weight_stream.py --json "$out/weight_stream.json" "${mini[@]}"
    step first-texts 90 "${played[@]}" env HEAVYPATH_NATIVE=0 "${pytest[@]}" "${named[@]}" -m gpu tests/core/test_first_on_gpu.py
    [ -n "$small" ] && few=(-k "by_hand or one_launch or do_not_fit or stand_alone")
    step first-kernels 120 "${pytest[@]}" "${named[@]}" "${few[@]}" tests/kernels/test_layer_kernels.py \
        tests/kernels/test_few_rows.py tests/kernels/test_prefetch.py tests/kernels/test_entries.py \
        tests/gpu/test_on_gpu.py::test_one_launch_of_each_kernel tests/gpu/test_on_gpu.py::$tickets \
        tests/gpu/test_on_gpu.py::test_a_million_gumbels_order_tokens_as_on_a_cpu tests/kernels/test_tree_attention.py
    predictions head
}

run_tests() {
    local kernels=(sampling commit cache_compaction ordering verification_kernel tree_attention windows sequence_scores
        layer_kernels)
    local files=("${kernels[@]/#/tests/kernels/test_}")
    files=("${files[@]/%/.py}" tests/core/test_huggingface.py)
    # In miniature one small test of each file.
    local some="by_hand or nothing_to_do or at_the_edge or stand_alone or in_memory_draws or point_masses or every_window"
    some+=" or rows_apart or infinite_row or needs_no_cache"
    [ -n "$small" ] && few=(-k "$some") || few=()
    step tests-gpu 250 "${pytest[@]}" "${named[@]}" -m gpu tests/core/test_step.py tests/gpu/test_on_gpu.py \
        tests/core/test_first_on_gpu.py tests/core/test_decoder.py tests/gpu/test_ranks_on_gpu.py
    step tests-kernels 280 "${pytest[@]}" "${named[@]}" "${few[@]}" "${files[@]}"
}

run_others() {
    local kernels=(few_rows prefetch entries terms nucleus filter_cuts levels tickets sharing k_seq slots retrieval latest mixing
        recurrent held traversal)
    local files=("${kernels[@]/#/tests/kernels/test_}") few=()
    files=("${files[@]/%/.py}" tests/core/test_typical.py)
    # In miniature one small test of each file.
    local some="are_refused or by_hand or near_the_least or have_no_cuts or at_the_cut or share_counters"
    some+=" or at_once or is_sure or equal_keys or block_verification or a_search_through or is_not_read or leaves_none"
    [ -n "$small" ] && few=(-k "$some")
    step tests-other-kernels 500 "${pytest[@]}" "${named[@]}" "${few[@]}" "${files[@]}"
}

run_large() {
    # Seven of eight layers fewer compile the same kernels; one process a method.
    if [ -z "$small" ]; then
        step large-warm-up 100 bash -c 'trap "kill \$(jobs -p)" INT # jobs of a script do not hear it themselves
            for method in sequoia dyspec ersd; do
                "$0" bench/large.py --target 8 4096 32 11008 --methods $method --new-tokens 12 --prompts 1 --minutes 1.4 &
            done
            wait; wait' "$python"
        step large 310 "$python" bench/large.py --minutes 4.3 --json "$out/large.json"
    else
        step large 90 "$python" bench/large.py "${small_models[@]}" --methods sequoia --sizes 4 --batches 1 \
            --temperatures 0.6 --prompts 1 --json "$out/large.json"
    fi
    head_step head 120 1.5
    predictions large head
}

run_stream() {
    step tests-streaming 180 "${pytest[@]}" "${named[@]}" -m gpu tests/options/test_device_streaming.py
    [ -z "$small" ] || step disk 60 "$python" bench/scale.py stream --miniature --device cpu # which wants no GPU
    # There are no streams to be copied by on a CPU.
    step stream 340 "${played[@]}" "$python" bench/scale.py device "${mini[@]}" --folder "$out" --json "$out/stream.json"
}

run_kernels() {
    # Side by side what they launch is only compiled.
    step warm-up 90 "$python" -m pytest -q -p no:cacheprovider -o addopts=--import-mode=importlib "${workers[@]}" \
        bench/kernels --benchmark-disable -k "heavypath or rows-few" "${mini[@]}" # "few rows" is ours, too
    kernel linear 90
    kernel attention 100
    kernel sampling 70
    kernel verification 80
    kernel compaction 50
    kernel ordering 50
    predictions kernel_linear kernel_attention kernel_sampling kernel_verification kernel_compaction kernel_ordering
}

run_more() {
    local prompts=(--prompts 8 --max-new-tokens 64)
    [ -n "$small" ] && prompts=(--prompts 1 --max-new-tokens 4)
    # There is no small calibration: tests/cli/test_cli.py has these two commands.
    [ -n "$small" ] || step calibrate 150 "$python" -m heavypath.speculative calibrate --limit 100 --out "$out/profile.json"
    [ ! -f "$out/profile.json" ] ||
        step plan 30 "$python" -m heavypath.speculative plan "$out/profile.json" --svg "$out/tree.svg"
    step decoding 150 "$python" bench/decoding.py "${mini[@]}" "${prompts[@]}" --json "$out/decoding.json"
    step phases 60 "$python" bench/decoding.py --sweep phases "${mini[@]}" --json "$out/phases.json"
    step verifiers 90 "$python" bench/decoding.py --sweep verifier "${mini[@]}" --prompts 8 --seeds 1 --timed 8 \
        --max-new-tokens 64 --tree "sequoia 64" "chain 8" "dyspec 64" "specinfer 4 x 8" --json "$out/verifiers.json"
}

run_races() {
    [ -n "$small" ] || step soak 100 "${pytest[@]}" -m "" tests/core/test_soak.py
    if [ "$gpu" = 1 ] && [ -z "$small" ] && command -v compute-sanitizer >/dev/null; then
        for tool in memcheck racecheck; do
            step "$tool" 150 compute-sanitizer --tool "$tool" --error-exitcode 9 --target-processes all \
                "$python" -m pytest -q -W default -p no:cacheprovider -m gpu tests/gpu/test_on_gpu.py -k one_launch_of_each_kernel
        done
    fi
    # Ranks have a GPU each; in miniature two processes share a CPU.
    if [ -n "$small" ] || [ "$gpus" -ge 2 ]; then
        step ranks 120 "$python" bench/scale.py ranks "${mini[@]}" --ranks 1 2 --json "$out/ranks.json" \
            --device "$([ -n "$small" ] && echo cpu || echo cuda)"
    fi
}


for each in "${parts[@]}"; do
    if [ "$part" = all ] || [ "$part" = "$each" ]; then
        echo "=== $each"
        deadline=$((SECONDS + 530))
        "run_$each"
        printf "%s\n" "${failed[@]:-none}" >"$out/failed.txt"
        find "$out" -maxdepth 1 -type f ! -name "*.tar.gz" -printf "%f\n" | tar czf "$out/$part.tar.gz" -C "$out" -T -
    fi
done
echo "=== in $SECONDS s; ${stopped:+stopped; }failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ] && [ -z "$stopped" ]
