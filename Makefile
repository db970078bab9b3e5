# The commands of the repository. `make` alone lists them.

# Where copies are kept: host (shared memory; no GPU needed), cuda:N, or auto. Unset: auto for demo, host for test.
DEVICE ?=
# The directory that the demo mounts. Unset: a model from a package.
DIR ?=
PREFIX ?= /usr/local
DESTDIR ?=

CARGO ?= cargo
target = $(or $(CARGO_TARGET_DIR),target)

.PHONY: help demo test check bench install clean build dependencies check-dependencies demo-dependencies test-dependencies

help:
	@echo 'make demo     mount a real directory, have a file of it in device memory, prove it byte for byte'
	@echo '              DIR=/some/data takes your own directory, DEVICE=cuda:0 a GPU'
	@echo 'make test     build and run every test; DEVICE=cuda:0 runs them on a GPU'
	@echo 'make check    format, lints, documentation, dependencies, header: what every commit must pass'
	@echo 'make bench    how fast device memory is filled from the page cache; DEVICE=cuda:0 on a GPU'
	@echo 'make build    the release build'
	@echo 'make install  install it under PREFIX=$(PREFIX) (DESTDIR is put before it)'
	@echo 'make clean    remove what was built'

# What a machine has to have; each does nothing where everything is there.
dependencies:
	@mount-scripts/install-dependencies.sh

demo-dependencies:
	@mount-scripts/install-dependencies.sh demo

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

# Under sudo it builds nothing, so that root leaves no files in the build directory: run `make build` before it.
install:
	@if [ -z "$$SUDO_USER" ]; then $(CARGO) build --release --locked; fi
	@test -x '$(target)/release/warpfs' || { echo 'install: not built yet; run: make build' >&2; exit 1; }
	install -D -m 755 '$(target)/release/warpfs' '$(DESTDIR)$(PREFIX)/bin/warpfs'
	install -D -m 644 include/warpfs.h '$(DESTDIR)$(PREFIX)/include/warpfs.h'

clean:
	$(CARGO) clean
