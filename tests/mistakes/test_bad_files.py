"""The files that a config names, and those that a command writes."""

from __future__ import annotations

import resource
import shutil

from error_cases import ErrorCase

CHAPTER = "The files it names"


def test_uncertain_script(error_case: ErrorCase) -> None:
    """Script that starts several commands, or depends on variables

    A script is imported only if it is certain which command it starts, with which arguments.
    """
    error_case.write_file("two.sh", "#!/bin/bash\nsrun python train.py --lr 0.1\nsrun python train.py --lr 0.2\n")
    error_case("swarmtrain import two.sh")
    error_case.write_file("open.sh", "#!/bin/bash\nOUT=runs/$(date +%F)\ntorchrun train.py --data $DATA_DIR --out $OUT --config <CONFIG>\n")
    error_case("swarmtrain import open.sh")
    error_case.write_file("wrapper.sh", "#!/bin/bash\nsrun ./run_in_container.sh train.py\n")
    error_case("swarmtrain import wrapper.sh")


def test_missing_script(error_case: ErrorCase) -> None:
    """Script file is missing

    `runner.script` and `runner.code` are read where the command runs, and are shipped with the run.
    """
    error_case.write_config("runner: {hosts: [gpu-1], script: train.py}")
    error_case("swarmtrain generate config.yml")
    error_case.write_config("runner: {hosts: [gpu-1], code: [helpers.py]}")
    error_case("swarmtrain generate config.yml")


def test_script_is_not_a_file(error_case: ErrorCase) -> None:
    """Script is not a regular file

    A folder is not shipped, and a file without an end is not read.
    """
    error_case.run_setup("mkdir training")
    error_case.write_config("runner: {hosts: [gpu-1], script: training}")
    error_case("swarmtrain generate config.yml")
    error_case.write_config("runner: {hosts: [gpu-1], script: /dev/zero}")
    error_case("swarmtrain generate config.yml")


def test_unreadable_script(error_case: ErrorCase) -> None:
    """Script file is not readable

    The file's mode does not allow the user to read it.
    """
    error_case.write_config("runner: {hosts: [gpu-1]}")
    error_case.run_setup("chmod 000 training_code.py")
    error_case("swarmtrain generate config.yml", as_nobody=True)


def test_code_twice(error_case: ErrorCase) -> None:
    """Two files with the same name

    Relative paths are kept. A file from outside of the working folder is put at the top, where its name can be used only once.
    """
    error_case.run_setup("cp training_code.py ..")
    error_case.write_config("runner: {hosts: [gpu-1], code: [../training_code.py]}")
    error_case("swarmtrain generate config.yml")


def test_code_without_files(error_case: ErrorCase) -> None:
    """Folder or pattern in runner.code has no files

    Of a folder, files that git or its own `.dockerignore` ignores are not shipped.
    """
    error_case.run_setup("mkdir src; touch src/model.pyc; echo '*.pyc' > src/.dockerignore")
    error_case.write_config("runner: {hosts: [gpu-1], code: [src]}")
    error_case("swarmtrain generate config.yml")
    error_case.write_config("runner: {hosts: [gpu-1], code: ['src/**/*.py']}")
    error_case("swarmtrain generate config.yml")


def test_missing_secret(error_case: ErrorCase) -> None:
    """Secret file is missing

    The value of a secret is the name of a file.
    """
    error_case.write_config("runner: {hosts: [gpu-1], secrets: {WANDB_API_KEY: wandb.key}}")
    error_case("swarmtrain generate config.yml")


def test_python_of_hosts(error_case: ErrorCase) -> None:
    """Ranks do not use the Python of their hosts

    `swarmtrain env` checks the Python of hosts; with other values of `runner_type`, ranks run in containers or on this machine.
    """
    error_case.write_config("runner: {runner_type: local}")
    error_case("swarmtrain env config.yml")


def test_large_files(error_case: ErrorCase) -> None:
    """File exceeds Swarm's size limit

    `generate` ships code as Swarm configs, which must be smaller than 1000 KiB; `deploy` puts larger code into a layer of the image.
    Secrets must be smaller than 500 KiB.
    """
    error_case.run_setup("truncate -s 1000K table.py; truncate -s 500K key")
    error_case.write_config("runner: {hosts: [gpu-1], code: [table.py]}")
    error_case("swarmtrain generate config.yml")
    error_case.write_config("runner: {hosts: [gpu-1], secrets: {KEY: key}}")
    error_case("swarmtrain generate config.yml")
    error_case.add_paragraph("The config itself is also shipped as a Swarm config, as JSON with all its defaults.")
    error_case.run_setup("""(echo 'runner: {hosts: [gpu-1]}'; echo 'script:'; seq -f '  word%g: {}' 60000) > config.yml""")
    error_case("swarmtrain generate config.yml")


def test_unwritable(error_case: ErrorCase) -> None:
    """Output file cannot be written

    The output folder belongs to another user, or the path of the file is a folder.
    """
    error_case.write_config("runner: {hosts: [gpu-1]}")
    error_case("swarmtrain generate config.yml", as_nobody=True)
    error_case("swarmtrain generate config.yml --output .")
    error_case("swarmtrain generate config.yml --output config.yml/stack.yml")
    error_case("swarmtrain init new.yml", as_nobody=True)


def test_demo_folder_is_a_file(error_case: ErrorCase) -> None:
    """Demo folder is a file

    `swarmtrain demo` creates its folder, and needs write permission in it.
    """
    error_case.write_file("notes.txt", "", show=False)
    error_case("swarmtrain demo notes.txt")


def test_init_exists(error_case: ErrorCase) -> None:
    """Config file already exists

    `swarmtrain init` does not overwrite an existing file without `--force`.
    """
    error_case.write_config("runner: {nodes: 2}")
    error_case("swarmtrain init config.yml")


def test_full_disk(error_case: ErrorCase) -> None:
    """Disk is full

    The old stack file and the files that it names stay unchanged and complete. (Here a file size limit simulates the full disk.)
    """
    error_case.write_config("runner: {hosts: [gpu-1]}")
    error_case("swarmtrain generate config.yml", code=0, allowed_changes="compose")
    error_case.resource_limits = {resource.RLIMIT_FSIZE: 1024}
    error_case.add_paragraph("The script has changed, and the disk has no space left:")
    error_case.run_setup("echo '# better' >> training_code.py")
    error_case("swarmtrain generate config.yml")
    error_case("swarmtrain init new.yml")
    shutil.rmtree(error_case.project / "compose")
    error_case("swarmtrain generate config.yml --output elsewhere/stack.yml")


def test_state_directory_of_another_user(error_case: ErrorCase) -> None:
    """State folder belongs to another user

    Runs of this machine (`runner_type: local`) are stored in `~/.local/state/swarmtrain`. After a `sudo`, this folder may belong to root.
    """
    error_case.write_config("runner: {runner_type: local, nodes: 2}")
    state = error_case.home / "state"
    state.mkdir()
    (state / "swarmtrain").mkdir(mode=0o700)
    error_case("swarmtrain status", as_nobody=True)
    (state / "swarmtrain").chmod(0o755)
    error_case("swarmtrain deploy config.yml", as_nobody=True)
    error_case.add_paragraph("The same command on a full disk:")
    error_case.resource_limits = {resource.RLIMIT_FSIZE: 1024}
    error_case("swarmtrain deploy config.yml", allowed_changes=r"state/swarmtrain(/config|$)")
