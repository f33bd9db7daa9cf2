#!/usr/bin/env bash
# The front door: sets up .venv, then runs a stage on this machine's devices. Without arguments it prints the list.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'EOF'
usage: ./launch.sh COMMAND [CONFIG] [section.key=value ...]

  setup              make .venv and install what pyproject.toml names (exact versions in constraints.txt)
  demo               all five stages on a real model on two CPU cores, ends with a table and a report
  test               lint, types, import contract and tests

  plan     CONFIG    tokens, bytes, hours, memory, before anything runs
  data     CONFIG    conversations -> corpus shards, answered by the target
  extract  CONFIG    target forward over the corpus -> feature shards
  train    CONFIG    feature shards -> drafter checkpoints (DeepSpeed)
  evaluate CONFIG    live and replayed acceptance lengths of chain and tree -> report.html
  export   CONFIG    checkpoint -> folder that vLLM and SGLang serve, verified
  convert  IN [OUT]  a drafter folder in another format (--to zlab | speculators); without OUT: what IN is
  ablation FILE      losses side by side: the same warm start, data, steps and anchors, held-out prompts replayed
  watch    RUN...    the page of a training run, while it trains or after; several runs laid over each other
  workspace CONFIG   a W&B workspace with a panel for every metric, grouped; needs WANDB_API_KEY
  report   CONFIG    write the report again from what evaluate recorded
  verify-features DIR    every byte of feature shards against their manifest, rows against the target; --repair
  compare  A B       two evaluated runs or reports, prompt by prompt: paired differences with intervals

Any section.key=value after CONFIG overrides it; `./launch.sh STAGE --help` says more.
NPROC ranks on this machine (default: its GPUs, else 1); NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as for torchrun;
HOSTFILE starts train with the deepspeed launcher. PYTHON names the interpreter (3.11 or newer) for setup.
EOF
}

die() { echo "error: $*" >&2; exit 2; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"; return
    fi
  done
  die "no Python 3.11 or newer with venv found; install one or name it with PYTHON=/path/to/python3.12"
}

# setup [test]: idempotent; the stamp holds what was installed, so a changed pyproject installs again
setup() {
  local extra=${1:-} stamp=.venv/.installed${1:+-$1} wanted torch target=.
  wanted=$(cat pyproject.toml constraints.txt | sha256sum)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && return
  [ -n "$extra" ] && target=".[$extra]"
  if [ ! -x .venv/bin/python ]; then
    local python; python=$(find_python) || exit 2
    echo "setup: making .venv with $("$python" --version)"
    "$python" -m venv .venv || die "could not make .venv (on Debian: apt-get install python3-venv)"
  fi
  torch=$(grep -E '^torch==' constraints.txt)
  # torch first and by exact version: one build serves CPU machines and CUDA boxes, and nothing pulls a second one
  echo "setup: installing $torch, then the rest (about two minutes)"
  .venv/bin/python -m pip install -qq --disable-pip-version-check "$torch" || die "pip could not install $torch; is a package index reachable?"
  .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e "$target" || die "pip could not install the dependencies; see its message above"
  # the independent readers of our exports, for tests/test_export_interop.py; without their pins, which they do not need
  if [ "$extra" = test ]; then
    .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[interop]" 2>/dev/null &&
      .venv/bin/python -m pip install -qq --disable-pip-version-check --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0 2>/dev/null ||
      echo "setup: dflash 0.1.0 or speculators 0.9.0 are not to be had; the tests that they read our folders will be skipped"
  fi
  echo "$wanted" > "$stamp"
}

# without a GPU DeepSpeed warns at every import unless it is told
quiet_without_gpu() { [ "$(num_gpus)" -gt 0 ] || export DS_ACCELERATOR=cpu; }

num_gpus() { { nvidia-smi -L 2>/dev/null || true; } | wc -l; }

# stage MODULE ARGUMENTS...: one process, torchrun, or the deepspeed launcher
stage() {
  local module=$1; shift
  local gpus nproc; gpus=$(num_gpus); nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}
  case $nproc in *[!0-9]*) die "NPROC=$nproc is no number of ranks" ;; esac
  [ "$gpus" -gt 0 ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # ranks on CPU: one thread each, they fight otherwise
  case " $* " in *" --help "* | *" -h "*) exec .venv/bin/python -m "$module" "$@" ;; esac
  if [ "$module" = train ] && [ -n "${HOSTFILE:-}" ]; then
    [ -f "$HOSTFILE" ] || die "HOSTFILE=$HOSTFILE does not exist; one line a host: 'hostname slots=8'"
    local here=()
    case $(awk '!/^[[:space:]]*(#|$)/ {print $1}' "$HOSTFILE") in
      localhost | 127.0.0.1 | "$(hostname)") here=(--no_ssh_check --master_addr 127.0.0.1) ;;  # one host, this one: no ssh
    esac
    ${front:-} env PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m common.deepspeed --hostfile "$HOSTFILE" ${MASTER_PORT:+--master_port "$MASTER_PORT"} \
      "${here[@]}" --no_local_rank --module train "$@"
  elif [ "$module" = extract ]; then  # workers that need nothing of each other, on this machine and on others
    local workers=extract; [ "$nproc" -le 1 ] && [ -z "${NODE_RANK:-}" ] || workers=extract.launch
    NPROC=$nproc ${front:-} .venv/bin/python -m "$workers" "$@"
  elif [ "${NNODES:-1}" -gt 1 ]; then
    [ -n "${MASTER_ADDR:-}" ] || die "NNODES=$NNODES needs MASTER_ADDR, the first node's address"
    ${front:-} .venv/bin/python -m common.torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$nproc" \
      --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" -m "$module" "$@"
  elif [ "$nproc" -gt 1 ]; then
    ${front:-} .venv/bin/python -m common.torchrun --standalone --nproc-per-node "$nproc" -m "$module" "$@"
  else
    ${front:-} .venv/bin/python -m "$module" "$@"
  fi
}

demo() {
  local start=$SECONDS at name
  export HF_HUB_OFFLINE=1
  [ "$(num_gpus)" -gt 0 ] || export NPROC=${NPROC:-$(($(nproc) > 1 ? 2 : 1))}
  for name in data extract train evaluate export; do
    at=$SECONDS
    echo "== $name"
    stage "$(module_of "$name")" configs/demo.yaml "$@"
    echo "== $name took $((SECONDS - at)) s"
  done
  echo "== demo took $((SECONDS - start)) s after setup"
  .venv/bin/python -m evaluation configs/demo.yaml "$@" --report-only
}

run_tests() {
  export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline PATH="$PWD/.venv/bin:$PATH"
  ruff format --check .
  ruff check .
  lint-imports
  basedpyright
  pytest -n "${PYTEST_WORKERS:-2}" "$@"
}

module_of() { case $1 in evaluate) echo evaluation ;; plan) echo train.plan_page ;; *) echo "$1" ;; esac; }

main() {
  export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
  quiet_without_gpu
  local command=${1:-}; [ $# -gt 0 ] && shift
  case $command in
    "" | help | -h | --help) usage ;;
    setup) setup; setup test ;;
    demo) setup; demo "$@" ;;
    test) setup; setup test; run_tests "$@" ;;
    report) setup; exec .venv/bin/python -m evaluation "$@" --report-only ;;
    convert) setup; exec .venv/bin/python -m export.convert "$@" ;;
    compare) setup; exec .venv/bin/python -m evaluation.compare "$@" ;;
    verify-features) setup; exec .venv/bin/python -m extract.verify_command "$@" ;;
    workspace) setup; setup workspace; exec .venv/bin/python -m train.workspace "$@" ;;
    watch) setup; exec .venv/bin/python -m train.watch "$@" ;;
    ablation) setup; exec .venv/bin/python -m train.ablation "$@" ;;
    plan) setup; exec .venv/bin/python -m train.plan_page "$@" ;;
    data | extract | train | evaluate | export)
      setup
      [ $# -gt 0 ] || die "$command needs a recipe, e.g. ./launch.sh $command configs/demo.yaml"
      local front=exec  # SIGTERM, a scheduler's or a spot machine's notice, then reaches the stage and not this shell
      stage "$(module_of "$command")" "$@" ;;
    *) die "unknown command '$command'; ./launch.sh prints the list" ;;
  esac
}

main "$@"; exit  # one line, read at once: a pull that changes this file does not disturb a running stage
