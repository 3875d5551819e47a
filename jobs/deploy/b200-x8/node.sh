#!/usr/bin/env bash
# Start Ray on this node in the foreground: first on the head, then on every other node.
#   jobs/deploy/node.sh head HEAD_IP [option of `ray start` ...]
#   jobs/deploy/node.sh worker HEAD_IP [option of `ray start` ...]
# Run it from the checkout, in the environment of `make install` or of the image.
set -euo pipefail
role=$1 head_ip=$2
shift 2
port=${RAY_PORT:-6379}

# Time that `ray job stop` waits for a run to flush; longer than cluster.drain_timeout_s.
export RAY_JOB_STOP_WAIT_TIME_S=${RAY_JOB_STOP_WAIT_TIME_S:-30}
export RAY_USAGE_STATS_ENABLED=0
# By default workers are nicer than the engines that they have to keep busy.
export RAY_worker_niceness=${RAY_worker_niceness:-0}
# Anyone who reaches an open cluster can run code on it. All nodes and the driver share a token, in
# RAY_AUTH_TOKEN or in ~/.ray/auth_token, which the head creates. RAY_AUTH_MODE=disabled: no token.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}

if [ "$role" = head ]; then
  if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    # Whoever reads the token can run code as this user.
    (umask 077 && ray get-auth-token --generate >/dev/null)
    [ ! -f "$token" ] || chmod go= "$token"
  fi
  # The dashboard accepts jobs and listens only on loopback: submit on the head, or through a tunnel.
  exec ray start --head --block --node-ip-address="$head_ip" --port="$port" "$@"
fi
# Wait for the head; Ray itself times out after half a minute.
until (exec 3<>"/dev/tcp/$head_ip/$port") 2>/dev/null; do
  sleep 2
done
if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -f "$token" ]; then
  echo "node.sh: no token: copy $token from the head, or set RAY_AUTH_TOKEN" >&2
  exit 2
fi
exec ray start --block --address="$head_ip:$port" "$@"
