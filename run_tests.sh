#!/usr/bin/env bash
# Test: ./run_tests.sh [pytest arguments]. Sets up .venv the first time. One file of tests a core, at most 4 at once.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
meshloom_setup test
cd "$root"
exec "$PYTHON" -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder "$@"
