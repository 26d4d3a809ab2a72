"""A plan states which node runs what and why; these tests compare its printed text."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.cargo import Cargo, RunFile, read_cargo
from swarmtrain.cli.options import DEBUG_OVERRIDES
from swarmtrain.config.loader import parse_config
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.errors import PlanError, SwarmtrainError
from swarmtrain.planning.inventory import Inventory, Machine, build_offline_inventory
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.render.stack_document import render_stack

NODE_ID = "abcdefghijklmnopqrstuvwx0"


def build_inventory(*machines: Machine) -> Inventory:
    return Inventory("the swarm", machines)


def plan_demo(inventory: Inventory, *overrides: str, nodes: int | None = None) -> Plan:
    return build_plan(
        parse_config("topology: {global_batch_size: 24, micro_batch_size: 2}", overrides),
        inventory,
        Cargo(()),
        run="demo",
        node_count=nodes,
    )


def get_refusal(inventory: Inventory, *overrides: str) -> str:
    with pytest.raises(PlanError) as caught:
        plan_demo(inventory, *overrides)
    return str(caught.value)


THREE_MACHINES = build_inventory(Machine("a", id="1"), Machine("b", id="2"), Machine("c", id="3"))


def test_without_hosts_the_first_ready_nodes_are_used() -> None:
    assert str(plan_demo(THREE_MACHINES, "runner.nodes=2", "runner.min_nodes=1")) == (
        "run demo by swarm on the swarm\n"
        "  NODE   HOST  SLOTS  WHY\n"
        "  node0  a     1      1 of 3 ready nodes, by name; one slot\n"
        "  node1  b     1      2 of 3 ready nodes, by name; one slot\n"
        "  2 nodes with 2 ranks; elastic: 1 to 2 nodes\n"
        "  2 replicas of 1 rank (data x tensor parallel)\n"
        "  global batch 24 = 12 micro batches of 2, 6 each\n"
        "  gpu: none (no host is known to have GPUs; swarmtrain doctor CONFIG looks for them)"
    )


@pytest.mark.parametrize(
    ("overrides", "is_warned"),
    [
        (["runner.env.TORCH_DISTRIBUTED_DEBUG=DETAIL"], True),
        (["runner.env.TORCH_DISTRIBUTED_DEBUG=detail"], True),
        (["runner.env.TORCH_DISTRIBUTED_DEBUG=DETAIL", "runner.swarm.gpu=visible"], False),
        ([*DEBUG_OVERRIDES], False),
    ],
)
def test_a_debug_level_that_crashes_gloo_is_warned_about(overrides: list[str], *, is_warned: bool) -> None:
    warnings = [note for note in plan_demo(THREE_MACHINES, *overrides).notes if "over gloo with SIGSEGV" in note]
    assert len(warnings) == is_warned


@pytest.mark.parametrize("mode", ["none", "bf16", "powersgd"])
def test_a_plan_states_which_runs_have_equal_losses_if_gradients_are_compressed(mode: str) -> None:
    lines = [line for line in str(plan_demo(THREE_MACHINES, f"topology.gradient_compression={mode}")).splitlines() if "losses" in line]
    assert [line.partition("losses")[0] for line in lines] == ([] if mode == "none" else [f"  gradient compression {mode}: "])


def test_hosts_are_taken_in_their_order_with_their_slots() -> None:
    made = plan_demo(THREE_MACHINES, "runner.hosts=[c slots=3, a, b]", "runner.nodes=2")
    assert [(node.name, node.host, node.slots, node.constraint) for node in made.nodes] == [
        ("node0", "c", 3, "node.hostname==c"),
        ("node1", "a", 1, "node.hostname==a"),
    ]
    assert "12 micro batches of 2, 3 each" in str(made)


def test_hosts_have_names_of_their_own_on_the_network_that_ranks_use() -> None:
    machines = build_inventory(Machine("a", id="1", address="10.0.0.1", is_manager=True), Machine("b", id="2", address="10.0.0.2"))
    made = plan_demo(machines, "runner.hosts=[b slots=2 address=b-ib, a address=10.1.0.1]", "runner.swarm.network=host")
    assert [(node.host, node.slots, node.rank_interface, node.address) for node in made.nodes] == [
        ("b", 2, "b-ib", "b-ib"),
        ("a", 1, "10.1.0.1", "10.1.0.1"),
    ]
    assert made.nodes[0].cause == "entry 1 of hosts; slots from hosts; ranks communicate via b-ib"
    assert made.coordinator_machine == Machine("a", id="1", address="10.1.0.1", is_manager=True)
    local = plan_demo(machines, "runner.hosts=[b address=b-ib]", "runner.runner_type=local")
    assert local.nodes[0].rank_interface == "", "it is all one machine"


def test_uneven_shares_are_printed() -> None:
    assert "12 micro batches of 2, 3 or 2 each" in str(plan_demo(THREE_MACHINES, "runner.hosts=[a slots=5]"))


def test_an_assignment_by_speed_is_printed_where_replicas_have_several_micro_batches() -> None:
    by_speed = "topology.micro_batch_assignment=by_speed"
    assert "12 micro batches of 2, 3 or 2 each at first, then by speed" in str(
        plan_demo(THREE_MACHINES, "runner.hosts=[a slots=5]", by_speed)
    )
    assert "2 or 1 each\n" in str(plan_demo(THREE_MACHINES, "runner.hosts=[a slots=7]", by_speed))


def test_learners_are_printed() -> None:
    batch = "topology.global_batch_size=48"
    hosts = "runner.hosts=[a slots=3]"
    assert "  4 learners, up to 2 per replica: the result" in str(plan_demo(THREE_MACHINES, hosts, batch, "topology.learners=4"))
    assert "  3 learners, 1 replica each: the result" in str(plan_demo(THREE_MACHINES, hosts, batch, "topology.learners=3"))
    refusal = get_refusal(THREE_MACHINES, hosts, batch, "topology.learners=2")
    assert "3 replicas are more than learners 2, but not a multiple of them" in refusal


def test_a_pipeline_prints_its_stages_and_its_idle_time() -> None:
    said = str(
        plan_demo(
            THREE_MACHINES,
            "runner.hosts=[a slots=4, b slots=2]",
            "topology.pipe_parallel_size=3",
            "topology.pipe_partition_overwrite=[0,1,3]",
        )
    )
    assert "  2 replicas of 3 ranks (data x pipeline x tensor parallel)" in said
    assert "  pipeline of 3 stages with 1, 2, 1 layers; idle 25% of a step" in said


def test_ids_pin_by_id() -> None:
    machine = Machine("a", id=NODE_ID)
    assert (
        plan_demo(build_inventory(machine, Machine("a", id="other")), f"runner.hosts=[{NODE_ID}]").nodes[0].constraint
        == f"node.id=={NODE_ID}"
    )
    assert (
        plan_demo(build_offline_inventory([HostEntry.parse(NODE_ID)]), f"runner.hosts=[{NODE_ID}]").nodes[0].constraint
        == f"node.id=={NODE_ID}"
    )


def test_two_machines_of_one_name_are_distinguished_by_id_or_refused() -> None:
    twins = build_inventory(Machine("a", id="1"), Machine("a", id="2"))
    assert [node.constraint for node in plan_demo(twins, "runner.nodes=2").nodes] == ["node.id==1", "node.id==2"]
    assert get_refusal(twins, "runner.hosts=[a]") == "config runner.hosts: a: 2 nodes have this host name; their IDs: 1, 2"


def test_a_node_named_twice_is_refused() -> None:
    machine = Machine("a", id=NODE_ID)
    assert get_refusal(build_inventory(machine), f"runner.hosts=[a, {NODE_ID}]").startswith("config runner.hosts: lists one node twice")


def test_labels_choose_nodes() -> None:
    inventory = build_inventory(Machine("a", labels={"gpu": "old"}), Machine("b", labels={"gpu": "new", "x": "y"}))
    assert [node.host for node in plan_demo(inventory, "runner.swarm.labels={gpu: new}").nodes] == ["b"]
    assert get_refusal(inventory, "runner.swarm.labels={gpu: new}", "runner.nodes=2") == (
        "config runner.nodes: 2 nodes requested, but 1 can be used on the swarm (a lacks the labels)"
    )


def test_slots_follow_the_gpus_where_gpus_are_used() -> None:
    inventory = build_inventory(Machine("a", resources={"NVIDIA-GPU": 4}))
    assert plan_demo(inventory, "runner.swarm.gpu=reserve").nodes[0].slots == 4
    assert plan_demo(inventory, "runner.swarm.gpu=none").nodes[0].slots == 1
    assert plan_demo(inventory, "runner.default_gpu_count=2").nodes[0].slots == 2


def test_what_the_cluster_cannot_hold_is_refused() -> None:
    assert get_refusal(THREE_MACHINES, "runner.hosts=[d]") == ("config runner.hosts: d: the node is not in the swarm (its nodes: a, b, c)")
    assert get_refusal(build_inventory(Machine("a", unavailable_reason="down")), "runner.hosts=[a]") == (
        "config runner.hosts: a: the node is down"
    )
    assert "a is drained" in get_refusal(build_inventory(Machine("a", unavailable_reason="drained")))
    assert get_refusal(THREE_MACHINES, "runner.nodes=3", "topology.model_parallel_size=2").startswith(
        "config topology: 3 ranks are not a multiple of"
    )
    pairs = ("topology.data_parallel_type=hsdp", "topology.data_parallel_shard_size=2")
    assert get_refusal(THREE_MACHINES, "runner.nodes=3", *pairs).startswith(
        "config topology: 3 replicas are not a multiple of data_parallel_shard_size 2"
    )
    assert get_refusal(THREE_MACHINES, "runner.nodes=3", "topology.world_size=4") == (
        "config topology.world_size: 4, but the slots of 3 nodes add up to 3 ranks"
    )


def test_scaling_overrides_the_number_of_nodes() -> None:
    assert len(plan_demo(THREE_MACHINES, "runner.nodes=1", "runner.max_nodes=3", nodes=3).nodes) == 3


@pytest.mark.parametrize("run", ["", "Upper", "a_b", "-a", "a" * 47])
def test_a_run_name_must_be_valid_in_a_host_name(run: str) -> None:
    with pytest.raises(PlanError, match="must consist of lower-case letters"):
        build_plan(parse_config("{}"), THREE_MACHINES, Cargo(()), run=run)


def test_cargo_holds_the_script_the_code_that_travels_with_it_and_the_secrets(tmp_path: Path) -> None:
    for name in ("train.py", "data.py", "key"):
        (tmp_path / name).write_text(name)
    cargo = read_cargo(parse_config("runner: {script: train.py, code: [data.py], secrets: {KEY: key}}"), tmp_path)
    assert [(item.name, item.content) for item in (*cargo.code, *cargo.secrets)] == [
        ("train.py", b"train.py"),
        ("data.py", b"data.py"),
        ("KEY", b"key"),
    ]


def test_a_missing_file_is_named_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(SwarmtrainError, match=r"config runner\.script: .*training_code\.py: no such file"):
        read_cargo(parse_config("{}"), tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "is_shown"),
    [
        ("training_code.py", (Path(__file__).parents[2] / "training_code.py").read_bytes(), True),
        ("train.py", b"from swarmtrain.trainer import train_model\ntrain_model(1)\n", True),
        ("train.py", b"import torch\n", False),
        ("fit.py", b"import swarmtrain.trainer\nwith swarmtrain.trainer.run() as run: pass\n", False),
    ],
)
def test_only_the_built_in_trainer_has_replicas_and_micro_batches(name: str, content: bytes, is_shown: bool) -> None:
    plan = build_plan(parse_config("{}"), THREE_MACHINES, Cargo((RunFile.from_content(name, content),)), run="demo")
    assert ("replica" in str(plan), "micro batch" in str(plan), bool(plan.to_dict()["micro_batches"])) == (is_shown,) * 3


def test_a_module_needs_no_script(tmp_path: Path) -> None:
    (tmp_path / "extra.py").write_text("A = 1\n")
    config = parse_config("runner: {module: package.train, code: [extra.py], script_args: [--lr, 1]}")
    cargo = read_cargo(config, tmp_path)
    assert [file.name for file in cargo.code] == ["extra.py"]
    plan = build_plan(config, THREE_MACHINES, cargo, run="demo")
    assert "micro batch" not in str(plan)
    variables = render_stack(plan).document["services"]["node0"]["environment"]
    assert [variables[f"SWARMTRAIN_{name}"] for name in ("MODULE", "SCRIPT", "CODE_FOLDER")] == ["package.train", "", "/workspace"]
    assert read_cargo(parse_config("runner: {module: package.train}"), tmp_path).code == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("runner: {module: package.train, script: train.py}", "cannot be combined with script"),
        ("runner: {module: train.py -x}", "must match pattern|should match pattern"),
    ],
)
def test_an_invalid_module_is_refused(text: str, reason: str) -> None:
    with pytest.raises(SwarmtrainError, match=reason):
        parse_config(text)
