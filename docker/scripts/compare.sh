#!/usr/bin/env bash
# The evals container of compose.gpu.yaml: asks one arm (ONLY=baseline) and hands over, or asks what is left and judges;
# the exit status is the verdict's. Both servers are reached by URL; their kernels are read back from their routes and
# from their logs on the shared volume.
# Environment: ENGINE, BASELINE_URL, BASELINE_KERNEL, CANDIDATE_URL, CANDIDATE_KERNEL, RUN, TASK, DATA, EVALS_ARGS, ONLY.
set -euo pipefail

describe() {  # ARM URL KERNEL
  printf 'name: %s\nengine: %s\nkernel: %s\nurl: %s\nparallel: {tensor: %s}\nattest: {log: %s}\n' \
    "$1-${ENGINE}-$3" "$ENGINE" "$3" "$2" "${TP:-8}" "${LOGS:-/logs}/$1.log" >"$files/$1.yaml"
}
files="$(mktemp -d)"
describe baseline "$BASELINE_URL" "$BASELINE_KERNEL"
describe candidate "$CANDIDATE_URL" "$CANDIDATE_KERNEL"

out="${RUNS:-/runs}/${RUN:-latest}"
words=(run "${TASK:-gsm8k}" --baseline-file "$files/baseline.yaml" --candidate-file "$files/candidate.yaml"
       --require-attestation --out "$out")
[[ "${TASK:-gsm8k}" == gsm8k ]] && words+=(--data "${DATA:-/data}")
eval "extra=(${EVALS_ARGS:-})"  # may hold quoted JSON
[[ -n "${PARALLEL:-}" ]] && words+=(--parallel-servers)
if [[ -n "${ONLY:-}" ]]; then
  status=0
  evals "${words[@]}" "${extra[@]}" --only "$ONLY" || status=$?
  [[ "$status" == 0 ]] && touch "$out.$ONLY.done"
  exit "$status"
fi
[[ -e "$out.baseline.done" && -z "${PARALLEL:-}" ]] && words+=(--resume)
exec evals "${words[@]}" "${extra[@]}"
