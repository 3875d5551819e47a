#!/bin/sh
# The real SGLang on a CPU, in an environment of its own, with a tiny model beside it.
# usage: install.sh FOLDER [PYTHON]
# After it FOLDER/bin/python has SGLang, and FOLDER/tiny-model is what it serves.
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
cp "$here/sgl_kernel.py" "$packages/sgl_kernel.py"
echo 'import sglang_cpu_stubs' > "$packages/sglang_cpu_stubs.pth"
"$folder/bin/python" "$here/make_model.py" "$folder/tiny-model"
