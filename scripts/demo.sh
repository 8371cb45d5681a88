#!/usr/bin/env bash
# Shows what the guard is for on real SGLang servers, without and with it; about five minutes on two cores.
#
#   scripts/demo.sh
#
# Ends with 0 if everything came out as said. The first run builds the environment (scripts/env.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

rig_home=$(scripts/env.sh 0.5.19 0.5.23)
export PD_GUARD_RIG_HOME=$rig_home
exec "$rig_home/venv/bin/python" scripts/demo.py "$@"
