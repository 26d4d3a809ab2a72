"""What is said of models that cannot go out or come in."""

from __future__ import annotations

import json

import pytest
from error_cases import ErrorCase

CHAPTER = "The files it names"


def test_no_such_preset(error_case: ErrorCase) -> None:
    """Unsupported model architecture

    swarmtrain can import, export and initialize from models of six families.
    """
    error_case("swarmtrain init --preset gpt5 new.yml")
    error_case.write_file("config.json", json.dumps({"model_type": "bert", "hidden_size": 8}))
    error_case("swarmtrain import config.json")
    scaled = {"model_type": "llama", "hidden_act": "relu", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    error_case.write_file("scaled.json", json.dumps(scaled))
    error_case("swarmtrain import scaled.json")


def test_no_checkpoint(error_case: ErrorCase) -> None:
    """No checkpoint to export

    The export fails, and nothing is written.
    """
    pytest.importorskip("torch")
    error_case("swarmtrain export runs/none out")
    error_case("swarmtrain export runs/none out --shard-size much")
    error_case("swarmtrain export runs/none out --tokenizer tokenizer.json")


def test_no_model_to_use(error_case: ErrorCase) -> None:
    """Model or prompt is missing

    A model is a run's folder, a checkpoint, or a folder in Hugging Face format.
    """
    pytest.importorskip("torch")
    error_case("swarmtrain sample runs/none --prompt Once")
    error_case("swarmtrain sample runs/none --prompts prompts.txt")
    error_case("swarmtrain sample runs/none --prompt ''")
    error_case("swarmtrain embed runs/none")
    error_case.write_file("texts.txt", "one\n\nthree\n")
    error_case("swarmtrain embed runs/none --texts texts.txt")
    error_case.write_file("config.yml", "trainer: {save_dir: runs/none}")
    error_case("swarmtrain evaluate config.yml")
    error_case("swarmtrain evaluate config.yml -o trainer.save_dir=null")
    error_case("swarmtrain evaluate config.yml --tasks hellaswag")
