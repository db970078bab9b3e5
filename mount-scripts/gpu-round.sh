#!/usr/bin/env bash
# Everything that only a machine with a GPU can show, in one run and without cargo: the integration tests on the device,
# how fast a first load is, how fast a second process attaches, what the GPU's memory says, and a model's directory.
#
# Settings, all from the environment:
#   WARPFS_BIN         the program (default: target/release/warpfs)
#   WARPFS_TEST_BIN    the integration tests' binary; without it that step is left out, and said to be
#   WARPFS_ROOT, WARPFS_PREBUILT   where the tests find the repository and compiled C programs, if elsewhere
#   DEVICE             default cuda:0; host runs the same without a GPU
#   OUT                folder of the results (default: ./gpu-round); summary.txt is the one to read
#   MODEL_DIR          a directory whose every file is loaded, verified and compared; without it that step is left out
#   WARPFS_BENCH_DIR   where the large file goes (default: /tmp); a disk's file system, not tmpfs
#   SIZE_MIB           bytes of the large file in MiB (default: 4096)
#   REPEATS            loads and attaches to measure (default: 5)
#   IDLE_SECONDS       how long to leave the device alone before looking at its memory (default: 65)
#   TEST_SECONDS       limit for the tests (default: 400)
#
# A step that fails does not stop the others; the exit status is then 1.
set -uo pipefail

repository=$(cd "$(dirname "$0")/.." && pwd)
WARPFS_BIN=$(realpath "${WARPFS_BIN:-$repository/target/release/warpfs}")
WARPFS_TEST_BIN=${WARPFS_TEST_BIN:-}
DEVICE=${DEVICE:-cuda:0}
OUT=${OUT:-./gpu-round}
MODEL_DIR=${MODEL_DIR:-}
BENCH_DIR=${WARPFS_BENCH_DIR:-/tmp}
SIZE_MIB=${SIZE_MIB:-4096}
REPEATS=${REPEATS:-5}
IDLE_SECONDS=${IDLE_SECONDS:-65}
TEST_SECONDS=${TEST_SECONDS:-400}
export WARPFS_BIN
# So that cuda:N and nvidia-smi's index N are the same GPU.
export CUDA_DEVICE_ORDER=PCI_BUS_ID

[ -x "$WARPFS_BIN" ] || { echo "gpu-round: no program at $WARPFS_BIN; set WARPFS_BIN" >&2; exit 2; }
mkdir -p "$OUT" && OUT=$(realpath "$OUT") || exit 2
rm -f "$OUT"/{machine,tests,load,attach,memory,model}.log "$OUT/summary.txt"

work=$(mktemp -d "$BENCH_DIR/warpfs-gpu-round.XXXXXX") || exit 2
source_dir=$work/source
mount_point=$work/mount
big=$mount_point/big.bin
mkdir "$source_dir" "$mount_point"

failed=0
sum() { echo "$*" | tee -a "$OUT/summary.txt"; }
warpfs() { timeout "${limit:-120}" "$WARPFS_BIN" "$@"; }

# Runs a function that stops at its first error, with everything it prints in a log; ok says how it went. Never call it
# in a condition: bash would then not stop at errors inside.
ok=
step() { # NAME LOG FUNCTION ARGUMENT...
    local name=$1 log=$OUT/$2.log begun=$SECONDS status
    shift 2
    echo "--- $name" >>"$log"
    ok=yes
    (set -e; "$@") >>"$log" 2>&1
    status=$?
    if [ "$status" != 0 ]; then
        ok=no
        failed=$((failed + 1))
        sum "FAILED: $name (status $status, $((SECONDS - begun)) s): $(tail -n 1 "$log" | cut -c 1-300)"
    fi
}

# Asks the kernel's list and not the mount, which may be dead.
is_mounted() { grep -qF " ${mount_point// /\\040} fuse" /proc/self/mounts; }

unmount() {
    is_mounted || return 0
    limit=20 warpfs umount "$mount_point" && ! is_mounted && return 0
    timeout 20 fusermount3 -uz "$mount_point" 2>/dev/null || timeout 20 umount -l "$mount_point"
    return 1
}

cleanup() {
    local status=$?
    trap - EXIT INT TERM
    unmount >/dev/null 2>&1
    # Never through a mount that is still there.
    if ! is_mounted; then
        rmdir "$mount_point" && rm -rf --one-file-system "$work"
    fi
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# The value of a number or string in one line of JSON.
json_value() { sed -n "s/.*\"$1\": *\"\{0,1\}\([^,\"}]*\).*/\1/p" | head -n 1; }
# Of the daemon's first device.
stat_of() { timeout 10 cat "$mount_point/.warpfs/stats" | json_value "$1"; }

# What nvidia-smi says of the (first) GPU in use; nothing where there is none to ask about.
ask_gpu() { # FIELDS
    [[ $DEVICE == cuda:* ]] || return 0
    local index=${DEVICE#cuda:}
    timeout 60 nvidia-smi -i "${index%%,*}" --query-gpu="$1" --format=csv,noheader,nounits
}

# ------------------------------------------------------------------------------------------------------------- machine

machine() {
    date -u +%Y-%m-%dT%H:%M:%SZ
    "$WARPFS_BIN" --version
    echo "kernel: $(uname -srm)"
    echo "cores: $(nproc)"
    free -g
    df -hT "$BENCH_DIR"
    local config passthrough=unknown
    config=/boot/config-$(uname -r)
    if [ -r "$config" ]; then
        passthrough=$(grep CONFIG_FUSE_PASSTHROUGH "$config" || echo "not in this kernel")
    elif [ -r /proc/config.gz ]; then
        passthrough=$(zcat /proc/config.gz | grep CONFIG_FUSE_PASSTHROUGH || echo "not in this kernel")
    fi
    echo "FUSE passthrough: $passthrough"
    ls -l /dev/fuse
    if [[ $DEVICE == cuda:* ]]; then
        timeout 60 nvidia-smi -L
        timeout 60 nvidia-smi --query-gpu=index,name,driver_version,memory.total,memory.used,pcie.link.gen.current \
            --format=csv
    fi
}

sum "device: $DEVICE"
step "machine" machine machine
sum "machine: $(nproc) cores, kernel $(uname -r), $(grep '^FUSE passthrough:' "$OUT/machine.log")"
if [[ $DEVICE == cuda:* ]]; then
    sum "GPU: $(ask_gpu name,driver_version,memory.total)"
fi

# --------------------------------------------------------------------------------------------------------------- tests

run_tests() {
    WARPFS_TEST_DEVICE=$DEVICE timeout --kill-after=20 "$TEST_SECONDS" "$WARPFS_TEST_BIN" --test-threads=2
}

# Adds up libtest's closing lines.
count_tests() {
    awk '
        /^test result:/ {
            lines++
            for (i = 2; i <= NF; i++) {
                if ($i ~ /^passed/) passed += $(i - 1)
                if ($i ~ /^failed/) failed += $(i - 1)
            }
        }
        END { if (lines) printf "%d passed, %d failed\n", passed, failed; else print "no closing line" }
    ' "$OUT/tests.log"
}

if [ -n "$WARPFS_TEST_BIN" ]; then
    begun=$SECONDS
    step "integration tests" tests run_tests
    sum "tests: $(count_tests), in $((SECONDS - begun)) s"
    # A long log is cut in the middle, where the least is said.
    if [ "$(wc -c <"$OUT/tests.log")" -gt 400000 ]; then
        { head -c 200000 "$OUT/tests.log"; printf '\n[...]\n'; tail -c 200000 "$OUT/tests.log"; } >"$work/cut"
        mv "$work/cut" "$OUT/tests.log"
    fi
else
    sum "tests: left out, WARPFS_TEST_BIN is not set"
fi

# --------------------------------------------------------------------------------------------------------- first loads

make_file() {
    local bytes=$((SIZE_MIB << 20)) file=$source_dir/big.bin
    # The generator is cut off by head, and says so.
    if command -v openssl >/dev/null; then
        { timeout 300 openssl enc -aes-256-ctr -pass pass:warpfs -nosalt -in /dev/zero 2>/dev/null || true; } |
            head -c "$bytes" >"$file"
    else
        head -c "$bytes" /dev/urandom >"$file"
    fi
    [ "$(stat -c %s "$file")" = "$bytes" ]
    # A file that is still on its way to the disk is not what is measured.
    timeout 300 sync "$file"
    timeout 300 cat "$file" >/dev/null
}

mount_it() { # SOURCE
    limit=60 warpfs mount "$1" "$mount_point" --device "$DEVICE"
    is_mounted
}

# Loads the large file once and adds "LABEL SECONDS GBPS" to the results.
load_once() { # LABEL
    local line bytes seconds
    line=$(limit=300 warpfs preload --json "$big")
    echo "$1: $line"
    bytes=$(json_value bytes <<<"$line")
    seconds=$(json_value seconds <<<"$line")
    [ "$bytes" = "$((SIZE_MIB << 20))" ]
    awk -v label="$1" -v b="$bytes" -v s="$seconds" 'BEGIN { printf "%s %.4f s %.2f GB/s\n", label, s, b / s / 1e9 }' \
        >>"$work/loads"
}

evict() { warpfs evict "$big"; }

load_again() {
    for ((i = 1; i <= REPEATS; i++)); do
        evict
        # The page cache must have the file, or the disk is measured.
        cat "$source_dir/big.bin" >/dev/null
        load_once "warm-loader"
    done
}

verify_big() { limit=300 warpfs verify "$big"; }

memory() { # LABEL
    local mib used=-
    mib=$(ask_gpu memory.used)
    if is_mounted; then used=$(stat_of used); fi
    echo "$1: GPU ${mib:--} MiB in use, copies $used bytes"
}

# How long a second process needs from a path to a mapped address, in milliseconds. The hidden command attach-time opens
# a session, takes a context, attaches, and attaches again, and prints each step's time.
attach_time() {
    local before after i
    before=$(stat_of used)
    for ((i = 1; i <= REPEATS; i++)); do
        limit=120 warpfs attach-time "$big" | tee -a "$work/attaches"
    done
    after=$(stat_of used)
    echo "copies before $before, after $after bytes"
    [ -n "$before" ] && [ "$before" = "$after" ]
}

# "least / median / most" of the numbers on stdin
spread() {
    sort -g | awk '
        { value[NR] = $1 }
        END { if (NR) printf "%s / %s / %s", value[1], value[int((NR + 1) / 2)], value[NR]; else printf "none" }
    '
}

step "make the large file" load make_file
step "before the mount" memory memory "before the mount"
step "mount" load mount_it "$source_dir"
if [ "$ok" = yes ]; then
    step "after the mount" memory memory "after the mount"
    step "first load, with the start of a loader" load load_once "cold-loader"
    step "after the first load" memory memory "after the first load"
    step "loads by a running loader" load load_again
    step "verify" load verify_big
    [ "$ok" = no ] || sum "verify: all $((SIZE_MIB << 20)) bytes on the device equal the file's"
    step "attach" attach attach_time
    step "after the attaches" memory memory "after the attaches"
    sleep "$IDLE_SECONDS"
    step "idle" memory memory "after $IDLE_SECONDS s idle"
    step "evict" load evict
    step "after evict" memory memory "after evict"
    step "load after idling, with the start of a loader" load load_once "cold-loader"
    step "unmount" load unmount
    sleep 1
    step "after the unmount" memory memory "after the unmount"
fi
if [ -s "$work/loads" ]; then
    sum "file: $((SIZE_MIB << 20)) bytes, in the page cache, on $(stat -f -c %T "$source_dir")"
    while read -r line; do sum "load: $line"; done <"$work/loads"
    rates=$(awk '$1 == "warm-loader" { print $4 }' "$work/loads" | spread)
    sum "load, running loader, GB/s, least / median / most: $rates"
fi
if [ -s "$work/attaches" ]; then
    for phase in session_ms context_ms attach_ms again_ms; do
        times=$(while read -r line; do json_value "$phase" <<<"$line"; done <"$work/attaches" | spread)
        sum "attach, $phase, least / median / most: $times"
    done
fi
[ ! -s "$OUT/memory.log" ] || grep ': GPU ' "$OUT/memory.log" | while read -r line; do sum "memory $line"; done

# --------------------------------------------------------------------------------------------------------------- model

model_round() {
    local file name count=0 bytes=0
    mount_it "$(realpath "$MODEL_DIR")"
    while IFS= read -r -d '' name; do
        file=$mount_point/$name
        warpfs preload "$file"
        warpfs verify "$file"
        warpfs read "$file" | cmp - "$file"
        count=$((count + 1))
        bytes=$((bytes + $(stat -c %s "$file")))
    done < <(cd "$MODEL_DIR" && find . -type f -readable -printf '%P\0')
    [ "$count" -gt 0 ]
    unmount || return 1
    echo "$count files, $bytes bytes: each loaded, verified, and read back equal"
}

if [ -n "$MODEL_DIR" ]; then
    if is_mounted; then unmount; fi
    step "model directory" model model_round
    [ "$ok" = no ] || sum "model: $(tail -n 1 "$OUT/model.log")"
else
    sum "model: left out, MODEL_DIR is not set"
fi

if [ "$failed" = 0 ]; then
    sum "gpu-round: every step succeeded"
else
    sum "gpu-round: steps that failed: $failed"
    exit 1
fi
