#!/usr/bin/env bash
# Known vulnerabilities of the versions in constraints.txt, by pip-audit, in an environment of its own: `audit.sh FOLDER`.
# Fails where there are any. Where the vulnerability service cannot be reached, as on machines with package registries
# alone, one line says so, and nothing fails.
set -euo pipefail
environment=$1
if [ ! -x "$environment/bin/pip-audit" ]; then
    python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet pip-audit || { echo "audit left out: pip finds no pip-audit"; exit 0; }
fi
if found=$(timeout 300 "$environment/bin/pip-audit" --vulnerability-service osv --timeout 10 --progress-spinner off \
    --disable-pip --no-deps --requirement constraints.txt 2>&1); then
    echo "$found"
elif grep --quiet --extended-regexp "^Found [0-9]+ known vulnerabilit" <<<"$found"; then
    echo "$found"
    exit 1
else
    echo "audit left out, as the vulnerability service did not answer: ${found##*$'\n'}" | cut --characters=-160
fi
