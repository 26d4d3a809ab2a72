"""A model under lm-evaluation-harness: its results match the model's own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_inference import GATED, build_evaluate_arguments
from worlds import LocalWorld, merge_config, run_training

from swarmtrain.errors import EXIT_ERROR
from swarmtrain.trainer.inference import evaluation, model_source
from swarmtrain.trainer.model.initialization import LoadedParameters
from swarmtrain.trainer.model.transformer import Transformer

pytestmark = pytest.mark.test_all_only("imports lm-evaluation-harness and all that it needs")

CHOICES = [("n 0123", ["4", "x"]), ("abc", ["def", "zzz", "q"]), ("n 9 8 7", [" six", " one"]), ("", ["a", "b"])]
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
MULTIPLE = """\
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}"
metric_list: [{metric: byte_perplexity}]
"""
GENERATED = """\
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["~"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module", autouse=True)
def _offline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def trained_run(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trained")
    training_config = merge_config(config, trainer={"train_iterations": 4}, transformer_architecture=GATED)
    run_training(folder, training_config)
    return folder, training_config


def write_task(folder: Path, name: str, task: str, rows: list[dict[str, Any]]) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + task)


def run_evaluation(folder: Path, arguments: dict[str, Any], size: int) -> dict[str, Any]:
    folder.mkdir()
    (folder / "asked.json").write_text(json.dumps(arguments))
    world = LocalWorld(folder, {}, size, script="run_evaluate")
    assert world.wait() == [0] * size, world.read_log()
    last = next(line for line in reversed((folder / "rank-0.log").read_text().splitlines()) if line.startswith("{"))
    results: dict[str, Any] = json.loads(last)
    return results


def build_log_probabilities(model_source: model_source.ModelSource) -> Any:
    model = Transformer(model_source.architecture, 0)
    model.initial_values = LoadedParameters(model_source.load_parameter)
    model.init_weights().eval()
    return lambda text: torch.log_softmax(model(torch.tensor([list(text.encode())])).double(), -1)[0]


@torch.no_grad()
def test_results_are_those_of_the_logits(trained_run: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    ask = build_log_probabilities(model_source.open_model(trained_run[0] / "run"))

    def compute_log_likelihood(context: str, continuation: str) -> float:
        text = (context or "\n") + continuation
        rows = ask(text[:-1])
        return sum(float(rows[position - 1, ord(text[position])]) for position in range(len(text) - len(continuation), len(text)))

    right = [
        max(range(len(choices)), key=lambda number: compute_log_likelihood(context, choices[number])) == 0 for context, choices in CHOICES
    ]
    texts = ["n 0123456789" * 9, "abc"]
    whole, bits = 0.0, 0
    for text in texts:
        # Windows of the model's sequence length, 32: each token is predicted from those before it in its window.
        for first in range(0, len(text), 32):
            piece = text[first : first + 32]
            seen = text[max(0, first + len(piece) - 33) : first] if first else "\n"
            whole += compute_log_likelihood(seen, piece)
        bits += len(text)
    text = "n 0123"
    for _ in range(6):
        text += chr(int(ask(text)[-1].argmax()))
    said = text[6:].partition("~")[0]
    write_task(tmp_path, "choice", MULTIPLE, [{"context": context, "choices": choices} for context, choices in CHOICES])
    write_task(tmp_path, "rolling", ROLLING, [{"context": text} for text in texts])
    write_task(
        tmp_path,
        "said",
        GENERATED,
        [{"context": "n 0123", "said": said}, {"context": "n 0123", "said": f"{said}!"}, {"context": "n 5", "said": "?"}],
    )
    question = build_evaluate_arguments(trained_run[1], trained_run[0], tasks=["choice", "rolling", "said"], task_files=str(tmp_path))
    one = run_evaluation(tmp_path / "one", question, 1)
    assert one["step"] == 4
    results = one["results"]
    assert results["choice"]["acc,none"] == sum(right) / len(right)
    assert results["rolling"]["byte_perplexity,none"] == pytest.approx(float(torch.exp(torch.tensor(-whole / bits))), rel=1e-4)
    assert results["said"]["exact_match,none"] == pytest.approx(1 / 3)
    two = run_evaluation(tmp_path / "two", question, 2)
    assert two["results"]["rolling"]["byte_perplexity,none"] == pytest.approx(results["rolling"]["byte_perplexity,none"], rel=1e-6)
    assert {name: two["results"][name] for name in ("choice", "said")} == {name: results[name] for name in ("choice", "said")}


@pytest.mark.usefixtures("_single_process")
def test_invalid_tasks(trained_run: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluation.main(build_evaluate_arguments(trained_run[1], trained_run[0], tasks=["no_such_task"])) == EXIT_ERROR
    assert "no_such_task" in capsys.readouterr().err
    (tmp_path / "away.yaml").write_text(TASK.format(name="away", data=tmp_path / "none.jsonl") + MULTIPLE)
    assert evaluation.main(build_evaluate_arguments(trained_run[1], trained_run[0], tasks=["away"], task_files=str(tmp_path))) == EXIT_ERROR
    assert "error: --tasks away" in capsys.readouterr().err
