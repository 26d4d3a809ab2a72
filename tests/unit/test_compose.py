"""The stack document: the same plan gives the same bytes, and only what Swarm honours stands in it."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmtrain.config.load import parse
from swarmtrain.errors import PlanError, StackError
from swarmtrain.plan import Cargo, CodeFile, Inventory, Machine, Plan, make_plan, offline
from swarmtrain.render.compose import Stack, stack, to_yaml, write

CODE = CodeFile.of("training_code.py", b"print('hello')\n")


def made(*overrides: str, nodes: int | None = None, secrets: tuple[CodeFile, ...] = (), code: CodeFile = CODE) -> Stack:
    config = parse(
        "runner: {hosts: [a, b, c, d], nodes: 3, min_nodes: 1}\ntopology: {global_batch_size: 24, micro_batch_size: 2}", overrides
    )
    return stack(make_plan(config, offline(config.runner.hosts or ()), Cargo((code,), secrets), run="demo", nodes=nodes))


def node(found: Stack, name: str = "node0") -> dict[str, Any]:
    service: dict[str, Any] = found.document["services"][name]
    return service


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert to_yaml(made()) == to_yaml(made())


def test_one_service_a_node_and_one_for_the_rendezvous() -> None:
    services = made().document["services"]
    assert list(services) == ["node0", "node1", "node2", "rendezvous"]
    assert [service["deploy"]["placement"]["constraints"] for service in services.values()] == [
        ["node.hostname==a"], ["node.hostname==b"], ["node.hostname==c"], ["node.role==manager"],
    ]  # fmt: skip


def test_scaling_leaves_the_other_services_as_they_are() -> None:
    three, four = made().document, made(nodes=4).document
    assert four["services"].pop("node3")
    assert four == three


def test_a_finished_node_is_not_restarted_and_a_failed_one_is() -> None:
    assert node(made())["deploy"]["restart_policy"]["condition"] == "on-failure"


def test_shared_memory_is_a_tmpfs_of_whole_bytes() -> None:
    assert node(made("runner.docker_config.shm_size=2g"))["volumes"] == [
        {"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 2147483648}}
    ]


def test_mounts_are_binds_or_volumes() -> None:
    volumes = node(made("runner.docker_config.docker_mounts=[/srv/x, /x, cache, /c]"))["volumes"][1:]
    assert volumes == [{"type": "bind", "source": "/srv/x", "target": "/x"}, {"type": "volume", "source": "cache", "target": "/c"}]


def test_named_volumes_are_declared() -> None:
    assert made("runner.docker_config.docker_mounts=[cache, /c]").document["volumes"] == {"cache": {}}


def test_a_volume_with_options_is_named_by_them() -> None:
    def volumes(server: str) -> tuple[dict[str, Any], str]:
        nfs = f"{{data: {{type: nfs, o: 'addr={server},rw,nfsvers=4.2', device: ':/export'}}}}"
        found = made(f"runner.docker_config={{docker_mounts: [[data, /d], [own, /o]], volumes: {nfs}}}")
        return found.document["volumes"], node(found)["volumes"][1]["source"]

    (declared, mounted), (_, elsewhere) = volumes("nas"), volumes("nas2")
    assert declared == {
        "own": {},
        mounted: {"driver": "local", "driver_opts": {"type": "nfs", "o": "addr=nas,rw,nfsvers=4.2", "device": ":/export"}},
    }
    assert mounted.startswith("data-")
    assert mounted != elsewhere


def test_caches_and_a_user_whom_the_image_does_not_know() -> None:
    environment = node(made("runner.docker_config={cache_dir: /cache, user: 1001:100}", "runner.env={HF_HOME: /mine}"))["environment"]
    assert {name: environment[name] for name in ("HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")} == {
        "HOME": "/cache", "HF_HOME": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor", "XDG_CACHE_HOME": "/cache",
    }  # fmt: skip
    assert node(made("runner.docker_config.user=1001"))["user"] == "1001"
    assert node(made("runner.docker_config.user=1001"))["environment"]["HOME"] == "/tmp"
    assert not {"HOME", "HF_HOME"} & set(node(made())["environment"])
    assert "user" not in node(made())


def test_values_mean_what_they_say_in_yaml_and_in_go_templates() -> None:
    found = made("runner.env={A: 'cost $5 {{.Node.ID}}'}")
    assert node(found)["environment"]["A"] == 'cost $5 {{"{{"}}.Node.ID}}'
    assert yaml.safe_load(to_yaml(found))["services"]["node0"]["environment"]["A"] == 'cost $$5 {{"{{"}}.Node.ID}}'


def test_what_swarm_would_expand_is_escaped_wherever_a_user_can_write_it() -> None:
    text = "$HOME {{.Node.ID}} $$ {{{"
    found = made(
        f"runner.script_args=['{text}']",
        f"runner.docker_config.docker_mounts=[['/mnt/{text}', '/at/{text}']]",
        "runner.swarm.labels={rack: 'a$b'}",
    )
    service = node(found)
    escaped = '$HOME {{"{{"}}.Node.ID}} $$ {{"{{"}}{'
    assert json.loads(service["environment"]["SWARMTRAIN_SCRIPT_ARGS"].replace('{{"{{"}}', "{{")) == [text]
    assert {key: service["volumes"][1][key] for key in ("source", "target")} == {"source": f"/mnt/{escaped}", "target": f"/at/{escaped}"}
    assert service["deploy"]["placement"]["constraints"][-1] == "node.labels.rack==a$b"
    written = yaml.safe_load(to_yaml(found))["services"]["node0"]
    assert written["volumes"][1]["source"] == f"/mnt/{escaped}".replace("$", "$$")
    assert written["deploy"]["placement"]["constraints"][-1] == "node.labels.rack==a$$b"


def test_long_names_fit_into_swarms() -> None:
    run = "a" * 46
    config = parse("runner: {hosts: [a], secrets: {A_LONG_NAME_OF_A_SECRET: key}}\ntopology: {global_batch_size: 1, micro_batch_size: 1}")
    cargo = Cargo((CODE,), (CodeFile.of("A_LONG_NAME_OF_A_SECRET", b"x"),))
    found = stack(make_plan(config, offline(["a"]), cargo, run=run)).document
    longest = max(len(f"{run}_{key}") for part in ("configs", "secrets") for key in found[part])
    assert (longest, len(found["configs"]), len(found["secrets"])) == (64, 2, 1)


def test_gpus_are_hidden_shown_or_reserved() -> None:
    assert node(made())["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert node(made("runner.swarm.gpu=visible"))["environment"]["NVIDIA_VISIBLE_DEVICES"] == "all"
    reserved = node(made("runner.swarm.gpu=reserve", "runner.default_gpu_count=2"))
    assert reserved["environment"]["NVIDIA_VISIBLE_DEVICES"] == "all"  # of those that it is given
    assert reserved["deploy"]["resources"]["reservations"]["generic_resources"] == [
        {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 2}}
    ]


def test_some_gpus_are_shown_the_same_on_every_host_or_each_its_own() -> None:
    shown = "runner.swarm={gpu: visible, gpu_ids: [1, GPU-ab]}"
    found = made(shown, "runner.hosts=[a, 'b slots=0,2,3', 'c slots=5,', 'd slots=1']")
    assert [node(found, name)["environment"]["NVIDIA_VISIBLE_DEVICES"] for name in ("node0", "node1", "node2")] == [
        "1,GPU-ab",
        "0,2,3",
        "5",
    ]
    assert [node(found, name)["environment"]["SWARMTRAIN_SLOTS"] for name in ("node0", "node1", "node2")] == ["2", "3", "1"]


def test_limits_are_text_because_docker_refuses_numbers() -> None:
    found = node(made("runner.docker_config.cpus=1.5", "runner.docker_config.memory=1g"))
    assert found["deploy"]["resources"] == {"limits": {"cpus": "1.5", "memory": "1073741824"}}


def test_networks() -> None:
    assert made().document["networks"] == {"training": {"driver": "overlay", "attachable": False}}
    jumbo = made("runner.swarm.mtu=9000", "runner.swarm.encrypted=true").document["networks"]["training"]
    assert jumbo["driver_opts"] == {"com.docker.network.driver.mtu": "9000", "encrypted": "true"}
    assert made("runner.swarm.network=mine").document["networks"] == {"training": {"external": True, "name": "mine"}}
    assert made("runner.max_nodes=150").document["networks"]["training"]["ipam"] == {"config": [{"subnet": "10.128.0.0/16"}]}


def test_a_network_without_a_way_out() -> None:
    assert made("runner.swarm.internal=true").document["networks"]["training"]["internal"] is True


def on_host(*overrides: str, machines: tuple[Machine, ...] = (), run: str = "demo") -> Stack:
    config = parse("runner: {nodes: 1, swarm: {network: host}}\ntopology: {global_batch_size: 1, micro_batch_size: 1}", overrides)
    return stack(make_plan(config, Inventory("the swarm", machines), Cargo((CODE,)), run=run))


MACHINES = (Machine("gpu-1", id="one", address="10.0.0.5"), Machine("gpu-2", id="two", address="10.0.0.6", manager=True))


def test_on_the_host_network_the_board_is_where_a_managers_address_says() -> None:
    found = on_host(machines=MACHINES)
    assert found.document["networks"] == {"training": {"external": True, "name": "host"}}
    board = node(found, "rendezvous")
    assert board["deploy"]["placement"]["constraints"] == ["node.role==manager", "node.id==two"]
    assert board["environment"]["SWARMTRAIN_BIND"] == "10.0.0.6"
    port = int(board["environment"]["SWARMTRAIN_STORE_PORT"])
    assert node(found)["environment"]["SWARMTRAIN_BOARD"] == f"10.0.0.6:{port + 1}"
    assert node(found)["environment"]["SWARMTRAIN_STORE"] == f"10.0.0.6:{port}"
    # Longer than it takes to notice that a node is dead: its name and process id will be the same again.
    assert node(found)["deploy"]["restart_policy"]["delay"] == "8s"


def test_ports_on_the_host_network_are_the_runs_own_and_always_the_same() -> None:
    def port(run: str, *overrides: str) -> int:
        return int(node(on_host(*overrides, machines=MACHINES, run=run), "rendezvous")["environment"]["SWARMTRAIN_STORE_PORT"])

    ports = [port(f"run-{number}") for number in range(20)]
    assert all(20000 <= each <= 29996 for each in ports)
    assert len(set(ports)) > 15
    assert [port(f"run-{number}") for number in range(20)] == ports
    assert port("demo", "runner.master_port=4000") == 4000
    assert node(made(), "rendezvous")["environment"]["SWARMTRAIN_STORE_PORT"] == "29500"


@pytest.mark.parametrize(
    ("address", "pin", "bind"),
    [
        ("10.0.0.6", "node.id==two", "10.0.0.6"),
        ("gpu-2", "node.id==two", "0.0.0.0"),  # noqa: S104  # a name may mean the machine's loopback to itself
        ("10.1.0.6", "node.ip==10.1.0.6", "10.1.0.6"),
        ("gpu-2-ib", "node.hostname==gpu-2-ib", "0.0.0.0"),  # noqa: S104
    ],
)
def test_a_managers_address_that_the_config_names(address: str, pin: str, bind: str) -> None:
    found = on_host(f"runner.master_addr={address}", machines=MACHINES)
    assert node(found, "rendezvous")["deploy"]["placement"]["constraints"][1] == pin
    assert node(found, "rendezvous")["environment"]["SWARMTRAIN_BIND"] == bind
    assert node(found)["environment"]["SWARMTRAIN_BOARD"].startswith(f"{address}:")


def test_without_a_managers_address_there_is_no_plan_on_the_host_network() -> None:
    with pytest.raises(PlanError, match="no manager's address is known"):
        on_host(machines=MACHINES[:1])


def test_rdma_is_allowed_only_when_it_is_asked_for() -> None:
    assert not {"ulimits", "cap_add"} & set(node(made()))
    found = node(made("runner.swarm.rdma=true"))
    assert (found["ulimits"], found["cap_add"], found["environment"]["NVIDIA_MOFED"]) == ({"memlock": -1}, ["IPC_LOCK"], "enabled")


def test_nccl_is_told_what_the_config_says_and_the_users_own_word_wins() -> None:
    assert not [name for name in node(made())["environment"] if name.startswith("NCCL_")]
    environment = node(made("runner.nccl={debug: INFO, ib_disable: true, buffsize: 8m}", "runner.env={NCCL_DEBUG: WARN}"))["environment"]
    assert {name: value for name, value in environment.items() if name.startswith("NCCL_")} == {
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_DISABLE": "1",
        "NCCL_BUFFSIZE": "8388608",
    }


def test_labels_constrain_too() -> None:
    found = node(made("runner.swarm.labels={rack: r1, gpu: h100}"))
    assert found["deploy"]["placement"]["constraints"] == ["node.hostname==a", "node.labels.gpu==h100", "node.labels.rack==r1"]


def test_a_secret_is_a_path_in_the_environment_and_a_private_file_beside_the_yaml(tmp_path: Path) -> None:
    found = made(secrets=(CodeFile.of("WANDB_API_KEY", b"hush"),))
    assert node(found)["environment"]["WANDB_API_KEY_FILE"] == "/run/secrets/WANDB_API_KEY"
    assert "hush" not in to_yaml(found)
    write(found, tmp_path / "generated.yml")
    (secret,) = [path for path in (tmp_path / "generated").iterdir() if path.name.startswith("WANDB")]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_writing_removes_what_an_earlier_version_left_and_nothing_else(tmp_path: Path) -> None:
    write(made(code=CodeFile.of("training_code.py", b"old")), tmp_path / "generated.yml")
    (tmp_path / "generated" / "mine.txt").write_text("keep me")
    found = made()
    write(found, tmp_path / "generated.yml")
    assert sorted(f"generated/{path.name}" for path in (tmp_path / "generated").iterdir()) == sorted([*found.files, "generated/mine.txt"])


def test_a_file_over_swarms_limit_is_refused() -> None:
    with pytest.raises(StackError, match=r"training_code\.py: 1000 KiB, where Swarm takes less than 1000 KiB"):
        made(code=CodeFile.of("training_code.py", b"#" * 1024_000))


def test_a_thousand_nodes_have_names_of_their_own() -> None:
    config = parse(
        f"runner: {{hosts: {[f'h{index}' for index in range(1000)]}}}\ntopology: {{global_batch_size: 1000, micro_batch_size: 1}}"
    )
    found = stack(make_plan(config, offline(config.runner.hosts or ()), Cargo((CODE,)), run="demo"))
    assert len(found.document["services"]) == 1001


def test_a_node_is_told_its_own_address_and_a_probe_everybody_s() -> None:
    found = plan_on_hosts("runner.hosts=[gpu-1 address=gpu-1-ib, gpu-2 address=10.1.0.2]")
    told = [node(stack(found), name)["environment"]["SWARMTRAIN_INTERFACE"] for name in ("node0", "node1")]
    assert told == ["gpu-1-ib", "10.1.0.2"]
    probe = node(stack(replace(found, probe=True)))["environment"]
    assert json.loads(probe["SWARMTRAIN_ADDRESSES"]) == {"node0": "gpu-1-ib", "node1": "10.1.0.2"}
    plain = node(stack(replace(plan_on_hosts("runner.hosts=[gpu-1, gpu-2]"), probe=True)))["environment"]
    assert json.loads(plain["SWARMTRAIN_ADDRESSES"]) == {"node0": "gpu-1", "node1": "gpu-2"}


def plan_on_hosts(hosts: str) -> Plan:
    config = parse(
        "runner: {swarm: {network: host}, master_addr: 10.0.0.9}\ntopology: {global_batch_size: 2, micro_batch_size: 1}", [hosts]
    )
    return make_plan(config, offline(config.runner.hosts or ()), Cargo((CODE,)), run="demo")
