"""The files that a config names, and those that a command writes."""

from __future__ import annotations

import resource
import shutil

from answers import Answer

CHAPTER = "The files it names"


def test_missing_script(answer: Answer) -> None:
    """A script that is not there

    `runner.script` and `runner.code` are read where the command runs, and travel with the run.
    """
    answer.config("runner: {hosts: [gpu-1], script: train.py}")
    answer("swarmtrain generate config.yml")
    answer.config("runner: {hosts: [gpu-1], code: [helpers.py]}")
    answer("swarmtrain generate config.yml")


def test_script_is_no_file(answer: Answer) -> None:
    """A script that is no file

    A folder does not travel, and what has no end is not read.
    """
    answer.situation("mkdir training")
    answer.config("runner: {hosts: [gpu-1], script: training}")
    answer("swarmtrain generate config.yml")
    answer.config("runner: {hosts: [gpu-1], script: /dev/zero}")
    answer("swarmtrain generate config.yml")


def test_unreadable_script(answer: Answer) -> None:
    """A script that may not be read

    Its mode keeps the user from reading it.
    """
    answer.config("runner: {hosts: [gpu-1]}")
    answer.situation("chmod 000 training_code.py")
    answer("swarmtrain generate config.yml", nobody=True)


def test_code_twice(answer: Answer) -> None:
    """Two files of one name

    All that travels lies in one folder, so each name can be there once.
    """
    answer.situation("mkdir old; cp training_code.py old/")
    answer.config("runner: {hosts: [gpu-1], code: [training_code.py]}")
    answer("swarmtrain generate config.yml")
    answer.config("runner: {hosts: [gpu-1], code: [old/training_code.py]}")
    answer("swarmtrain generate config.yml")


def test_missing_secret(answer: Answer) -> None:
    """A secret without a file

    A secret is the name of a file.
    """
    answer.config("runner: {hosts: [gpu-1], secrets: {WANDB_API_KEY: wandb.key}}")
    answer("swarmtrain generate config.yml")


def test_list_of_versions(answer: Answer) -> None:
    """A list that pins no versions

    `swarmtrain env` gives all hosts the same, today and next year.
    """
    answer.config("runner: {runner_type: pdsh, hosts: [gpu-1]}")
    answer("swarmtrain env config.yml --path /opt/training -r list.txt", hint=False)
    answer.situation("printf 'numpy==2.4.6\\ntorch>=2.11\\n' >list.txt")
    answer("swarmtrain env config.yml --path /opt/training -r list.txt")
    answer.situation("printf 'numpy==2.4.6\\n' >list.txt; mkdir wheels")
    answer("swarmtrain env config.yml --path /opt/training -r list.txt --wheels wheels")
    answer("swarmtrain env config.yml -r list.txt -o runner.python=python3.12")
    answer("swarmtrain env config.yml -o runner.runner_type=local")


def test_large_files(answer: Answer) -> None:
    """A file over Swarm's limit

    Swarm takes configs of less than 1000 KiB, which is how code travels, and secrets of less than 500 KiB.
    """
    answer.situation("truncate -s 1000K table.py; truncate -s 500K key")
    answer.config("runner: {hosts: [gpu-1], code: [table.py]}")
    answer("swarmtrain generate config.yml")
    answer.config("runner: {hosts: [gpu-1], secrets: {KEY: key}}")
    answer("swarmtrain generate config.yml")
    answer.say("The config itself is such a file, with all its defaults and as JSON.")
    answer.situation("""(echo 'runner: {hosts: [gpu-1]}'; echo 'script:'; seq -f '  word%g: {}' 60000) > config.yml""")
    answer("swarmtrain generate config.yml")


def test_unwritable(answer: Answer) -> None:
    """An output that cannot be written

    Its folder is another user's, or what should be a file is a folder.
    """
    answer.config("runner: {hosts: [gpu-1]}")
    answer("swarmtrain generate config.yml", nobody=True)
    answer("swarmtrain generate config.yml --output .")
    answer("swarmtrain generate config.yml --output config.yml/stack.yml")
    answer("swarmtrain init new.yml", nobody=True)


def test_init_exists(answer: Answer) -> None:
    """A file in the way of `init`

    What is there is not overwritten unasked.
    """
    answer.config("runner: {nodes: 2}")
    answer("swarmtrain init config.yml")


def test_full_disk(answer: Answer) -> None:
    """A full disk

    The old stack file stays as it is, whole, and so do the files that it names. (Here a limit of the file size plays the full disk.)
    """
    answer.config("runner: {hosts: [gpu-1]}")
    answer("swarmtrain generate config.yml", code=0, changes="compose")
    answer.limits = {resource.RLIMIT_FSIZE: 1024}
    answer.say("With another script, and no room left:")
    answer.situation("echo '# better' >> training_code.py")
    answer("swarmtrain generate config.yml")
    answer("swarmtrain init new.yml")
    shutil.rmtree(answer.project / "compose")
    answer("swarmtrain generate config.yml --output elsewhere/stack.yml")


def test_state_of_another(answer: Answer) -> None:
    """Runs of another user

    The runs of this machine (`runner_type: local`) are kept in `~/.local/state/swarmtrain`, which may be root's after a `sudo`.
    """
    answer.config("runner: {runner_type: local, nodes: 2}")
    state = answer.home / "state"
    state.mkdir()
    (state / "swarmtrain").mkdir(mode=0o700)
    answer("swarmtrain status", nobody=True)
    (state / "swarmtrain").chmod(0o755)
    answer("swarmtrain deploy config.yml", nobody=True)
    answer.say("The same where there is no room left:")
    answer.limits = {resource.RLIMIT_FSIZE: 1024}
    answer("swarmtrain deploy config.yml", changes="state/swarmtrain/config")
