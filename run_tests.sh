#!/usr/bin/env bash
# Test: ./run_tests.sh [pytest arguments]. Sets up .venv the first time. MESHLOOM_TEST_FILES: files at once (2).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
meshloom_setup test
cd "$root"
"$PYTHON" -m ruff check -q . && "$PYTHON" -m ruff format -q --check . || {
    echo "error: run ruff check --fix . and ruff format ." >&2
    exit 1
}
# Some hundred processes are started: none has to compile our files again, even where Python may not write bytecode.
"$PYTHON" -m compileall -q models parallelize trainer tests benchmarks
# Two files at once fill two cores; the processes that a test starts get one thread each, since OpenMP's threads wait
# for each other by spinning and crawl where others want their cores too.
export OMP_NUM_THREADS=1
exec "$PYTHON" -m pytest -n "${MESHLOOM_TEST_FILES:-2}" --dist loadfile "$@"
