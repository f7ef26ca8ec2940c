#!/usr/bin/env bash
# Runs an engine's server in its own container until its arm is answered, then ends with status 0, so that the next
# service (depends_on: service_completed_successfully) gets the GPUs. With STAY=1 it serves until it is stopped.
# A server that ends by itself leaves code 2 for the judge, and /health is answered in its stead: Compose would otherwise
# stop with an exit code of its own, which looks like a verdict.
# Environment: ENGINE sglang|vllm, ARM baseline|candidate, PORT, KERNEL, MODEL, TP, RUN, ENGINE_ARGS, STAY.
set -euo pipefail

read -r -a extra <<<"${ENGINE_ARGS:-}"
case "$ENGINE" in
  sglang) server=(python3 -m sglang.launch_server --model-path "$MODEL" --tp-size "$TP" --moe-runner-backend "$KERNEL"
                  --host 0.0.0.0 --port "$PORT" --disable-radix-cache) ;;
  vllm) server=(vllm serve "$MODEL" --tensor-parallel-size "$TP" --moe-backend "$KERNEL" --host 0.0.0.0 --port "$PORT"
                --generation-config vllm --no-enable-prefix-caching) ;;
  *) echo "ENGINE must be sglang or vllm, not '$ENGINE'" >&2; exit 2 ;;
esac

run="${RUNS:-/runs}/${RUN:-latest}"
log="${LOGS:-/logs}/$ARM.log"
pid=
trap '[[ -n "$pid" ]] && kill -TERM "$pid" 2>/dev/null; wait || true; exit 0' TERM INT

until_answered() {  # while process $pid lives
  while kill -0 "$pid" 2>/dev/null; do
    if [[ -z "${STAY:-}" && -e "$run.$ARM.answered" ]]; then
      echo "$ARM is answered; the server ends"
      kill -TERM "$pid"
      wait "$pid" || true
      exit 0
    fi
    sleep 1
  done
}

stand_in() {  # healthy, and nothing else: the judge reads the code and ends
  mkdir -p /tmp/stand-in && : >/tmp/stand-in/health
  python3 -m http.server "$PORT" --directory /tmp/stand-in >/dev/null 2>&1 &
  pid=$!
  until_answered
  exit 1
}

if [[ "$ARM" == baseline ]]; then
  rm -f "$run".{baseline,candidate}.{answered,code}
elif [[ -s "$run.baseline.code" && "$(<"$run.baseline.code")" != 0 ]]; then
  echo "the baseline ended with code $(<"$run.baseline.code"); the candidate is not started"
  stand_in
fi

"${server[@]}" "${extra[@]}" >"$log" 2>&1 &
pid=$!
until_answered
status=0
wait "$pid" || status=$?
{
  echo "the server of $ARM ended by itself (status $status); end of $log:"
  tail -n 40 "$log"
} >&2
echo 2 >"$run.$ARM.code"
stand_in
