#!/usr/bin/env bash
# Train the embedded model on one GPU, several seeds side by side: benchmarks/mini_gpu.sh OUT STEPS|SECONDSs SEED...
# "230s": the number of steps, the same for all seeds, is chosen after 100 steps so that the rest takes about that long
# (log.jsonl has it; the same number given as STEPS repeats the run).
# Writes per seed the checkpoint in pieces of at most 15 MiB and an archive of log and JSON files.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
out=$1 length=$2
shift 2
python=${PYTHON:-python3}
work=$(mktemp -d)
if [[ $length == *s ]]; then flags=(--seconds "${length%s}" --length-file "$work/steps"); else flags=(--steps "$length"); fi
mkdir -p "$out"
pids=()
for seed in "$@"; do
  $python -m evals.mini.train --seed "$seed" "${flags[@]}" --out "$work/$seed" >"$work/$seed.console" 2>&1 &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=1; done
for seed in "$@"; do
  cd "$work/$seed" || continue
  if [[ -f model/model.safetensors ]]; then
    split -b 15M -d model/model.safetensors "$out/seed$seed-model.safetensors."
  fi
  cp "$work/$seed.console" console.txt
  tar czf "$out/seed$seed-run.tar.gz" log.jsonl console.txt $(ls model/*.json 2>/dev/null)
  grep exact log.jsonl | tail -n 3
  tail -n 4 console.txt | cut -c1-600
done
exit $status
