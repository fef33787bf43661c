#!/usr/bin/env bash
# Test: ./run_tests.sh [pytest arguments]. Sets up .venv the first time.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
meshloom_setup test
cd "$root"
# Some hundred processes are started: none has to compile our files again, even where Python may not write bytecode.
"$PYTHON" -m compileall -q models parallelize trainer tests benchmarks
exec "$PYTHON" -m pytest "$@"
