#!/usr/bin/env bash
# Runs the tests that depend on transformers against each supported version of it, every one in a
# virtual environment of its own under .venvs/, which is kept and reused.
#
#   scripts/test_versions.sh                          the oldest, a middle and the newest version
#   scripts/test_versions.sh 5.17.0 -- -k checkpoint  one version, with arguments for pytest
#
# PYTHON names the interpreter (python3 by default). Whatever else is needed comes from
# constraints.txt, so that only transformers differs. Exits nonzero if any version fails.
set -euo pipefail
cd "$(dirname "$0")/.."
# The errors in docs/families.md are the worst of every way of sharing.
export FORKPOINT_FULL_PRODUCTS=1

newest=$(sed -n "s/^transformers==//p" constraints.txt)
DEFAULT_VERSIONS=(5.10.4 5.17.0 "$newest")
TESTS=(
  tests/integration/test_hosts_transformers.py
  tests/integration/test_hosts_adapters.py
  tests/integration/test_hosts_leave_no_trace.py
  tests/integration/test_refusals.py
  tests/integration/test_silent_models.py
  tests/integration/test_acceptance.py
  tests/integration/test_verify.py
  tests/integration/test_verify_experts.py
  tests/integration/test_hybrid.py
  tests/integration/test_hybrid_refusals.py
  tests/integration/test_hybrid_compiled.py
  tests/numerics/test_families.py
  tests/fuzz/test_fuzz.py
)

versions=()
while [[ $# -gt 0 && $1 != -- ]]; do
  versions+=("$1")
  shift
done
[[ ${1:-} == -- ]] && shift
[[ ${#versions[@]} -gt 0 ]] || versions=("${DEFAULT_VERSIONS[@]}")

rows=$(mktemp)
trap 'rm -f "$rows"' EXIT
export FORKPOINT_FAMILIES_ROWS=$rows

failed=()
for version in "${versions[@]}"; do
  venv=.venvs/transformers-$version
  python=$venv/bin/python
  stamp=$venv/installed
  if ! cmp -s constraints.txt "$stamp"; then
    echo "== transformers $version: installing into $venv"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    grep -v '^transformers==' constraints.txt >"$venv/constraints.txt"
    "$python" -m pip install --quiet --quiet --constraint "$venv/constraints.txt" \
      "transformers==$version" torch peft accelerate hypothesis pytest pytest-timeout --editable .
    cp constraints.txt "$stamp"
  fi
  echo "== transformers $("$python" -c 'import transformers; print(transformers.__version__)')"
  "$python" -m pytest -q -p no:cacheprovider "${TESTS[@]}" "$@" || failed+=("$version")
done

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed with transformers ${failed[*]}"
  exit 1
fi
# A whole run rewrites the table of docs/families.md; a part of one would leave columns out.
if [[ $# -eq 0 && ${versions[*]} == "${DEFAULT_VERSIONS[*]}" ]]; then
  "$python" tests/numerics/families_table.py "$rows"
fi
echo "passed with transformers ${versions[*]}"
