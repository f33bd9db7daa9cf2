#!/usr/bin/env bash
# Everything that only a GPU can tell, offline, in at most five minutes on one H200: random weights and made targets only.
#
#   bench/gpu_check.sh         the tests marked gpu, then the benches on CUDA; one JSON in $OUT or outputs/gpu-check/
#   bench/gpu_check.sh --dry   the same parts on the CPU at toy sizes, to see that the script itself works (minutes)
#
# Exit code 0 only if every part ran and passed, no GPU test was skipped, and nothing outlived its time. PYTHON names the
# interpreter (default .venv/bin/python, else python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cuda dry=()
case "${1:-}" in
  "") ;;
  --dry) device=cpu dry=(--dry) ;;
  -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) echo "error: unknown argument '$1'; bench/gpu_check.sh --help" >&2; exit 2 ;;
esac
# a trained hybrid if its recipe has run here, else the bench's own random one
run=(--dry)
[ -f outputs/hybrid/checkpoints/index.json ] && run=(configs/hybrid.yaml)
python=${PYTHON:-.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
out=${OUT:-outputs/gpu-check}
work=outputs/gpu-check/parts
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=disabled TRANSFORMERS_VERBOSITY=error
rm -rf "$work" && mkdir -p "$work" "$out"

# part NAME SECONDS COMMAND...: run it, keep its log, write down how it ended and how long it took
part() {
  local name=$1 limit=$2 start rc; shift 2
  start=$(date +%s.%N)
  timeout --kill-after=5 "$limit" "$@" > "$work/$name.log" 2>&1
  rc=$?
  printf '%s\t%s\t%s\t%s\n' "$name" "$rc" "$limit" "$(echo "$(date +%s.%N) $start" | awk '{printf "%.1f", $1 - $2}')" >> "$work/parts.tsv"
  echo "== $name: exit code $rc"
  tail -n 12 "$work/$name.log"
}

bench() { local module=$1 name=$2 limit=$3; shift 3; part "$name" "$limit" "$python" -m "bench.$module" --output "$work/$name.json" "$@"; }

if [ "$device" = cpu ]; then
  export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu
  part tests 300 "$python" -m pytest -p no:cacheprovider -m "not gpu and not slow" --junitxml="$work/tests.xml" tests/test_gpu_stages.py
  bench tree_build build 120 --device cpu --budgets 16
  bench tree_verify verify 120 --device cpu --nodes 16 --rounds 1 --context 64
  bench decode decode 240 --device cpu --dry
  bench mission_layers mission 120 --device cpu --dry
else
  part tests 130 "$python" -m pytest -p no:cacheprovider -m gpu --junitxml="$work/tests.xml" tests
  bench tree_build build 30 --device cuda --budgets 16 64 256
  bench tree_verify verify 55 --device cuda --size qwen3.6-27b --dtype bfloat16 --context 2048 --nodes 16 64 128 256 --rounds 3
  bench decode decode 40 --device cuda "${run[@]}"
  bench mission_layers mission 45 --device cuda
fi
"$python" -m bench.gpu_summary "$work" "$out/gpu-check.json" "${dry[@]}"
