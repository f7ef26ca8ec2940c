#!/usr/bin/env bash
# Runs a comparison and leaves its reports in $OUT; the exit status is the verdict's. Works on any CI: GITHUB_OUTPUT and
# GITHUB_STEP_SUMMARY are used where they are set.
# Environment: BASELINE, CANDIDATE (variant, URL or .yaml; several candidates by spaces), TASK, MODEL, DATA, LIMIT, MARGIN,
# ARGS (further options of `evals run`, quoted as in a shell), OUT.
set -uo pipefail

side() {  # baseline|candidate VALUE -> the option for a variant, a URL or a file
  case "$2" in
    http://* | https://*) words+=("--$1-url" "$2") ;;
    *.yaml | *.yml) words+=("--$1-file" "$2") ;;
    *) words+=("--$1" "$2") ;;
  esac
}

out="${OUT:-moe-parity-run}"
words=(run "${TASK:-gsm8k}" --out "$out" --margin "${MARGIN:-1.5}" --format terminal)
[[ -n "${GITHUB_ACTIONS:-}" ]] && words+=(--format github)
side baseline "${BASELINE:?variant, URL or file of the baseline}"
for one in ${CANDIDATE:?variant, URL or file of the candidate}; do side candidate "$one"; done
[[ -n "${MODEL:-}" ]] && words+=(--model "$MODEL")
[[ -n "${DATA:-}" ]] && words+=(--data "$DATA")
[[ -n "${LIMIT:-}" ]] && words+=(--limit "$LIMIT")
[[ -e "$out/run.json" ]] && words+=(--resume)  # a re-run of the job goes on
eval "extra=(${ARGS:-})"
evals "${words[@]}" "${extra[@]}"
code=$?

names=([0]=PASS [1]=FAIL [3]=INCONCLUSIVE [4]=INVALID [5]=CHANGED)
state="${names[$code]:-ERROR}"
if [[ -n "${GITHUB_OUTPUT:-}" ]]; then
  printf 'code=%s\nstate=%s\nfolder=%s\n' "$code" "$state" "$out" >>"$GITHUB_OUTPUT"
fi
echo "moe-parity: $state (exit code $code), reports in $out"
exit "$code"
