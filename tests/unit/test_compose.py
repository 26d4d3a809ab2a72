"""The stack document: the same plan gives the same bytes, and it contains only what Swarm honours."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml

from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.fields.overlay_subnet import LARGE_SUBNET_RANGE, count_required_addresses
from swarmtrain.errors import PlanError, StackError
from swarmtrain.planning.inventory import Inventory, Machine, build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render.stack_document import Stack, render_stack, render_stack_yaml, write_stack

CODE = RunFile.from_content("training_code.py", b"print('hello')\n")


def build_demo_stack(*overrides: str, nodes: int | None = None, secrets: tuple[RunFile, ...] = (), code: RunFile = CODE) -> Stack:
    config = parse_config(
        "runner: {hosts: [a, b, c, d], nodes: 3, min_nodes: 1}\ntopology: {global_batch_size: 24, micro_batch_size: 2}", overrides
    )
    return render_stack(
        build_plan(config, build_offline_inventory(config.runner.host_entries), Cargo((code,), secrets), run="demo", node_count=nodes)
    )


def get_service(stack_document: Stack, name: str = "node0") -> dict[str, Any]:
    service: dict[str, Any] = stack_document.document["services"][name]
    return service


def test_the_same_plan_gives_the_same_bytes() -> None:
    assert render_stack_yaml(build_demo_stack()) == render_stack_yaml(build_demo_stack())


def test_one_service_a_node_and_one_for_the_rendezvous() -> None:
    services = build_demo_stack().document["services"]
    assert list(services) == ["node0", "node1", "node2", "rendezvous"]
    assert [service["deploy"]["placement"]["constraints"] for service in services.values()] == [
        ["node.hostname==a"], ["node.hostname==b"], ["node.hostname==c"], ["node.role==manager"],
    ]  # fmt: skip


def test_scaling_leaves_the_other_services_as_they_are() -> None:
    three, four = build_demo_stack().document, build_demo_stack(nodes=4).document
    assert four["services"].pop("node3")
    assert four == three


def test_a_finished_node_is_not_restarted_and_a_failed_one_is() -> None:
    assert get_service(build_demo_stack())["deploy"]["restart_policy"]["condition"] == "on-failure"


def test_shared_memory_is_a_tmpfs_of_integer_bytes() -> None:
    assert get_service(build_demo_stack("runner.docker_config.shm_size=2g"))["volumes"] == [
        {"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 2147483648}}
    ]


def test_mounts_are_binds_or_volumes() -> None:
    volumes = get_service(build_demo_stack("runner.docker_config.docker_mounts=[/srv/x, /x, cache, /c]"))["volumes"][1:]
    assert volumes == [{"type": "bind", "source": "/srv/x", "target": "/x"}, {"type": "volume", "source": "cache", "target": "/c"}]


def test_named_volumes_are_declared() -> None:
    assert build_demo_stack("runner.docker_config.docker_mounts=[cache, /c]").document["volumes"] == {"cache": {}}


def test_a_volume_with_options_is_named_by_them() -> None:
    def volumes(server: str) -> tuple[dict[str, Any], str]:
        nfs = f"{{data: {{type: nfs, o: 'addr={server},rw,nfsvers=4.2', device: ':/export'}}}}"
        found = build_demo_stack(f"runner.docker_config={{docker_mounts: [[data, /d], [own, /o]], volumes: {nfs}}}")
        return found.document["volumes"], get_service(found)["volumes"][1]["source"]

    (declared, mounted), (_, elsewhere) = volumes("nas"), volumes("nas2")
    assert declared == {
        "own": {},
        mounted: {"driver": "local", "driver_opts": {"type": "nfs", "o": "addr=nas,rw,nfsvers=4.2", "device": ":/export"}},
    }
    assert mounted.startswith("data-")
    assert mounted != elsewhere


def test_caches_and_a_user_whom_the_image_does_not_know() -> None:
    environment = get_service(build_demo_stack("runner.docker_config={cache_dir: /cache, user: 1001:100}", "runner.env={HF_HOME: /mine}"))[
        "environment"
    ]
    assert {name: environment[name] for name in ("HOME", "HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")} == {
        "HOME": "/cache", "HF_HOME": "/mine", "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor", "XDG_CACHE_HOME": "/cache",
    }  # fmt: skip
    assert get_service(build_demo_stack("runner.docker_config.user=1001"))["user"] == "1001"
    assert get_service(build_demo_stack("runner.docker_config.user=1001"))["environment"]["HOME"] == "/tmp"
    assert not {"HOME", "HF_HOME"} & set(get_service(build_demo_stack())["environment"])
    assert "user" not in get_service(build_demo_stack())


def test_values_mean_what_they_say_in_yaml_and_in_go_templates() -> None:
    found = build_demo_stack("runner.env={A: 'cost $5 {{.Node.ID}}'}")
    assert get_service(found)["environment"]["A"] == 'cost $5 {{"{{"}}.Node.ID}}'
    assert yaml.safe_load(render_stack_yaml(found))["services"]["node0"]["environment"]["A"] == 'cost $$5 {{"{{"}}.Node.ID}}'


def test_what_swarm_would_expand_is_escaped_wherever_a_user_can_write_it() -> None:
    text = "$HOME {{.Node.ID}} $$ {{{"
    found = build_demo_stack(
        f"runner.script_args=['{text}']",
        f"runner.docker_config.docker_mounts=[['/mnt/{text}', '/at/{text}']]",
        "runner.swarm.labels={rack: 'a$b'}",
    )
    service = get_service(found)
    escaped = '$HOME {{"{{"}}.Node.ID}} $$ {{"{{"}}{'
    assert json.loads(service["environment"]["SWARMTRAIN_SCRIPT_ARGS"].replace('{{"{{"}}', "{{")) == [text]
    assert {key: service["volumes"][1][key] for key in ("source", "target")} == {"source": f"/mnt/{escaped}", "target": f"/at/{escaped}"}
    assert service["deploy"]["placement"]["constraints"][-1] == "node.labels.rack==a$b"
    written = yaml.safe_load(render_stack_yaml(found))["services"]["node0"]
    assert written["volumes"][1]["source"] == f"/mnt/{escaped}".replace("$", "$$")
    assert written["deploy"]["placement"]["constraints"][-1] == "node.labels.rack==a$$b"


def test_long_names_fit_into_swarms() -> None:
    run = "a" * 46
    config = parse_config(
        "runner: {hosts: [a], secrets: {A_LONG_NAME_OF_A_SECRET: key}}\ntopology: {global_batch_size: 1, micro_batch_size: 1}"
    )
    cargo = Cargo((CODE,), (RunFile.from_content("A_LONG_NAME_OF_A_SECRET", b"x"),))
    found = render_stack(build_plan(config, build_offline_inventory([HostEntry.parse("a")]), cargo, run=run)).document
    longest = max(len(f"{run}_{key}") for part in ("configs", "secrets") for key in found[part])
    assert (longest, len(found["configs"]), len(found["secrets"])) == (64, 2, 1)


@pytest.mark.parametrize("gpu", ["none", "visible", "reserve"])
def test_the_rendezvous_sees_no_gpu(gpu: str) -> None:
    assert get_service(build_demo_stack(f"runner.swarm.gpu={gpu}"), "rendezvous")["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_the_header_names_the_option_for_a_registry_with_a_login() -> None:
    first, second, *_ = render_stack_yaml(build_demo_stack()).splitlines()
    assert first == "# Written by swarmtrain. Run it with: docker stack deploy -c THIS_FILE demo"
    assert "--with-registry-auth" in second
    assert "--with-registry-auth" not in render_stack_yaml(replace(build_demo_stack(), command_note=""))


def test_gpus_are_hidden_shown_or_reserved() -> None:
    assert get_service(build_demo_stack())["environment"]["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert get_service(build_demo_stack("runner.swarm.gpu=visible"))["environment"]["NVIDIA_VISIBLE_DEVICES"] == "all"
    reserved = get_service(build_demo_stack("runner.swarm.gpu=reserve", "runner.default_gpu_count=2"))
    assert reserved["environment"]["NVIDIA_VISIBLE_DEVICES"] == "all"  # all that Swarm assigns to it
    assert reserved["deploy"]["resources"]["reservations"]["generic_resources"] == [
        {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 2}}
    ]


def test_some_gpus_are_shown_the_same_on_every_host_or_each_its_own() -> None:
    shown = "runner.swarm={gpu: visible, gpu_ids: [1, GPU-ab]}"
    found = build_demo_stack(shown, "runner.hosts=[a, 'b slots=0,2,3', 'c slots=5,', 'd slots=1']")
    assert [get_service(found, name)["environment"]["NVIDIA_VISIBLE_DEVICES"] for name in ("node0", "node1", "node2")] == [
        "1,GPU-ab",
        "0,2,3",
        "5",
    ]
    assert [get_service(found, name)["environment"]["SWARMTRAIN_SLOTS"] for name in ("node0", "node1", "node2")] == ["2", "3", "1"]


def test_limits_are_text_because_docker_refuses_numbers() -> None:
    found = get_service(build_demo_stack("runner.docker_config.cpus=1.5", "runner.docker_config.memory=1g"))
    assert found["deploy"]["resources"] == {"limits": {"cpus": "1.5", "memory": "1073741824"}}


def test_networks() -> None:
    assert build_demo_stack().document["networks"] == {"training": {"driver": "overlay", "attachable": False}}
    jumbo = build_demo_stack("runner.swarm.mtu=9000", "runner.swarm.encrypted=true").document["networks"]["training"]
    assert jumbo["driver_opts"] == {"com.docker.network.driver.mtu": "9000", "encrypted": "true"}
    assert build_demo_stack("runner.swarm.network=mine").document["networks"] == {"training": {"external": True, "name": "mine"}}
    subnet = build_demo_stack("runner.swarm.subnet=10.20.0.0/24").document["networks"]["training"]
    assert subnet["ipam"] == {"config": [{"subnet": "10.20.0.0/24"}]}


def test_a_run_of_many_nodes_has_a_large_subnet_that_depends_on_its_name_alone() -> None:
    def read_subnet(run: str, max_nodes: int) -> IPv4Network:
        config = parse_config(f"runner: {{nodes: 1, max_nodes: {max_nodes}}}\ntopology: {{global_batch_size: 1, micro_batch_size: 1}}")
        stack = render_stack(build_plan(config, Inventory("the swarm", (Machine("a"),)), Cargo((CODE,)), run=run))
        return IPv4Network(stack.document["networks"]["training"]["ipam"]["config"][0]["subnet"])

    subnets = {run: read_subnet(run, 150) for run in ("demo", "other", "third")}
    assert len(set(subnets.values())) == 3
    assert read_subnet("demo", 101) == read_subnet("demo", 1600) == subnets["demo"]
    sizes = [(101, subnets["demo"]), (1601, read_subnet("demo", 1601)), (10_000, read_subnet("demo", 10_000))]
    for max_nodes, subnet in sizes:
        assert subnet.subnet_of(LARGE_SUBNET_RANGE)
        assert subnet.num_addresses >= count_required_addresses(max_nodes)


def test_an_internal_network() -> None:
    assert build_demo_stack("runner.swarm.internal=true").document["networks"]["training"]["internal"] is True


def build_host_network_stack(*overrides: str, machines: tuple[Machine, ...] = (), run: str = "demo") -> Stack:
    config = parse_config("runner: {nodes: 1, swarm: {network: host}}\ntopology: {global_batch_size: 1, micro_batch_size: 1}", overrides)
    return render_stack(build_plan(config, Inventory("the swarm", machines), Cargo((CODE,)), run=run))


MACHINES = (Machine("gpu-1", id="one", address="10.0.0.5"), Machine("gpu-2", id="two", address="10.0.0.6", is_manager=True))


def test_on_the_host_network_the_coordinator_is_at_a_managers_address() -> None:
    found = build_host_network_stack(machines=MACHINES)
    assert found.document["networks"] == {"training": {"external": True, "name": "host"}}
    board = get_service(found, "rendezvous")
    assert board["deploy"]["placement"]["constraints"] == ["node.role==manager", "node.id==two"]
    assert board["environment"]["SWARMTRAIN_BIND"] == "10.0.0.6"
    port = board["environment"]["SWARMTRAIN_COORDINATOR_PORT"]
    assert get_service(found)["environment"]["SWARMTRAIN_COORDINATOR"] == f"10.0.0.6:{port}"


def test_ports_on_the_host_network_are_the_runs_own_and_always_the_same() -> None:
    def port(run: str, *overrides: str) -> int:
        return int(
            get_service(build_host_network_stack(*overrides, machines=MACHINES, run=run), "rendezvous")["environment"][
                "SWARMTRAIN_COORDINATOR_PORT"
            ]
        )

    ports = [port(f"run-{number}") for number in range(20)]
    assert all(20000 <= each <= 29996 for each in ports)
    assert len(set(ports)) > 15
    assert [port(f"run-{number}") for number in range(20)] == ports
    assert port("demo", "runner.master_port=4000") == 4000
    assert get_service(build_demo_stack(), "rendezvous")["environment"]["SWARMTRAIN_COORDINATOR_PORT"] == "29500"


@pytest.mark.parametrize(
    ("address", "pin", "bind"),
    [
        ("10.0.0.6", "node.id==two", "10.0.0.6"),
        ("gpu-2", "node.id==two", "0.0.0.0"),  # noqa: S104  # a name may resolve to loopback on its own machine
        ("10.1.0.6", "node.ip==10.1.0.6", "10.1.0.6"),
        ("gpu-2-ib", "node.hostname==gpu-2-ib", "0.0.0.0"),  # noqa: S104
    ],
)
def test_a_managers_address_that_the_config_names(address: str, pin: str, bind: str) -> None:
    found = build_host_network_stack(f"runner.master_addr={address}", machines=MACHINES)
    assert get_service(found, "rendezvous")["deploy"]["placement"]["constraints"][1] == pin
    assert get_service(found, "rendezvous")["environment"]["SWARMTRAIN_BIND"] == bind
    assert get_service(found)["environment"]["SWARMTRAIN_COORDINATOR"].startswith(f"{address}:")


def test_without_a_managers_address_there_is_no_plan_on_the_host_network() -> None:
    with pytest.raises(PlanError, match="no manager address is known"):
        build_host_network_stack(machines=MACHINES[:1])


def test_rdma_is_allowed_only_when_it_is_configured() -> None:
    assert not {"ulimits", "cap_add"} & set(get_service(build_demo_stack()))
    found = get_service(build_demo_stack("runner.swarm.rdma=true"))
    assert (found["ulimits"], found["cap_add"], found["environment"]["NVIDIA_MOFED"]) == ({"memlock": -1}, ["IPC_LOCK"], "enabled")


def test_nccl_gets_the_settings_of_the_config_and_the_users_variables_win() -> None:
    assert not [name for name in get_service(build_demo_stack())["environment"] if name.startswith("NCCL_")]
    environment = get_service(
        build_demo_stack("runner.nccl={debug: INFO, ib_disable: true, buffsize: 8m}", "runner.env={NCCL_DEBUG: WARN}")
    )["environment"]
    assert {name: value for name, value in environment.items() if name.startswith("NCCL_")} == {
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_DISABLE": "1",
        "NCCL_BUFFSIZE": "8388608",
    }


def test_labels_constrain_too() -> None:
    found = get_service(build_demo_stack("runner.swarm.labels={rack: r1, gpu: h100}"))
    assert found["deploy"]["placement"]["constraints"] == ["node.hostname==a", "node.labels.gpu==h100", "node.labels.rack==r1"]


def test_a_secret_is_a_path_in_the_environment_and_a_private_file_next_to_the_yaml(tmp_path: Path) -> None:
    found = build_demo_stack(secrets=(RunFile.from_content("WANDB_API_KEY", b"hush"),))
    assert get_service(found)["environment"]["WANDB_API_KEY_FILE"] == "/run/secrets/WANDB_API_KEY"
    assert "hush" not in render_stack_yaml(found)
    write_stack(found, tmp_path / "generated.yml")
    (secret,) = [path for path in (tmp_path / "generated").iterdir() if path.name.startswith("WANDB")]
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_writing_removes_files_of_an_earlier_version_and_nothing_else(tmp_path: Path) -> None:
    write_stack(build_demo_stack(code=RunFile.from_content("training_code.py", b"old")), tmp_path / "generated.yml")
    (tmp_path / "generated" / "mine.txt").write_text("keep me")
    found = build_demo_stack()
    write_stack(found, tmp_path / "generated.yml")
    assert sorted(f"generated/{path.name}" for path in (tmp_path / "generated").iterdir()) == sorted([*found.files, "generated/mine.txt"])


def test_a_file_over_swarms_limit_is_refused() -> None:
    with pytest.raises(StackError, match=r"training_code\.py: 1000 KiB, but Swarm accepts less than 1000 KiB"):
        build_demo_stack(code=RunFile.from_content("training_code.py", b"#" * 1024_000))


def test_a_thousand_nodes_have_names_of_their_own() -> None:
    config = parse_config(
        f"runner: {{hosts: {[f'h{index}' for index in range(1000)]}}}\ntopology: {{global_batch_size: 1000, micro_batch_size: 1}}"
    )
    found = render_stack(build_plan(config, build_offline_inventory(config.runner.host_entries), Cargo((CODE,)), run="demo"))
    assert len(found.document["services"]) == 1001


def test_a_node_gets_its_own_address_and_a_probe_those_of_all() -> None:
    found = plan_host_network("runner.hosts=[gpu-1 address=gpu-1-ib, gpu-2 address=10.1.0.2]")
    interfaces = [get_service(render_stack(found), name)["environment"]["SWARMTRAIN_INTERFACE"] for name in ("node0", "node1")]
    assert interfaces == ["gpu-1-ib", "10.1.0.2"]
    probe = get_service(render_stack(replace(found, is_probe=True)))["environment"]
    assert json.loads(probe["SWARMTRAIN_ADDRESSES"]) == {"node0": "gpu-1-ib", "node1": "10.1.0.2"}
    plain = get_service(render_stack(replace(plan_host_network("runner.hosts=[gpu-1, gpu-2]"), is_probe=True)))["environment"]
    assert json.loads(plain["SWARMTRAIN_ADDRESSES"]) == {"node0": "gpu-1", "node1": "gpu-2"}


def plan_host_network(hosts: str) -> Plan:
    config = parse_config(
        "runner: {swarm: {network: host}, master_addr: 10.0.0.9}\ntopology: {global_batch_size: 2, micro_batch_size: 1}", [hosts]
    )
    return build_plan(config, build_offline_inventory(config.runner.host_entries), Cargo((CODE,)), run="demo")
