#!/usr/bin/env bash
# Fails where Cargo.toml names a dependency that no source file uses. Where cargo-machete is installed, that does it.
set -euo pipefail
cd "$(dirname "$0")/.."

if cargo machete --version >/dev/null 2>&1; then
    exec cargo machete
fi

# The keys of a section of Cargo.toml, as Rust spells them.
names() {
    awk -v section="[$1]" '
        /^\[/ { inside = ($0 == section); next }
        inside && match($0, /^[A-Za-z0-9_-]+/) { print substr($0, 1, RLENGTH) }
    ' Cargo.toml | tr - _
}

unused=0
check() { # SECTION DIRECTORY...
    local section=$1 name uses
    shift
    while read -r name; do
        # A path that begins with the crate's name, in code and not in a comment.
        uses=$(grep -rhE --include='*.rs' "(^|[^A-Za-z0-9_:])$name(::|;| as )" "$@" | grep -cvE '^[[:space:]]*//' || true)
        if [ "$uses" = 0 ]; then
            echo "check: Cargo.toml: [$section] $name is not used in $*" >&2
            unused=1
        fi
    done < <(names "$section")
}
check dependencies src
check dev-dependencies src tests
[ "$unused" = 0 ] || exit 1
echo "check: every dependency is used"
