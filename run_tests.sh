#!/usr/bin/env bash
# Test: ./run_tests.sh [pytest arguments]. Sets up .venv the first time.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
meshloom_setup test
cd "$root"
exec "$PYTHON" -m pytest "$@"
