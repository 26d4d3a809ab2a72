#!/bin/sh
# The quickstart, from nothing to a trained model: a swarm of three engines on this machine, the image, the run.
# Where no swarm can be hosted (no root, no Linux) the same job runs as three agents on this machine.
# `make demo` calls this. Everything it writes is in build/.
set -eu
bin="${VENV:-.venv}/bin"
lab=demo
runs="$PWD/build/demo"
config=examples/quickstart.yml
mkdir -p "$runs"
rm -rf "$runs/quickstart"

say() { printf '\n== %s\n' "$*" >&2; }

on_a_swarm() {
    trap 'say "taking the lab down"; "$bin/swarmtrain" lab down --name "$lab" --keep-images' EXIT
    trap 'exit 130' INT TERM
    eval "$("$bin/swarmtrain" lab env --name "$lab")"
    say "building the image and pushing it to the lab's registry"
    "$bin/swarmtrain" image build . --tag registry.lab:5000/swarmtrain:latest --push
    say "deploying $config on three nodes"
    "$bin/swarmtrain" deploy "$config"
}

on_this_machine() {
    say "no swarm can be hosted here: running the same job as three agents on this machine"
    if [ "${CI:-}" = true ]; then
        echo "error: with CI=true the lab must be able to start" >&2
        exit 1
    fi
    "$MAKE" --no-print-directory install-train
    trap '"$bin/swarmtrain" down quickstart' EXIT
    trap 'exit 130' INT TERM
    "$bin/swarmtrain" deploy "$config" -o runner.runner_type=local -o "trainer.save_dir=$runs/quickstart" \
        -o "data.data_prefixes=[$runs/data/stdlib-train]" -o "data.validation_data_prefixes=[$runs/data/stdlib-validation]"
}

say "bringing up a swarm of three engines on this machine"
if "$bin/swarmtrain" lab up --name "$lab" --nodes 3 --shared "$runs"; then on_a_swarm; else on_this_machine; fi

say "the newest checkpoint is in"
find "$runs/quickstart" -maxdepth 1 -name 'step-*' | sort | tail -n 1
