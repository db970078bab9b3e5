#!/usr/bin/env bash
# Installs what building, testing and showing warpfs takes, on Debian and Ubuntu, by package name. Does nothing where
# everything is there. System packages are installed as root or through sudo; the Rust toolchain is the user's own.
#
#   install-dependencies.sh [demo] [check] [test] [bench]
#
#   demo     also Python and pip, with which the demo fetches its model
#   check    also rustfmt and clippy
#   test     also the programs that the tests run on the mount
#   bench    also bindfs and mergerfs, which the mount is compared with, and git, which it is measured with
set -euo pipefail

RUST_NEEDED=1.88

say() { printf 'dependencies: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

# True if version $1 is $2 or newer.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

want_demo=no want_check=no want_test=no want_bench=no
for word in "$@"; do
    case $word in
        demo) want_demo=yes ;;
        check) want_check=yes ;;
        test) want_test=yes ;;
        bench) want_bench=yes ;;
        *) echo "usage: install-dependencies.sh [demo] [check] [test] [bench]" >&2; exit 2 ;;
    esac
done

# -------------------------------------------------------------------------------------------------- system packages

missing_packages() {
    have make || echo make
    # The C compiler links Rust programs, and compiles the C example and the header's test.
    if ! echo '#include <stdio.h>' | "${CC:-cc}" -fsyntax-only -x c - 2>/dev/null; then
        echo gcc
        echo libc6-dev
    fi
    have fusermount3 || echo fuse3
    have getfattr && have setfattr || echo attr
    have cmp || echo diffutils
    # cargo and pip speak HTTPS.
    [ -e /etc/ssl/certs/ca-certificates.crt ] || echo ca-certificates
    if [ "$want_demo" = yes ]; then
        have python3 || echo python3
        python3 -m pip --version >/dev/null 2>&1 || echo python3-pip
    fi
    if [ "$want_bench" = yes ]; then
        have bindfs || echo bindfs
        have mergerfs || echo mergerfs
        have git || echo git
    fi
    if [ "$want_test" = yes ]; then
        have git || echo git
        have sqlite3 || echo sqlite3
        have rsync || echo rsync
        have tar || echo tar
        have setfacl || echo acl
        have mkfs.xfs || echo xfsprogs
        have mkfs.btrfs || echo btrfs-progs
    fi
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        sudo "$@"
    fi
}

updated=no
apt_update() {
    [ "$updated" = no ] || return 0
    as_root apt-get update -q || die "apt-get update failed (see above); the packages' lists cannot be read"
    updated=yes
}

apt_install() {
    apt_update
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@" ||
        die "apt-get could not install: $*"
}

# Says whether packages can be installed here at all, and how not.
can_install() {
    if ! have apt-get; then
        reason="this system has no apt-get"
    elif [ "$(id -u)" != 0 ] && ! have sudo; then
        reason="you are not root, and there is no sudo"
    else
        return 0
    fi
    return 1
}

mapfile -t packages < <(missing_packages)
if [ ${#packages[@]} -gt 0 ]; then
    can_install || die "missing: ${packages[*]} (Debian's names), and $reason. Install them, then run this again."
    say "installing ${packages[*]}"
    apt_install "${packages[@]}"
    mapfile -t packages < <(missing_packages)
    [ ${#packages[@]} -eq 0 ] || die "still missing after the installation: ${packages[*]}"
fi

# ---------------------------------------------------------------------------------------------------- Rust toolchain

# Nothing where there is no cargo, or rustup's without a toolchain.
rust_version() { cargo --version 2>/dev/null | awk '{ print $2 }' || true; }

# The version of a package that apt would install, or nothing.
candidate() { apt-cache policy "$1" 2>/dev/null | awk '$1 == "Candidate:" && $2 != "(none)" { print $2 }'; }

if [ -z "$(rust_version)" ]; then
    if can_install; then
        apt_update
        if [ -n "$(candidate rustup)" ]; then
            say "no cargo: installing rustup, and with it the stable toolchain for $(id -un)"
            apt_install rustup
            rustup default stable || die "rustup could not install the stable toolchain (see above)"
            hash -r
        elif at_least "$(candidate cargo || true)" "$RUST_NEEDED"; then
            say "no cargo: installing Debian's"
            apt_install cargo
            [ "$want_check" = no ] || apt_install rustfmt rust-clippy
            hash -r
        fi
    fi
fi
version=$(rust_version)
if [ -z "$version" ]; then
    die "no Rust toolchain (cargo $RUST_NEEDED or newer), and none among this system's packages. Install one as" \
        "https://www.rust-lang.org/tools/install says, put ~/.cargo/bin in PATH, then run this again."
fi
if ! at_least "$version" "$RUST_NEEDED"; then
    if have rustup; then
        how="rustup update stable && rustup default stable"
    else
        how="see https://www.rust-lang.org/tools/install"
    fi
    die "cargo $version is too old: warpfs needs $RUST_NEEDED or newer ($how)"
fi
if [ "$want_check" = yes ]; then
    for component in fmt clippy; do
        cargo "$component" --version >/dev/null 2>&1 ||
            die "no cargo $component; with rustup: rustup component add rustfmt clippy; Debian: rustfmt, rust-clippy"
    done
fi

# ------------------------------------------------------------------------------------------------------------- kernel

if [ ! -e /dev/fuse ]; then
    say "note: there is no /dev/fuse, so nothing can be mounted. Try 'modprobe fuse'; a container needs" \
        "'--device /dev/fuse --cap-add SYS_ADMIN'."
fi
