"""Mounts that are there, and of no use to the user that trains. Only the node itself can say so, from inside its container."""

from __future__ import annotations

import subprocess

import pytest
from answers import ROOT, Answer

from swarmtrain.lab import Lab

CHAPTER = "The nodes"
pytestmark = [pytest.mark.usefixtures("on_the_lab"), pytest.mark.test_all_only("one mistake per run")]


def on(lab: Lab, node: str, command: str) -> None:
    subprocess.run([*lab.enter(node), "sh", "-ec", command], check=True)


def test_a_mount_that_may_not_be_read(answer: Answer, lab: Lab, image: str) -> None:
    """A mount that may not be read

    The container's user is not root, and on one node the folder is root's alone. (`chmod 700` on node1 here.)
    """
    on(lab, "node0", "mkdir -p -m 755 /mnt/tokens")
    on(lab, "node1", "mkdir -p -m 700 /mnt/tokens")
    answer.config(
        f"""
        runner:
          nodes: 2
          docker_config:
            docker_container: {image}
            docker_mounts: [[/mnt/tokens, /data]]
        """
    )
    answer("swarmtrain deploy config.yml", code=3, since="^· node1", changes="home/state")
    answer("swarmtrain down", code=0, show=False, changes="home/state")


def test_a_save_dir_that_one_node_cannot_write(answer: Answer, lab: Lab, image: str) -> None:
    """A save_dir that one node cannot write

    Checkpoints are written by all nodes together, so each of them tries it out before the first step. (A shared disk here, which
    node1 has mounted read-only.)
    """
    on(lab, "node0", "mkdir -p -m 777 /mnt/runs; mount --bind /mnt/shared /mnt/runs")
    on(lab, "node1", "mkdir -p -m 777 /mnt/runs; mount --bind /mnt/shared /mnt/runs; mount -o remount,bind,ro /mnt/runs")
    for name in ("training_code.py", "datautils.py"):
        answer.file(name, (ROOT / name).read_bytes())
    answer.config(
        f"""
        runner:
          nodes: 2
          code: [datautils.py]
          docker_config:
            docker_container: {image}
            docker_mounts: [[/mnt/runs, /workspace/runs]]
        topology: {{global_batch_size: 4, micro_batch_size: 1}}
        trainer: {{train_iterations: 4, save_dir: runs/config, save_interval: 2}}
        transformer_architecture: {{hidden_size: 32, num_layers: 1, num_attention_heads: 2, sequence_length: 16}}
        data: {{data_prefixes: [data/stdlib-train], validation_data_prefixes: [data/stdlib-heldout]}}
        script: {{dataset: python_sources}}
        """
    )
    answer.same(r"node1 rank \d", "node1 rank 1")  # ranks are dealt by address
    try:
        answer("swarmtrain deploy config.yml", code=3, since="^· node1 rank", changes="home/state")
    finally:
        answer("swarmtrain down", code=0, show=False, changes="home/state")
        for node in ("node0", "node1"):
            on(lab, node, "umount /mnt/runs")
