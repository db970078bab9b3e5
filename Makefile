# The commands of the repository. `make` alone lists them.

# Where copies are kept: host (shared memory; no GPU needed), cuda:N, or auto. Unset: auto for demo, host for test.
DEVICE ?=
# The directory that the demo mounts. Unset: a model from a package.
DIR ?=
PREFIX ?= /usr/local
DESTDIR ?=
# Where mount(8) looks for its helpers, and nowhere else. With a PREFIX of a user's own none are installed: root's mount
# would run a program that the user may change.
sbin = $(if $(shell test -L /sbin && echo merged),/usr/sbin,/sbin)
HELPERS ?= $(if $(filter /usr /usr/local /opt /opt/%,$(PREFIX)),$(sbin))

CARGO ?= cargo
target = $(or $(CARGO_TARGET_DIR),target)

.PHONY: help demo test check bench bench-transfer bench-mount install clean build dependencies check-dependencies demo-dependencies \
    bench-dependencies test-dependencies

help:
	@echo 'make demo     mount a real directory, have a file of it in device memory, prove it byte for byte'
	@echo '              DIR=/some/data takes your own directory, DEVICE=cuda:0 a GPU'
	@echo 'make test     build and run every test; DEVICE=cuda:0 runs them on a GPU'
	@echo 'make check    format, lints, documentation, dependencies, header: what every commit must pass'
	@echo 'make bench    how fast device memory is filled from the page cache; DEVICE=cuda:0 on a GPU'
	@echo 'make bench-transfer  loads beside the limits of the machine and the peers (benches/peers); DEVICE=cuda:0 on a GPU'
	@echo 'make bench-mount  the mount beside the native directory, bindfs and mergerfs; some ten minutes, best as root'
	@echo '              ROUNDS=9, ROWS=read,stat, JSON=FILE, WARPFS_BENCH_DIR=DIR, BENCH_USER=1, MILLION=1'
	@echo 'make build    the release build'
	@echo 'make install  install it under PREFIX=$(PREFIX) (DESTDIR is put before it)'
	@echo 'make clean    remove what was built'

# What a machine has to have; each does nothing where everything is there.
dependencies:
	@mount-scripts/install-dependencies.sh

demo-dependencies:
	@mount-scripts/install-dependencies.sh demo

bench-dependencies:
	@mount-scripts/install-dependencies.sh bench
test-dependencies:
	@mount-scripts/install-dependencies.sh test

check-dependencies:
	@mount-scripts/install-dependencies.sh check

build: dependencies
	$(CARGO) build --release --locked

demo: demo-dependencies
	$(CARGO) build --release --locked
	@WARPFS_BIN='$(target)/release/warpfs' mount-scripts/demo.sh '$(or $(DEVICE),auto)' $(if $(DIR),'$(DIR)')

test: test-dependencies
	WARPFS_TEST_DEVICE='$(or $(DEVICE),host)' $(CARGO) test --locked
	tests/judges/run.sh
	tests/as-user.sh
	@echo 'test: every test passed on device $(or $(DEVICE),host)'

check: check-dependencies
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets --locked -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --no-deps --document-private-items --locked
	tests/check-dependencies.sh
	tests/check-header.sh
	@if ! $(CARGO) deny --version >/dev/null 2>&1; then \
	    echo 'check: cargo-deny is not installed: licenses and advisories of dependencies not checked'; \
	else \
	    $(CARGO) deny --locked --log-level error check bans licenses sources && \
	    if $(CARGO) deny --log-level error fetch >/dev/null 2>&1; then \
	        $(CARGO) deny --locked --log-level error check advisories; \
	    else \
	        echo 'check: advisories of dependencies not checked: their list cannot be fetched'; \
	    fi; \
	fi
	@echo 'check: passed'

bench: dependencies
	DEVICE='$(or $(DEVICE),host)' $(CARGO) bench --locked --bench transfer

# Its settings are in benches/peers/run.py; best as root, on a disk.
bench-transfer: dependencies
	$(CARGO) build --release --locked
	DEVICE='$(or $(DEVICE),host)' WARPFS_BIN='$(target)/release/warpfs' python3 benches/peers/run.py

# Its settings are in benches/mount.rs; what stands on make's command line is in the environment too.
bench-mount: bench-dependencies
	$(CARGO) bench --locked --bench mount

# Under sudo it builds nothing, so that root leaves no files in the build directory: run `make build` before it.
install:
	@if [ -z "$$SUDO_USER" ]; then $(CARGO) build --release --locked; fi
	@test -x '$(target)/release/warpfs' || { echo 'install: not built yet; run: make build' >&2; exit 1; }
	install -D -m 755 '$(target)/release/warpfs' '$(DESTDIR)$(PREFIX)/bin/warpfs'
	install -D -m 644 include/warpfs.h '$(DESTDIR)$(PREFIX)/include/warpfs.h'
ifneq ($(HELPERS),)
	install -d '$(DESTDIR)$(HELPERS)'
	sed 's|^program=warpfs$$|program="$(PREFIX)/bin/warpfs"|' mount-scripts/mount.warpfs \
	    >'$(DESTDIR)$(HELPERS)/mount.warpfs'
	chmod 755 '$(DESTDIR)$(HELPERS)/mount.warpfs'
	ln -sf mount.warpfs '$(DESTDIR)$(HELPERS)/mount.fuse.warpfs'
else
	@echo 'install: no helper for mount(8) and /etc/fstab; PREFIX=/usr/local has one'
endif

clean:
	$(CARGO) clean
