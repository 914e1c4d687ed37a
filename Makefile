# Meridian. Everything needs only Go, make and git, except: race (a C compiler), images and e2e (a Docker engine).
GO       ?= go
MODULES  := shared clocksync gpu ctxnode gennode router e2e
BIN      := bin
FUZZTIME ?= 10s
ARGS     ?=

COMMANDS := ./router/cmd/router ./router/cmd/timeline ./ctxnode/cmd/ctxnode ./gennode/cmd/gennode \
            ./clocksync/cmd/clocksync ./e2e/cmd/localcluster ./e2e/cmd/loadgen ./e2e/cmd/tailbench ./gpu/cmd/randmodel
# Packages whose tests run under the race detector: those in which goroutines meet.
RACE     := ./shared/... ./clocksync/service/... ./clocksync/track/... ./clocksync/respond/... ./clocksync/probe/... \
            ./clocksync/kernel/... ./clocksync/estimate/... ./clocksync/utc/... ./gpu/engine/... ./gpu/ranks/... ./gpu/collective/... ./gpu/pipeline/... ./gpu/kvwire/... ./gpu/kv/... ./gpu/sched/... ./gpu/sim/... \
            ./ctxnode/... ./gennode/... ./router/...

# Static binaries: no C compiler, and images from scratch.
export CGO_ENABLED = 0

.DEFAULT_GOAL := help
.PHONY: help build test race lint fmt standalone fuzz bench bench-ranks bench-kv bench-router bench-openblas clock-truth clock-soak demo verify e2e images build-cuda images-cuda card-kit test-gpu soak-gpu sanitize-gpu bench-gpu two-gpus bench-tail golden chaos soak overload faults clean bench-accounting

help: ## Say what the targets do
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort | awk 'BEGIN {FS = ":.*## "} {printf "  make %-14s %s\n", $$1, $$2}'

build: ## Build the static binaries into bin/
	@mkdir -p $(BIN)
	$(GO) build -trimpath -o $(BIN)/ $(COMMANDS)

test: build ## Run every test and say how many ran and were skipped
	MERIDIAN_TEST_BIN=$(CURDIR)/$(BIN) $(GO) run ./e2e/cmd/testrun -vet=off $(ARGS) work

race: ## Run the tests of the concurrent packages under the race detector (needs a C compiler)
	CGO_ENABLED=1 $(GO) run ./e2e/cmd/testrun -race -vet=off $(ARGS) $(RACE)

lint: ## Check format, vet, and golangci-lint where it is installed
	@out=$$(gofmt -l $(MODULES)); if [ -n "$$out" ]; then echo "not formatted:"; echo "$$out"; exit 1; fi
	$(GO) vet work
	$(GO) vet -tags cuda ./gpu/...
	@if command -v golangci-lint >/dev/null; then for m in $(MODULES); do (cd $$m && golangci-lint run --config ../.golangci.yml --build-tags cuda ./...) || exit 1; done; \
	else echo "golangci-lint is not installed: only gofmt and go vet were run"; fi

fmt: ## Format the sources
	gofmt -w $(MODULES)

standalone: ## Build each module on its own, without the workspace: proves the import rules
	@for m in $(MODULES); do echo "GOWORK=off go build ./... in $$m"; (cd $$m && GOWORK=off $(GO) build ./...) || exit 1; done

# Without a bound on minimizing a target of large inputs shrinks the first interesting one all its time and tries no other.
fuzz: ## Run every fuzz target for FUZZTIME (10s)
	@grep -rHoE '^func Fuzz[A-Za-z0-9_]+' --include='*_test.go' $(MODULES) | sed 's/:func / /' | while read -r file target; do \
	  echo "$$(dirname $$file) $$target"; \
	  $(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 500ms ./$$(dirname $$file) || exit 1; done

bench: ## Run the benchmarks
	$(GO) test -run '^$$' -bench . -benchmem $(ARGS) work

bench-router: build ## Measure the router against the plainest Go router, ReverseProxy and nginx, with mock workers (4 min)
	$(GO) build -trimpath -o $(BIN)/ ./e2e/cmd/routerbench
	MERIDIAN_TEST_BIN=$(CURDIR)/$(BIN) $(BIN)/routerbench run $(ARGS)

# Part by part, then the difference of whole processes with its error and a control.
bench-accounting: ## Print what all accounting costs a step of 256 sequences: the parts, their sum, its ratio to a step of 2 ms, and the whole process
	@(for p in ./gpu/engine ./gpu/stats ./shared/ledger ./shared/hardware ./gpu/ranks; do \
	  $(GO) test -run '^$$' -bench '^Benchmark(Accounting|Iterated|Step|Read|Statistics)$$' -count 5 $(ARGS) $$p || exit 1; done) | awk ' \
	  /^pkg:/ {sub("meridian.internal/", "", $$2); pkg = $$2} \
	  /^Benchmark/ && !/gathered/ {for (i = 2; i <= NF; i++) if ($$i == "ns/step" && (!(pkg in least) || $$(i-1) < least[pkg])) least[pkg] = $$(i-1) + 0} \
	  END {for (p in least) {printf "%-20s %8.0f ns/step\n", p, least[p]; sum += least[p]; n++} \
	  one = sum - least["gpu/ranks"]; \
	  printf "%-20s %8.0f ns/step, %.2f %% of a 2 ms step (at most 0.50 %%)\n", "one rank", one, one / 20000; \
	  printf "%-20s %8.0f ns/step, %.2f %% of a 2 ms step (at most 0.50 %%)\n", "each of 8 ranks", sum, sum / 20000; exit n != 5 || sum > 10000}'
	@$(GO) test -run '^$$' -bench 'OnOff/busy/400' -benchtime 60x ./gennode/account | grep -E '^(Benchmark|FAIL)'

bench-ranks: ## Measure ranks and stages: release of a round (at most 30 us in the median), pipeline of 4 stages (at least 90 % of ideal), statistics of 8 ranks
	$(GO) test -run '^$$' -bench '^Benchmark(Lockstep|Statistics|Pipeline|Release)$$' -benchtime 1000x $(ARGS) ./gpu/ranks ./gpu/collective

bench-kv: build ## Measure how much KV is reused: shared prefixes with and without reuse, chats by kv_aware and round_robin
	$(BIN)/localcluster kv --ctx 2 --gen 2 $(ARGS)

bench-openblas: ## Compare the matrix product with OpenBLAS (needs a C compiler and libopenblas-dev; says so when they are absent)
	gpu/bench/openblas/run.sh

clock-truth: ## Hold the clocks against simulated and real ones whose truth is known (needs root for the latter)
	$(GO) run ./clocksync/cmd/clocktruth --seeds 100 $(ARGS)
	MERIDIAN_CLOCK_TRUTH=1 $(GO) test -count=1 -v ./clocksync/truth

clock-soak: build ## Ten minutes of a loaded cluster with nodes in namespaces, and kills: the true offsets must lie in the bounds (needs root)
	$(BIN)/localcluster clocks --for 10m --disturb $(ARGS)

golden: ## Write the golden files anew; read the diff
	$(GO) test -count=1 ./shared/phase/... ./gpu/kvwire/... ./router/timeline/... ./gpu/stats/... -update

soak: build ## Hold 500 streams for 30 minutes: nothing may grow (MERIDIAN_SOAK)
	MERIDIAN_SOAK=$${MERIDIAN_SOAK:-30m} nice $(GO) test -count=1 -timeout 24h -v -run TestSoak $(ARGS) ./e2e/chaos

overload: build ## Send twice what a simulated cluster can do, for 5 minutes (MERIDIAN_OVERLOAD)
	MERIDIAN_OVERLOAD=$${MERIDIAN_OVERLOAD:-5m} $(GO) test -count=1 -timeout 24h -v -run TestOverload $(ARGS) ./e2e/chaos

faults: build ## Cut 200 streams in each style, end 10,000 requests at random
	MERIDIAN_CUT_STREAMS=200 MERIDIAN_RANDOM_ENDS=10000 $(GO) test -count=1 -timeout 2h -v -run 'CutStreams|RandomEnds' $(ARGS) ./e2e/chaos

chaos: build ## Kill router, NATS and nodes at random during 20,000 requests, with 20 seeds
	MERIDIAN_CHAOS_SEEDS=20 MERIDIAN_CHAOS_REQUESTS=20000 $(GO) test -count=1 -timeout 24h -v -run WhateverIsKilled $(ARGS) ./e2e/chaos

demo: build ## Start a cluster, send prompts, print the texts and a waterfall
	$(BIN)/localcluster demo $(ARGS)

verify: build ## Compare the texts of the three serving styles
	$(BIN)/localcluster verify $(ARGS)

images: build ## Build the container images from the static binaries, without a base image
	$(GO) build -trimpath -o $(BIN)/nats-server github.com/nats-io/nats-server/v2
	deploy/images.sh $(BIN)

e2e: images ## Bring docker-compose.yml up, send requests, take it down
	MERIDIAN_TEST_BIN=$(CURDIR)/$(BIN) MERIDIAN_TEST_COMPOSE=1 $(GO) run ./e2e/cmd/testrun -run Compose ./e2e/compose

build-cuda: ## Build the nodes with the CUDA back end, and with NVML if there is a C compiler
	@mkdir -p $(BIN)
	@if command -v $${CC:-cc} >/dev/null; then export CGO_ENABLED=1 CGO_CFLAGS="-O2 -Wno-deprecated-declarations"; \
	else echo "no C compiler ($${CC:-cc}): the nodes will not read power, energy and clocks of the card (NVML)"; fi; \
	for n in ctxnode gennode; do $(GO) build -trimpath -ldflags '$(LDFLAGS)' -tags cuda -o $(BIN)/$$n-cuda ./$$n/cmd/$$n || exit 1; done

# Stripped, and compressed with a window as large as all of it: the binaries have much in common. 40 MiB at most, to travel.
KIT := $(BIN)/card-kit
card-kit: ## Gather all that a card's machine needs, which has no Go, in bin/card-kit and bin/card-kit.tar.xz; there, card-kit/run runs it all
	@rm -rf $(KIT) && mkdir -p $(KIT)/bin $(KIT)/gpu/cuda $(KIT)/gpu/model/meridian-tiny $(KIT)/e2e
	$(GO) build -trimpath -ldflags '-s -w' -o $(KIT)/bin/ $(filter-out ./ctxnode/% ./gennode/% %/loadgen,$(COMMANDS))
	@$(MAKE) build-cuda BIN=$(KIT)/bin LDFLAGS='-s -w'
	@for n in ctxnode gennode; do ln -s $$n-cuda $(KIT)/bin/$$n; done
	@for p in gpu/cuda gpu/device gpu/kvwire gennode/account; do \
	  $(GO) test -c -trimpath -ldflags '-s -w' -tags cuda -o $(KIT)/bin/$$(basename $$p).test ./$$p || exit 1; done
	@cp -r gpu/cuda/peer $(KIT)/gpu/cuda/ && cp gpu/model/meridian-tiny/golden.json $(KIT)/gpu/model/meridian-tiny/
	@cp e2e/two-gpus.sh $(KIT)/e2e/ && install -m 755 e2e/card/run.sh $(KIT)/run
	tar -C $(BIN) -c card-kit | xz --x86 --lzma2=preset=3,dict=256MiB >$(KIT).tar.xz
	@size=$$(stat -c %s $(KIT).tar.xz); echo "$(KIT).tar.xz: $$((size >> 20)) MiB (at most 40)"; [ $$size -le $$((40 << 20)) ]

images-cuda: build-cuda ## Build the images of the CUDA nodes (their base image is pulled)
	for n in ctxnode gennode; do docker build -f deploy/cuda.Dockerfile --build-arg NODE=$$n -t meridian/$$n-cuda:latest $(BIN) || exit 1; done

test-gpu: ## Run the tests of the CUDA back end (skipped with the reason where there is no card; MERIDIAN_TRANSFORMERS=python3: PyTorch is asked too)
	$(GO) test -count=1 -tags cuda $(ARGS) ./gpu/cuda/... ./gpu/device/...

soak-gpu: ## Random load on the card with cancellations and preemptions for MERIDIAN_CARD_LOAD (8m): its memory must come back
	MERIDIAN_CARD_LOAD=$${MERIDIAN_CARD_LOAD:-8m} $(GO) test -count=1 -tags cuda -timeout 2h -v -run RandomLoad $(ARGS) ./gpu/cuda

sanitize-gpu: ## Run kernel tests under memcheck and racecheck of compute-sanitizer
	@mkdir -p $(BIN)
	$(GO) test -c -trimpath -tags cuda -o $(BIN)/cuda.test ./gpu/cuda
	cd gpu/cuda && for tool in memcheck racecheck; do compute-sanitizer --tool $$tool --error-exitcode 1 $(CURDIR)/$(BIN)/cuda.test -test.v -test.run 'DecodeBatches|StepsThatFollow' $(ARGS) || exit 1; done

bench-gpu: ## Print the table of times on the card, against floors, goals and (MERIDIAN_TRANSFORMERS=python3) Hugging Face transformers; stages; accounting
	$(GO) test -tags cuda -run '^$$' -bench Table -benchtime 1x $(ARGS) ./gpu/cuda
	$(GO) test -tags cuda -run '^$$' -bench Stages -benchtime 3x $(ARGS) ./gpu/cuda
	$(GO) test -tags cuda -run '^$$' -bench OnOffOnTheCard -benchtime 30x $(ARGS) ./gennode/account

bench-tail: build ## Compare the tail with and without disaggregation on two simulated devices (2 min)
	@$(BIN)/randmodel --shape small --out $(BIN)/small
	$(BIN)/tailbench --model $(BIN)/small --device sim --streams 4 --output 128 --long 4096 --rounds 2 --out $(BIN)/tail \
	  --node-flag=--sim-step=10ms --node-flag=--sim-prefill-token=25us --node-flag=--sim-decode=20us --node-flag=--sim-shallow --node-flag=--kv-memory=1GiB $(ARGS)

two-gpus: build build-cuda ## Measure hand-over and tail on two GPUs of one host (10 min); figures in docs/results/two-gpus
	CGO_ENABLED=0 $(GO) test -c -trimpath -tags cuda -o $(BIN)/cuda.test ./gpu/cuda
	e2e/two-gpus.sh $(ARGS)

clean: ## Remove what was built
	rm -rf $(BIN)
