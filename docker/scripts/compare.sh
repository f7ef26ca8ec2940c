#!/usr/bin/env bash
# The evals container of compose.gpu.yaml: asks one arm (ONLY=baseline) and hands over, or asks what is left and judges;
# then the exit status is the verdict's. Both servers are reached by URL; their kernels are read back from their routes
# and from their logs on the shared volume.
# Environment: ENGINE, BASELINE_URL, BASELINE_KERNEL, CANDIDATE_URL, CANDIDATE_KERNEL, TP, RUN, TASK, DATA, EVALS_ARGS,
# ONLY, PARALLEL.
set -euo pipefail

run="${RUNS:-/runs}/${RUN:-latest}"
files="$(mktemp -d)"

describe() {  # ARM URL KERNEL
  printf 'name: %s\nengine: %s\nkernel: %s\nurl: %s\nparallel: {tensor: %s}\nattest: {log: %s}\n' \
    "$1-${ENGINE}-$3" "$ENGINE" "$3" "$2" "${TP:-8}" "${LOGS:-/logs}/$1.log" >"$files/$1.yaml"
}
describe baseline "$BASELINE_URL" "$BASELINE_KERNEL"
describe candidate "$CANDIDATE_URL" "$CANDIDATE_KERNEL"

words=(run "${TASK:-gsm8k}" --baseline-file "$files/baseline.yaml" --candidate-file "$files/candidate.yaml"
       --require-attestation --out "$run")
[[ "${TASK:-gsm8k}" == gsm8k ]] && words+=(--data "${DATA:-/data}")
eval "extra=(${EVALS_ARGS:-})"  # may hold quoted JSON
[[ -n "${PARALLEL:-}" ]] && words+=(--parallel-servers)

code_of() {  # the code an arm ended with before it could be judged, 0 where there is none
  if [[ -s "$run.$1.code" ]]; then cat "$run.$1.code"; else echo 0; fi
}

if [[ -n "${ONLY:-}" ]]; then  # always ends with status 0: the judge repeats the code
  if [[ "$(code_of "$ONLY")" == 0 ]]; then
    status=0
    evals "${words[@]}" "${extra[@]}" --only "$ONLY" || status=$?
    echo "$status" >"$run.$ONLY.code"
  fi
  : >"$run.$ONLY.answered"
  exit 0
fi
for arm in baseline candidate; do
  code="$(code_of "$arm")"
  if [[ "$code" != 0 ]]; then
    echo "$arm ended with code $code before a verdict; its log: ${LOGS:-/logs}/$arm.log" >&2
    tail -n 20 "${LOGS:-/logs}/$arm.log" >&2 || true
    exit "$code"
  fi
done
[[ -e "$run.baseline.answered" && -z "${PARALLEL:-}" ]] && words+=(--resume)
exec evals "${words[@]}" "${extra[@]}"
