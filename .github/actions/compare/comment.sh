#!/usr/bin/env bash
# Posts $OUT/report.md on pull request $PR of $REPO with the `gh` command; a later run edits the same comment.
set -euo pipefail

body="$(mktemp)"
marker="<!-- moe-parity -->"
{
  echo "$marker"
  if [[ -s "$OUT/report.md" ]]; then
    cat "$OUT/report.md"
  else
    echo "moe-parity could not judge this change (${STATE:-ERROR}); see the job's log."
  fi
} >"$body"
id="$(gh api "repos/$REPO/issues/$PR/comments" --paginate \
  --jq "map(select(.body | startswith(\"$marker\"))) | .[0].id // empty" | head -n 1)"
if [[ -n "$id" ]]; then
  gh api --method PATCH "repos/$REPO/issues/comments/$id" -F "body=@$body" >/dev/null
else
  gh api --method POST "repos/$REPO/issues/$PR/comments" -F "body=@$body" >/dev/null
fi
