#!/usr/bin/env bash
# Ends with the verdict's exit code, or 0 when $ACCEPT names it.
code="${CODE:-2}"
for accepted in ${ACCEPT:-0}; do
  if [[ "$accepted" == "$code" ]]; then
    echo "${STATE:-?} (exit code $code) is accepted"
    exit 0
  fi
done
echo "::error title=moe-parity::${STATE:-ERROR} (exit code $code); accepted: ${ACCEPT:-0}"
exit "$code"
