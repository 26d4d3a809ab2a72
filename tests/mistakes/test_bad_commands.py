"""Commands that cannot be read: exit code 2, by the command line's own parser; and overrides and names that are wrong."""

from __future__ import annotations

from answers import Answer

CHAPTER = "The command line"


def test_usage(answer: Answer) -> None:
    """Usage

    A command, an argument or an option that is not there, or is missing, or no number. The exit code is 2.
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
        answer(command, code=2)


def test_overrides(answer: Answer) -> None:
    """Overrides

    `-o` takes `key.path=value`, the value being YAML. Their mistakes are told with those of the file.
    """
    answer.config("""\
        runner: {nodes: 2}
        training_groups: [{group_name: all}]
        trainer: {sed: 1}
        """)
    answer("swarmtrain plan config.yml -o trainer.train_iterations")
    answer(
        "swarmtrain plan config.yml -o runner.nodes.most=3 -o training_groups.1.weight_decay=0 -o training_groups.all.weight_decay=0",
        hint=False,
    )
    answer("swarmtrain plan config.yml -o trainer.steps=100 -o 'runner.hosts=[gpu-1' -o runner.nodes=many")


def test_run_names(answer: Answer) -> None:
    """Names of runs

    A run's name becomes part of host names, and of the names of Swarm's configs, which have at most 64 characters. Without `--name` it is
    that of the config file, in lower case, with a dash for what is no letter and no digit.
    """
    answer.config("runner: {hosts: [gpu-1]}")
    answer("swarmtrain generate config.yml --name My_Run")
    answer("swarmtrain generate config.yml --name -nodes-")
    answer("swarmtrain generate config.yml --name ''")
    answer(f"swarmtrain generate config.yml --name {'a' * 47}")
    answer.situation("cp config.yml ___.yml")
    answer("swarmtrain generate ___.yml")
