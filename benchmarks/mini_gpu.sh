#!/usr/bin/env bash
# Train the embedded model on one GPU and score its export: benchmarks/mini_gpu.sh SEED STEPS|SECONDSs OUT
# With "240s" the number of steps is chosen after 100 steps so that the rest takes about that long; log.jsonl has it.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
seed=$1 length=$2 out=$3
python=${PYTHON:-python3}
work=$(mktemp -d)
if [[ $length == *s ]]; then flags=(--seconds "${length%s}"); else flags=(--steps "$length"); fi
$python -m evals.mini.train --seed "$seed" "${flags[@]}" --out "$work/run"
$python -c "from pathlib import Path; from evals.mini.export import write_bf16; write_bf16(Path('$work/run/model'), Path('$work/bf16'))"
$python -m evals.mini.evaluate "$work/bf16" --batch 660 --out "$work/run/answers.jsonl" | tee "$work/run/score.json"
mkdir -p "$out"
split -b 15M -d "$work/run/model/model.safetensors" "$out/seed$seed-model.safetensors."
(cd "$work/run" && tar czf "$out/seed$seed-run.tar.gz" log.jsonl score.json answers.jsonl model/*.json)
ls -la "$out"
