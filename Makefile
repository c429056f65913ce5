# The short names of everything; CMake builds (CMakePresets.json), scripts/ installs and fetches.
.DEFAULT_GOAL := build
.PHONY: build test demo fuzz format clean help dependencies
.DELETE_ON_ERROR:

# What the user gave on the command line, taken literally: a prompt may hold quotes and dollars. Only the command line
# counts, because MODEL and PROMPT are names that other tools export.
given = $(if $(filter command line,$(origin $(1))),$(value $(1)))
export DEMO_MODEL := $(call given,MODEL)
export DEMO_PROMPT := $(call given,PROMPT)
export DEMO_N := $(call given,N)
export FUZZ_N := $(call given,N)
export FUZZ_PARSER := $(call given,PARSER)
unexport MODEL PROMPT N PARSER

build: build/build.ninja  ## build/bin/fut
	@ninja -C build fut

test: build/build.ninja  ## build and run everything that needs no GPU
	@scripts/install_dependencies.sh test
	@ninja -C build
	@ctest --test-dir build -L cpu -j "$$(nproc)" --no-tests=error --no-label-summary --output-on-failure

demo: build  ## a real model writes; PROMPT="..." MODEL=smollm2|bard|PATH N=tokens
	@scripts/demo.sh

fuzz: build/build.ninja  ## mutated inputs to every parser; N=inputs a parser PARSER=one of them
	@ninja -C build fut_fuzz
	@scripts/fuzz.sh build/bin/fut_fuzz

format:  ## clang-format over the tree
	@scripts/install_dependencies.sh format
	@tests/format.sh --fix

clean:  ## remove build/
	rm -rf build

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*##/  make \1\t/p' Makefile

# Written once; from then on ninja itself sees when CMake has to run again.
build/build.ninja: CMakePresets.json | dependencies
	@cmake --preset release --log-level=WARNING
	@touch $@

dependencies:
	@scripts/install_dependencies.sh build
