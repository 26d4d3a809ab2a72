#!/bin/sh
# The quickstart: starts a swarm of three engines on this machine, builds the image and trains a model.
# Where a lab cannot run (no root, no Linux), the same job runs as three agents on this machine.
# `make demo` calls this script. All output is in build/.
set -eu
bin="${VENV:-.venv}/bin"
lab=demo
runs="$PWD/build/demo"
config=examples/quickstart.yml
mkdir -p "$runs"
rm -rf "$runs/quickstart"

print_heading() { printf '\n== %s\n' "$*" >&2; }

run_on_lab() {
    trap 'print_heading "removing the lab"; "$bin/swarmtrain" lab down --name "$lab" --keep-images' EXIT
    trap 'exit 130' INT TERM
    eval "$("$bin/swarmtrain" lab env --name "$lab")"
    print_heading "building the image and pushing it to the lab's registry"
    "$bin/swarmtrain" image build . --tag registry.lab:5000/swarmtrain:latest --push
    print_heading "deploying $config on three nodes"
    "$bin/swarmtrain" deploy "$config"
}

run_on_this_machine() {
    print_heading "the lab cannot run here: running the same job as three agents on this machine"
    if [ "${CI:-}" = true ]; then
        echo "error: with CI=true the lab must start" >&2
        exit 1
    fi
    "$MAKE" --no-print-directory install-train
    trap '"$bin/swarmtrain" down quickstart' EXIT
    trap 'exit 130' INT TERM
    "$bin/swarmtrain" deploy "$config" -o runner.runner_type=local -o "trainer.save_dir=$runs/quickstart" \
        -o "data.data_prefixes=[$runs/data/stdlib-train]" -o "data.validation_data_prefixes=[$runs/data/stdlib-validation]"
}

print_heading "starting a swarm of three engines on this machine"
if "$bin/swarmtrain" lab up --name "$lab" --nodes 3 --shared "$runs"; then run_on_lab; else run_on_this_machine; fi

print_heading "the newest checkpoint is in"
find "$runs/quickstart" -maxdepth 1 -name 'step-*' | sort | tail -n 1
