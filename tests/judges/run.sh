#!/usr/bin/env bash
# Two judges from outside: pjdfstest (POSIX semantics; needs root) and fsx (data under random operations, mappings among
# them). Both run on a native directory and on the mount, with passthrough and without, and the mount has to do as the
# directory does, test by test.
#
#   run.sh [PROGRAM]            default: target/debug/warpfs
#   run.sh --build              only builds the judges, and says in which folder
#   JUDGES                      a folder that has them: nothing is built
#   FSX_OPERATIONS, FSX_SEEDS   default: 200000 operations for each of "1 2"
set -euo pipefail

PJDFSTEST=0.2.2
FSX=0.3.2
# The one difference: the C library answers pathconf(_PC_LINK_MAX) by the file system's type, and knows no number for
# FUSE, so this test has nothing to ask.
SKIPPED_ON_FUSE='link::link_count_max'

here=$(cd "$(dirname "$0")" && pwd)
target=${CARGO_TARGET_DIR:-$here/../../target}

if [ -n "${JUDGES:-}" ]; then
    tools=$JUDGES
else
    mkdir -p "$target/judges"
    target=$(realpath "$target")
    tools=$target/judges/bin
    # Built once, by exact version; cargo does nothing where they are there.
    for tool in "pjdfstest@$PJDFSTEST" "fsx@$FSX"; do
        CARGO_TARGET_DIR=$target/judges/build timeout 900 cargo install --quiet --locked --root "$target/judges" "$tool"
    done
fi
if [ "${1:-}" = --build ]; then
    echo "$tools"
    exit 0
fi
warpfs=$(realpath "${1:-$target/debug/warpfs}")

work=$(mktemp -d "${TMPDIR:-/tmp}/warpfs-judges.XXXXXX")
chmod 755 "$work"
mount_point=$work/mount
mkdir -m 777 "$work/native" "$work/source" "$mount_point"

is_mounted() { grep -qF " $mount_point fuse" /proc/self/mounts; }
cleanup() {
    local status=$?
    trap - EXIT INT TERM
    if is_mounted; then
        timeout 30 "$warpfs" umount "$mount_point" 2>/dev/null || timeout 20 umount -l "$mount_point" ||
            timeout 20 fusermount3 -uz "$mount_point" || true
    fi
    is_mounted || { rmdir "$mount_point" && rm -rf --one-file-system "$work"; }
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

failed=0
fail() {
    echo "judges: FAILED: $*" >&2
    failed=$((failed + 1))
}

# Each test with its result, without the summary.
results() { sed -nE 's/^([a-z_0-9:]+) +(ok|skipped|FAILED|failed).*$/\1 \2/p' "$1" | sort; }

pjdfstest() { # DIRECTORY NAME
    timeout 600 "$tools/pjdfstest" -c "$here/pjdfstest.toml" -p "$1" >"$work/$2.log" 2>&1 || true
    grep '^Summary:' "$work/$2.log" | sed "s/^/judges: pjdfstest, $2: /" || fail "pjdfstest, $2: no summary"
    results "$work/$2.log" >"$work/$2.results"
}

# The seeds side by side, each on a file of its own.
fsx() { # DIRECTORY NAME
    local seed pids=()
    for seed in ${FSX_SEEDS:-1 2}; do
        timeout 900 "$tools/fsx" -q -f "$here/fsx.toml" -N "${FSX_OPERATIONS:-200000}" -S "$seed" -P "$work" \
            "$1/fsx.$seed" >"$work/fsx.$seed.log" 2>&1 &
        pids+=("$!:$seed")
    done
    for pid in "${pids[@]}"; do
        seed=${pid#*:}
        if wait "${pid%:*}"; then
            echo "judges: fsx, $2, seed $seed: ${FSX_OPERATIONS:-200000} operations, no difference"
        else
            tail -n 5 "$work/fsx.$seed.log" >&2
            fail "fsx, $2, seed $seed"
        fi
    done
}

root=no
# An ordinary user has no passthrough to leave out.
modes=(ordinary-user)
if [ "$(id -u)" = 0 ]; then
    root=yes
    modes=(passthrough no-passthrough)
    pjdfstest "$work/native" native
    [ -s "$work/native.results" ] || fail "pjdfstest says nothing of a native directory"
else
    echo "judges: pjdfstest needs root, which changes users; left out"
fi

for mode in "${modes[@]}"; do
    options=(--device host)
    [ "$root" = no ] || options+=(--allow-other)
    [ "$mode" != no-passthrough ] || options+=(--no-passthrough)
    timeout 60 "$warpfs" mount "$work/source" "$mount_point" "${options[@]}" >/dev/null
    if [ "$root" = yes ]; then
        pjdfstest "$mount_point" "$mode"
        grep -v "^$SKIPPED_ON_FUSE " "$work/native.results" >"$work/expected"
        if ! diff "$work/expected" <(grep -v "^$SKIPPED_ON_FUSE " "$work/$mode.results"); then
            fail "pjdfstest, $mode: other results than natively"
        fi
    fi
    fsx "$mount_point" "$mode"
    timeout 30 "$warpfs" umount "$mount_point"
done

[ "$failed" = 0 ] || exit 1
echo "judges: the mount does as the directory does"
