#!/usr/bin/env bash
# Runs tests with three versions of transformers, and with the oldest and the newest torch. Each has
# a virtual environment under .venvs/, which is kept and reused.
#
#   scripts/test_versions.sh                          all versions of TRANSFORMERS and TORCH below
#   scripts/test_versions.sh torch==2.14.1            one version
#   scripts/test_versions.sh 5.17.0 -- -k checkpoint  one of transformers, with pytest's arguments
#
# PYTHON names the interpreter (python3 by default). Whatever else is needed comes from
# constraints.txt, so that only one library differs. Exits nonzero if any version fails.
set -euo pipefail
cd "$(dirname "$0")/.."

newest=$(sed -n "s/^transformers==//p" constraints.txt)
TRANSFORMERS=(transformers==5.10.4 transformers==5.17.0 "transformers==$newest")
# The oldest that pyproject.toml allows, and the newest; constraints.txt has one between them.
TORCH=(torch==2.11.0 torch==2.15.0)
# Steps and refusals of models of transformers.
TRANSFORMERS_TESTS=(
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
  tests/integration/test_multimodal.py
  tests/integration/test_images.py
  tests/integration/test_image_steps.py
  tests/numerics/test_families.py
  tests/fuzz/test_fuzz.py
)
# The whole of `make test`, `make test-slow` and `make test-ranks`.
TORCH_TESTS=(-m "not gpu and not multi_gpu and not examples" -n "${WORKERS:-2}" --dist worksteal tests)

versions=()
while [[ $# -gt 0 && $1 != -- ]]; do
  case $1 in
    torch==* | transformers==*) versions+=("$1") ;;
    [0-9]*) versions+=("transformers==$1") ;;
    *)
      echo "\"$1\" is no version: give torch==2.14.1, transformers==5.17.0 or 5.17.0" >&2
      exit 2
      ;;
  esac
  shift
done
[[ ${1:-} == -- ]] && shift
every=("${TRANSFORMERS[@]}" "${TORCH[@]}")
[[ ${#versions[@]} -gt 0 ]] || versions=("${every[@]}")

rows=$(mktemp)
trap 'rm -f "$rows"' EXIT

failed=()
for version in "${versions[@]}"; do
  library=${version%%==*}
  venv=.venvs/$library-${version##*==}
  python=$venv/bin/python
  stamp=$venv/installed
  if ! cmp -s constraints.txt "$stamp"; then
    echo "== $version: installing into $venv"
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    grep -v "^$library==" constraints.txt >"$venv/constraints.txt"
    "$python" -m pip install --quiet --quiet --constraint "$venv/constraints.txt" "$version" \
      torch transformers peft accelerate pyarrow hypothesis pytest pytest-timeout pytest-xdist \
      --editable ".[report,zstd]"
    cp constraints.txt "$stamp"
  fi
  installed=$("$python" -m pip list --format freeze | grep -E '^(torch|transformers)==')
  echo "== ${installed//$'\n'/, }"
  pytest=("$python" -m pytest -q -p no:cacheprovider)
  if [[ $library == torch ]]; then
    OMP_NUM_THREADS=1 "${pytest[@]}" "${TORCH_TESTS[@]}" "$@" || failed+=("$version")
  else
    # The errors in docs/reference/families.md are the worst of these rows.
    FORKPOINT_FAMILIES_ROWS=$rows \
      "${pytest[@]}" "${TRANSFORMERS_TESTS[@]}" "$@" || failed+=("$version")
  fi
done

if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed with ${failed[*]}"
  exit 1
fi
# A whole run rewrites the table of docs/reference/families.md; a part of one would leave columns out.
if [[ $# -eq 0 && ${versions[*]} == "${every[*]}" ]]; then
  "$python" tests/numerics/families_table.py "$rows"
fi
echo "passed with ${versions[*]}"
