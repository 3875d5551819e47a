#!/bin/sh
# The real SGLang on a CPU, in an environment of its own, with tiny models beside it.
# usage: install.sh FOLDER [PYTHON]
# After it FOLDER/bin/python has SGLang; it serves FOLDER/tiny-model (dense) and FOLDER/tiny-hybrid.
set -eu
folder=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)

"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check "$@"; }
pip install --no-deps -r "$here/requirements-alone.txt"
pip install --only-binary :all: -r "$here/requirements.txt"

packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/cpu_stubs.py" "$packages/sglang_cpu_stubs.py"
rm -rf "$packages/sgl_kernel"
cp -r "$here/sgl_kernel" "$packages/sgl_kernel"
echo 'import sglang_cpu_stubs' > "$packages/sglang_cpu_stubs.pth"
"$folder/bin/python" "$here/make_model.py" "$folder/tiny-model"
"$folder/bin/python" "$here/make_hybrid_model.py" "$folder/tiny-hybrid"
