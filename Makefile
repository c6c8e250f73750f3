# bpf-memtools. `make demo` and `make test` are all the set-up there is: both install what is missing.
#
#   make build     release binaries, fully static, in target/release
#   make demo      build, and run memleak on a program that leaks
#   make test      style, lints, and all tests on this kernel
#   make test-all  what CI runs: the same, the tests on five other kernels in QEMU, and the packages
#   make test-unit the tests that need neither BPF nor root
#   make format    all source files as make lint wants them
#   make test-host TEST=memleak::threads_exact      the end-to-end tests that match, on this kernel
#   make test-vm KERNEL=6.1 TEST=memleak            the same on one of the five
#   make test-vm ARCH=aarch64 KERNEL=6.12           the same in emulated arm64 machines
#   make install   PREFIX=/usr/local DESTDIR= SUFFIX=   (SUFFIX=-mt where a distribution has the names already)
#   make uninstall with the same
#   make release   target/dist/bpf-memtools-VERSION-TARGET.tar.zst: binaries, man pages, completions, licences, SBOM
#   make packages  the release as .deb and .rpm, in target/dist
#   make crate     the package for crates.io, which has the BPF objects, in target/dist
#   make image     the release as a container image, target/dist/bpf-memtools-VERSION-TARGET.oci.tar
#   make test-packages   the release; .deb and .rpm installed, run and removed in roots of Debian 11, 12, 13 and
#                        testing; the crate installed by cargo without clang; the image run as a pod is
#   make test-clone SUITE=trixie   built in a clean root of a Debian suite, with the demo and the tests without BPF
#                        (without SUITE: Debian 13 and testing by turns)
#   make test-reproducible   the release built once more, elsewhere, and compared
#   make fuzz SECONDS=60   each parser of what other users control, by a coverage-guided fuzzer; takes Rust's nightly
#   make audit     known vulnerabilities of the dependencies, from a database that only the network has
#   make bench     overhead beside peers, as ratios
#   make clean

PREFIX  ?= /usr/local
DESTDIR ?=
SUFFIX  ?=
# Today's Debian and the next one by turns.
SUITE   ?= $(if $(filter 0 1 2,$(shell echo $$(($$(git rev-list --count HEAD 2>/dev/null) % 6)))),trixie,forky)
SECONDS ?= 60
ARCH    ?= $(shell uname -m)
KERNEL  ?= 5.10 6.1 6.12 6.18 7.2
TEST    ?=

TOOLS  := $(shell sed -n '/^\[\[bin\]\]/{n;s/^name = "\(.*\)"/\1/p}' Cargo.toml)
HOST   := $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
TARGET ?= $(if $(filter $(shell uname -m),$(ARCH)),$(HOST),$(ARCH)-unknown-linux-gnu)
RUST   := $(shell sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
VERSION := $(shell sed -n '/^version = /{s/.*"\(.*\)"/\1/p;q}' Cargo.toml)
# `quick` is the profile of the inner loop and of the tests; binaries are in target/$(PROFILE).
PROFILE ?= $(if $(filter lint test test-all test-clone test-host test-unit test-vm,$(MAKECMDGOALS)),quick,release)
OUT    := target/$(TARGET)/$(PROFILE)

# Binaries are static: with the C library, too, and with libelf and zlib for libbpf. Without --target, RUSTFLAGS would
# also reach build scripts and procedural macros, which cannot be static. The folders of sources have fixed names in
# binaries, so that the same source gives the same binary. Other profiles than `release` keep all names: a copy of the
# folder then has all dependencies compiled.
remap = $(if $(filter-out release,$(PROFILE)),,--remap-path-prefix=$(1)=$(2))
CARGO_FOLDER := $(or $(CARGO_HOME),$(HOME)/.cargo)
export RUSTFLAGS := -C target-feature=+crt-static $(call remap,$(CURDIR),/usr/src/bpf-memtools) \
	$(call remap,$(CARGO_FOLDER),/usr/src/cargo) \
	$(call remap,$(shell rustc --print sysroot 2>/dev/null)/lib/rustlib/src/rust,/usr/src/rust)
export LIBBPF_SYS_EXTRA_CFLAGS := -ffile-prefix-map=$(CARGO_FOLDER)=/usr/src/cargo \
	-ffile-prefix-map=$(CURDIR)=/usr/src/bpf-memtools
# scripts/libelf makes the two libraries, and libbpf-sys links them.
LIBELF := $(CURDIR)/target/libelf/$(TARGET)
export LIBBPF_SYS_LIBRARY_PATH_$(subst -,_,$(TARGET)) = $(LIBELF)/lib
export C_INCLUDE_PATH := $(LIBELF)/include
CARGO = cargo

# Another architecture than this machine's: Debian's cross compiler. The build script, which runs here, needs libelf, too.
ifneq ($(firstword $(subst -, ,$(TARGET))),$(firstword $(subst -, ,$(HOST))))
CROSS := $(firstword $(subst -, ,$(TARGET)))-linux-gnu
CROSS_PACKAGES := gcc-$(subst _,-,$(CROSS)) libc6-dev-$(patsubst aarch64,arm64,$(firstword $(subst -, ,$(TARGET))))-cross
ifeq ($(origin CC),default)
CC := $(CROSS)-gcc
endif
ifeq ($(origin AR),default)
AR := $(CROSS)-ar
endif
export CC_$(subst -,_,$(TARGET)) := $(CC)
export AR_$(subst -,_,$(TARGET)) := $(AR)
export CARGO_TARGET_$(shell echo $(TARGET) | tr a-z- A-Z_)_LINKER := $(CC)
HOST_LIBELF := $(CURDIR)/target/libelf/$(HOST)
export LIBBPF_SYS_LIBRARY_PATH_$(subst -,_,$(HOST)) = $(HOST_LIBELF)/lib
endif

# Variables of `make install`. libbpf's own Makefile, which cargo runs, would install by them.
unexport DESTDIR PREFIX SUFFIX
MAKEOVERRIDES =

FLAGS = --profile $(PROFILE) --locked --features static --target $(TARGET)

BUILD_PACKAGES = clang gcc libc6-dev pkg-config $(CROSS_PACKAGES)
LINT_PACKAGES  = python3-venv
# For all end-to-end tests. scripts/prerequisites has what some of them need in addition.
# From Debian 13 on, binutils has no dwp.
TEST_PACKAGES  = g++ binutils $(if $(shell command -v dwp),,binutils-gold) musl-tools libjemalloc-dev libtcmalloc-minimal4 libmimalloc2.0 procps python3 python3-jsonschema tzdata xz-utils dwz
RELEASE_PACKAGES = zstd python3
PACKAGES_PACKAGES = rpm
IMAGE_PACKAGES = buildah
PACKAGES_TEST_PACKAGES = python3-venv python3-yaml lintian rpmlint mmdebstrap debian-archive-keyring

.PHONY: build deps demo format test test-all lint test-unit test-clone test-host test-vm install uninstall release packages crate image test-packages test-reproducible fuzz audit bench clean vmlinux

build: deps
	$(CARGO) build $(FLAGS) --bins
	install -d target/$(PROFILE)
	install $(addprefix $(OUT)/,$(TOOLS)) target/$(PROFILE)/

deps:
	@case "$(CURDIR)$(CARGO_FOLDER)" in *" "*) \
		echo "make: libbpf cannot be compiled in a folder that has a space in its name ($(CURDIR), $(CARGO_FOLDER))" >&2; exit 1 ;; esac
	@found=$$(rustc -V 2>/dev/null | cut -d' ' -f2); printf '%s\n' $(RUST) "$$found" | sort -CV || { \
		echo "make: Rust $(RUST) or later is needed, and $${found:-none} is installed; install it: https://rustup.rs" >&2; exit 1; }
	@scripts/need $(BUILD_PACKAGES)
	@CC="$(CC)" AR="$(AR)" scripts/libelf "$(LIBELF)"
ifdef CROSS
	@rustup target list --installed | grep -qx $(TARGET) || rustup target add $(TARGET)
	@scripts/libelf "$(HOST_LIBELF)"
endif

demo: build
	PROFILE=$(PROFILE) scripts/demo

test: lint test-host

test-all: test test-vm
	if scripts/due test-reproducible 1; then $(MAKE) test-reproducible PROFILE=release; \
	elif scripts/due test-clone 2; then $(MAKE) test-clone PROFILE=$(PROFILE); \
	elif scripts/due test-packages 0 $(PACKED_BY); then $(MAKE) test-packages PROFILE=release; fi

# What packages are made by, and tested by.
PACKED_BY = .ci Cargo.lock Cargo.toml Makefile build.rs packaging scripts tests/packages

# Versions of clang-format differ in what they make of the same rules. This one comes from PyPI.
CLANG_FORMAT = target/clang-format-14.0.6/clang_format/data/bin/clang-format
C_FILES = bpf/*.bpf.c bpf/*/*.[ch] bpf/include/*/*.h tests/workload/*.[ch] tests/workload/*.cc tests/hostile/*.[ch] benches/*.[ch]

$(CLANG_FORMAT):
	@scripts/need $(LINT_PACKAGES)
	scripts/wheel clang-format==14.0.6 target/clang-format-14.0.6
	chmod +x $@

format: $(CLANG_FORMAT)
	$(CARGO) fmt
	$(CLANG_FORMAT) -i $(C_FILES)

# Later versions of clippy and rustdoc have more to say: they fail CI, and nothing else.
DENY = $(if $(CI),-D warnings)

lint: deps $(CLANG_FORMAT)
	$(CARGO) fmt --check
	$(CLANG_FORMAT) --dry-run -Werror $(C_FILES)
	$(CARGO) clippy $(FLAGS) --all-targets -- $(DENY)
	RUSTDOCFLAGS="$(DENY)" $(CARGO) doc $(FLAGS) --no-deps --lib --document-private-items

# Tests without BPF, which run on any machine.
test-unit: deps
	$(CARGO) test $(FLAGS) --lib --bins --test cli --test schema

test-host: deps
	@scripts/need $(TEST_PACKAGES)
	scripts/test-host $(FLAGS) -- $(TEST)

test-vm: deps
	@scripts/need $(TEST_PACKAGES)
	ARCH=$(firstword $(subst -, ,$(TARGET))) scripts/test-vm "$(KERNEL)" $(FLAGS) -- $(TEST)

SHARE = $(DESTDIR)$(PREFIX)/share
BASH  = $(SHARE)/bash-completion/completions
ZSH   = $(SHARE)/zsh/site-functions
FISH  = $(SHARE)/fish/vendor_completions.d
UNITS = $(DESTDIR)$(PREFIX)/lib/systemd/system

# Each tool prints its own completion scripts for the shells.
install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(SHARE)/man/man8 $(SHARE)/doc/bpf-memtools $(BASH) $(ZSH) $(FISH)
	for tool in $(TOOLS); do \
		as=$$tool$(SUFFIX) && program=$(DESTDIR)$(PREFIX)/bin/$$as && \
		install -m 755 target/release/$$tool $$program && \
		install -m 644 tools/$$tool.8 $(SHARE)/man/man8/$$as.8 && \
		MEMTOOLS_COMPLETE=bash $$program >$(BASH)/$$as && \
		MEMTOOLS_COMPLETE=zsh $$program >$(ZSH)/_$$as && \
		MEMTOOLS_COMPLETE=fish $$program >$(FISH)/$$as.fish || exit 1; \
	done
	install -m 644 README.md LICENSE tools/*_example.txt $(SHARE)/doc/bpf-memtools/
	install -D -m 644 -t $(SHARE)/doc/bpf-memtools/prometheus packaging/prometheus/memtools.rules.yml
	install -D -m 644 -t $(SHARE)/doc/bpf-memtools/grafana packaging/grafana/memtools.json
	install -d $(UNITS)
	for unit in memagent memagent-trace; do \
		sed 's|/usr/bin/memagent|$(or $(PREFIX),/usr)/bin/memagent$(SUFFIX)|; s|memagent.service|memagent$(SUFFIX).service|' \
			packaging/$$unit.service >$(UNITS)/$$unit$(SUFFIX).service || exit 1; \
	done

uninstall:
	for tool in $(TOOLS); do \
		as=$$tool$(SUFFIX) && \
		rm -f $(DESTDIR)$(PREFIX)/bin/$$as $(SHARE)/man/man8/$$as.8 $(BASH)/$$as $(ZSH)/_$$as $(FISH)/$$as.fish || exit 1; \
	done
	rm -f $(UNITS)/memagent$(SUFFIX).service $(UNITS)/memagent-trace$(SUFFIX).service
	rm -rf $(SHARE)/doc/bpf-memtools

release: build
	@scripts/need $(RELEASE_PACKAGES)
	scripts/release $(VERSION) $(TARGET)

packages: release
	@scripts/need $(PACKAGES_PACKAGES)
	scripts/packages $(VERSION) $(TARGET)

image: release
	@scripts/need $(IMAGE_PACKAGES)
	scripts/image $(VERSION) $(TARGET)

crate: build
	scripts/crate $(VERSION) $(TARGET)

test-packages: packages crate image
	@scripts/need $(PACKAGES_TEST_PACKAGES)
	tests/packages/installed target/dist/bpf-memtools_$(VERSION)-1_*.deb target/dist/bpf-memtools-$(VERSION)-1.*.rpm
	tests/packages/image target/dist/bpf-memtools-$(VERSION)-$(TARGET).oci.tar
	tests/packages/crate target/dist/bpf-memtools-$(VERSION).crate
	tests/packages/release target/dist/bpf-memtools-$(VERSION)-$(TARGET).tar.zst

test-clone:
	@scripts/need mmdebstrap debian-archive-keyring
	tests/packages/clone $(SUITE) $(PROFILE) $(TARGET)

fuzz: deps
	tests/fuzz/run $(SECONDS)

# Without this file's flags: cargo-audit is a program for this machine.
audit:
	command -v cargo-audit >/dev/null || env -u RUSTFLAGS $(CARGO) install --locked cargo-audit
	$(CARGO) audit

test-reproducible: release
	tests/packages/reproducible target/dist/bpf-memtools-$(VERSION)-$(TARGET).tar.zst

bench: build
	benches/run
	benches/live
	benches/verdict
	benches/pre-copy
	benches/kernel
	benches/events
	benches/start
	benches/scale
	benches/locks
	benches/stacks
	benches/interpreters
	benches/faults
	benches/start-guest

clean:
	$(CARGO) clean

vmlinux:
	@scripts/need bpftool
	tests/vm/vmrun --arch $(ARCH) --kernel 6.18 --out target/btf -- 'cp /sys/kernel/btf/vmlinux /out'
	mkdir -p bpf/vmlinux/$(ARCH)
	bpftool btf dump file target/btf/vmlinux format c >bpf/vmlinux/$(ARCH)/vmlinux.h
