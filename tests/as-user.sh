#!/usr/bin/env bash
# The tests once more, as an ordinary user whose mounts fusermount3 makes and whose daemon may do no more than he: nothing
# else shows that warpfs is as good without root. Called as root, by `make test`; an ordinary user's `make test` has done
# it already.
#
#   as-user.sh [GROUP=COUNT...]   groups of integration tests, and how many there are at least in each
#   FSX_OPERATIONS, FSX_SEEDS     as for judges/run.sh, but by default with a seed that root's run has not had
set -euo pipefail

[ $# -gt 0 ] || set -- programs::=15 parity::=11 semantics::=8
# Debian's nobody; there need not be a name for it.
user=65534

say() { echo "as-user: $*"; }
die() { say "FAILED: $*" >&2; exit 1; }

if [ "$(id -u)" != 0 ]; then
    say "you are an ordinary user: the tests ran as one already"
    exit 0
fi
# Mounts made here end with this namespace, and everybody may open its /dev/fuse, as on a workstation.
if [ "${AS_USER_NAMESPACE:-}" != "$PPID" ]; then
    AS_USER_NAMESPACE=$$ unshare --mount --propagation private "$0" "$@"
    exit
fi

tree=$(cd "$(dirname "$0")/.." && pwd)
cd "$tree"

built=$(timeout 900 cargo test --no-run --quiet --locked --message-format=json | grep '"reason":"compiler-artifact"')
# Where cargo put what has this name and kind. A program is built twice: for its own tests too.
executable() { # KIND NAME TEST
    local path
    path=$(grep -F "\"kind\":[\"$1\"]" <<<"$built" | grep -F "\"name\":\"$2\"" | grep -F "\"test\":$3},\"features\"" |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
    [ -x "$path" ] || die "cargo does not say where it built the $1 $2"
    echo "$path"
}
warpfs=$(executable bin warpfs false)
tests=$(executable test integration true)
judges=$(tests/judges/run.sh --build)
sysroot=$(rustc --print sysroot)

# /tmp, because a folder of root's own is closed to others.
work=$(mktemp -d /tmp/warpfs-as-user.XXXXXX)
cleanup() {
    local status=$?
    trap - EXIT INT TERM
    # Deepest first; a mount that a killed test left would block whoever touches it.
    awk -v below="$work/" 'index($5, below) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r place; do
        timeout 20 umount -l "$(printf '%b' "$place")" || true
    done
    rm -rf --one-file-system "$work"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT TERM

chmod 755 "$work"
mkdir "$work/tree" "$work/toolchain"
install -d -o "$user" -g "$user" -m 700 "$work/home" "$work/tmp" "$work/run"
install -m 755 "$warpfs" "$tests" "$judges/fsx" "$work"
cp -R --no-preserve=ownership docs include src tests "$work/tree"
chmod -R a+rX "$work/tree"
# The tests build on the mount, and root's toolchain may lie in root's home.
mount --bind "$sysroot" "$work/toolchain"
mknod -m 666 "$work/fuse" c 10 229
mount --bind "$work/fuse" /dev/fuse

as_user() { # SECONDS COMMAND...
    local limit=$1
    shift
    timeout --kill-after=10 "$limit" setpriv --reuid="$user" --regid="$user" --clear-groups \
        env -i -C "$work/home" PATH="$work/toolchain/bin:/usr/local/bin:/usr/bin:/bin" HOME="$work/home" \
        TMPDIR="$work/tmp" XDG_RUNTIME_DIR="$work/run" LC_ALL=C CARGO="$work/toolchain/bin/cargo" \
        WARPFS_BIN="$work/warpfs" WARPFS_ROOT="$work/tree" WARPFS_TEST_UID="$user" JUDGES="$work" \
        ${FSX_OPERATIONS:+FSX_OPERATIONS="$FSX_OPERATIONS"} FSX_SEEDS="${FSX_SEEDS:-3}" "$@"
}

for group in "$@"; do
    name=${group%=*} least=${group##*=}
    as_user 900 "$work/$(basename "$tests")" "$name" >"$work/log" 2>&1 || { cat "$work/log"; die "$name"; }
    passed=$(sed -n 's/^test result: ok\. \([0-9]*\) passed.*/\1/p' "$work/log")
    [ "${passed:-0}" -ge "$least" ] || die "$name: ${passed:-no} tests, and there are $least at least"
    say "$name $passed tests passed as user $user"
done
as_user 900 "$work/tree/tests/judges/run.sh" "$work/warpfs" || die "fsx"
say "everything passed as user $user"
