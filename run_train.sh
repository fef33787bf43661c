#!/usr/bin/env bash
# Train: ./run_train.sh [--config C] [--nproc N] [--section.key=value ...]   (--help lists every key)
# Without arguments, trains the debug model on the bundled text. Sets up .venv the first time.
# Several machines: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT in the environment.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
meshloom_setup run
exec "$PYTHON" -m trainer.launch "$@"
