#!/bin/sh
# Leaves the Ray cluster in order: tells Ray that this node is about to go, and waits until it has gone, or for SECONDS.
# Jobs get a notice, as from a cloud, and move their ranks away; the node's raylet ends by itself once it is idle.
# Wants RAY_ADDRESS, and the token where RAY_AUTH_MODE is token.
set -eu
seconds=${1:?usage: leave.sh SECONDS}
end=$(($(date +%s) + seconds))
ray drain-node --reason=DRAIN_NODE_REASON_PREEMPTION --reason-message="the node is being stopped" \
    --deadline-remaining-seconds="$seconds"
while [ "$(date +%s)" -lt "$end" ] && grep -qsx raylet /proc/[0-9]*/comm; do
    sleep 1
done
