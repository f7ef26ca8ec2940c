#!/usr/bin/env bash
# Runs an engine's server in its own container until its arm is answered, then ends with status 0, so that the next
# service (depends_on: service_completed_successfully) gets the GPUs. With STAY=1 it serves until it is stopped.
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

log="${LOGS:-/logs}/$ARM.log"
done_file="${RUNS:-/runs}/${RUN:-latest}.$ARM.done"
rm -f "$done_file"
"${server[@]}" "${extra[@]}" >"$log" 2>&1 &
pid=$!
trap 'kill -TERM "$pid" 2>/dev/null; wait "$pid" || true; exit 0' TERM INT

while kill -0 "$pid" 2>/dev/null; do
  if [[ -z "${STAY:-}" && -e "$done_file" ]]; then
    echo "$ARM is answered; the server ends"
    kill -TERM "$pid"
    wait "$pid" || true
    exit 0
  fi
  sleep 1
done
status=0
wait "$pid" || status=$?
echo "the server of $ARM ended by itself (status $status); end of $log:" >&2
tail -n 40 "$log" >&2
exit "$((status == 0 ? 1 : status))"
