"""Mounts that exist, but that the user of the training process cannot use. Only the node can check that, inside its container."""

from __future__ import annotations

import subprocess

import pytest
from error_cases import ROOT, ErrorCase

from swarmtrain.lab import Lab

CHAPTER = "The nodes"
pytestmark = [pytest.mark.usefixtures("connect_to_lab"), pytest.mark.test_all_only("one mistake per run")]


def run_on_node(lab: Lab, node: str, command: str) -> None:
    subprocess.run([*lab.build_enter_command(node), "sh", "-ec", command], check=True)


def test_a_mount_that_may_not_be_read(error_case: ErrorCase, lab: Lab, image: str) -> None:
    """Mount is not readable

    The container's user is not root, and on one node only root can read the folder. (Here `chmod 700` on node1.)
    """
    run_on_node(lab, "node0", "mkdir -p -m 755 /mnt/tokens")
    run_on_node(lab, "node1", "mkdir -p -m 700 /mnt/tokens")
    error_case.write_config(
        f"""
        runner:
          nodes: 2
          docker_config:
            docker_container: {image}
            docker_mounts: [[/mnt/tokens, /data]]
        """
    )
    error_case("swarmtrain deploy config.yml", code=3, start_pattern=r"^· [\d:]+ node1", allowed_changes="home/state")
    error_case("swarmtrain down", code=0, show=False, allowed_changes="home/state")


def test_a_save_dir_that_one_node_cannot_write(error_case: ErrorCase, lab: Lab, image: str) -> None:
    """save_dir is not writable on one node

    All nodes write checkpoints together, so each node tests `save_dir` before the first step. (Here it is on a shared disk, which node1 has
    mounted read-only.)
    """
    run_on_node(lab, "node0", "mkdir -p -m 777 /mnt/runs; mount --bind /mnt/shared /mnt/runs")
    run_on_node(lab, "node1", "mkdir -p -m 777 /mnt/runs; mount --bind /mnt/shared /mnt/runs; mount -o remount,bind,ro /mnt/runs")
    for name in ("training_code.py", "datautils.py"):
        error_case.write_file(name, (ROOT / name).read_bytes())
    error_case.write_config(
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
        data: {{data_prefixes: [data/stdlib-train], validation_data_prefixes: [data/stdlib-validation]}}
        script: {{dataset: python_sources}}
        """
    )
    error_case.add_replacement(r"node1 rank \d", "node1 rank 1")  # ranks are assigned by address
    try:
        error_case("swarmtrain deploy config.yml", code=3, start_pattern=r"^· [\d:]+ node1 rank", allowed_changes="home/state")
    finally:
        error_case("swarmtrain down", code=0, show=False, allowed_changes="home/state")
        for node in ("node0", "node1"):
            run_on_node(lab, node, "umount /mnt/runs")
