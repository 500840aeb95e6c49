#!/bin/sh
# preStop of a worker pod: drain this node, then wait until no replica runs here, for at most $1 seconds.
# Serve starts replacements on other nodes first; if it can't, it stops the replicas here in time for them to drain.
# $2: where the processes are listed, if not in /proc.
set -u
limit_s=$1
processes=${2:-/proc}
end=$(($(date +%s) + limit_s))

ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION --reason-message "the pod is being stopped" \
  --deadline-remaining-seconds "$limit_s" || exit 1

# The brackets keep grep from finding itself.
while grep -qas 'ray::ServeReplic[a]' "$processes"/[0-9]*/cmdline; do
  [ "$(date +%s)" -lt "$end" ] || { echo "replicas still run after $limit_s s" >&2; exit 1; }
  sleep 1
done
