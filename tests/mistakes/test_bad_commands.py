"""Commands that cannot be read: exit code 2, by the command line's own parser; and overrides and names that are wrong."""

from __future__ import annotations

from error_cases import ErrorCase

from swarmtrain import errors

CHAPTER = "The command line"


def test_usage(error_case: ErrorCase) -> None:
    """Invalid command line

    A command, an argument or an option is unknown or missing, or is not a number. The exit code is 2.
    """
    for command in (
        "swarmtrain deplyo config.yml",
        "swarmtrain deploy",
        "swarmtrain plan config.yml other.yml",
        "swarmtrain plan config.yml --verbose",
        "swarmtrain scale",
        "swarmtrain scale --nodes -1",
        "swarmtrain scale --nodes two",
        "swarmtrain logs --tail -5",
        "swarmtrain lab up --nodes 0",
        "swarmtrain image build",
    ):
        error_case(command, code=2)


def test_overrides(error_case: ErrorCase) -> None:
    """Invalid override

    `-o` takes `key.path=value`, where the value is YAML. Errors in overrides are reported together with those in the file.
    """
    error_case.write_config("""\
        runner: {nodes: 2}
        training_groups: [{group_name: all}]
        trainer: {sed: 1}
        """)
    error_case("swarmtrain plan config.yml -o trainer.train_iterations")
    error_case(
        "swarmtrain plan config.yml -o runner.nodes.most=3 -o training_groups.1.weight_decay=0 -o training_groups.all.weight_decay=0",
        expect_hint=False,
    )
    error_case("swarmtrain plan config.yml -o trainer.steps=100 -o 'runner.hosts=[gpu-1' -o runner.nodes=many")


def test_run_names(error_case: ErrorCase) -> None:
    """Invalid run name

    A run's name becomes part of host names and of Swarm config names, which have at most 64 characters. Without `--name`, it is the name of
    the config file in lower case, with dashes in place of characters that are not letters or digits.
    """
    error_case.write_config("runner: {hosts: [gpu-1]}")
    error_case("swarmtrain generate config.yml --name My_Run")
    error_case("swarmtrain generate config.yml --name -nodes-")
    error_case("swarmtrain generate config.yml --name ''")
    error_case(f"swarmtrain generate config.yml --name {'a' * 47}")
    error_case.run_setup("cp config.yml ___.yml")
    error_case("swarmtrain generate ___.yml")


def test_a_base_image_of_an_image_that_is_not_built(error_case: ErrorCase) -> None:
    """Base image of an image that is not built

    `queue up` builds an image, unless `--image` names one.
    """
    error_case(
        "swarmtrain queue up --image registry.lab:5000/swarmtrain:0.1 --base python:3.11-slim-bookworm",
        code=errors.EXIT_USAGE,
        expect_hint=False,
    )
