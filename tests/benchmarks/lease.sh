#!/usr/bin/env bash
# Run all measurements for a borrowed GPU machine within its time. tests/benchmarks/README.md describes them.
#
#     tests/benchmarks/lease.sh [--seconds 560] [--out DIR]    measure; DIR ($OUT) gets one tar, lease.tar.gz
#     tests/benchmarks/lease.sh --pack                         before that, here: wheels for what the machine lacks
#     tests/benchmarks/lease.sh --rehearse [FOLDER]            the same parts with tiny models on the CPU
#
# A second run on the same machine continues where the first stopped: PSCTL_LEASE_STATE (/tmp/psctl-lease) keeps results.
set -euo pipefail
started=$EPOCHREALTIME
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
state=${PSCTL_LEASE_STATE:-/tmp/psctl-lease}
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x "$repository/.venv/bin/python" ] || python=$repository/.venv/bin/python
mkdir -p "$state"
if [ -d "$repository/.lease/wheels" ] && [ ! -x "$repository/.venv/bin/python" ]; then
    [ -d "$state/site" ] || "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir \
        --disable-pip-version-check --target "$state/site" "$repository"/.lease/wheels/*.whl
    export PYTHONPATH=$state/site${PYTHONPATH:+:$PYTHONPATH}
fi
if ! "$python" -P -c 'import patchedserve' 2>/dev/null; then
    mkdir -p "$state/path"
    ln -sfn "$repository" "$state/path/patchedserve"
    export PYTHONPATH=$state/path${PYTHONPATH:+:$PYTHONPATH}
fi
module=run
[ "${1:-}" != --pack ] || { module=pack && shift; }
[ "$module" = pack ] || set -- --started "$started" --state "$state" ${OUT:+--out "$OUT"} "$@"
exec "$python" -P -m "patchedserve.tests.benchmarks.lease.$module" "$@"
