#!/usr/bin/env bash
# Qwen/Qwen3.6-27B on 8 x RTX PRO 6000 Blackwell: 8 engines of 1 GPU, at most 96 requests in each, about 8,700 tokens/s.
# Plain Ray, on 1 machine with 8 GPUs each, in a folder that all of them share:
#   regenerate run run.yaml          is enough on one machine: it starts a Ray of its own. Or else:
#   ./ray.sh head HEAD_IP            on the first machine; its address, as the others reach it
#   ./ray.sh worker HEAD_IP          on each other machine, with the head's ~/.ray/auth_token
#   ./ray.sh submit                  on the head, when all machines have joined
# `ray job stop ID` on the head flushes finished rows and stops the engines; submit again to resume.
set -euo pipefail
cd "$(dirname "$0")"
case ${1:-} in
  head|worker)
    export RAY_JOB_STOP_WAIT_TIME_S=30    # longer than cluster.drain_timeout_s
    exec ./node.sh "$1" "${2:?the address of the head}" --num-gpus=8
    ;;
  submit)
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
    exec ray job submit --address=http://127.0.0.1:8265 --submission-id="qwen3-6-27b-rtx-pro-6000-x8-$(date +%s)" \
      -- regenerate run "$PWD/run.yaml"
    ;;
  *)
    echo "usage: ray.sh head HEAD_IP | worker HEAD_IP | submit" >&2
    exit 2
    ;;
esac
