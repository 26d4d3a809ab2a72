"""What is said of models that cannot go out or come in."""

from __future__ import annotations

import json

import pytest
from answers import Answer

CHAPTER = "The files it names"


def test_no_such_preset(answer: Answer) -> None:
    """A model of another kind

    Those that can be read, written and begun with are of six families.
    """
    answer("swarmtrain init --preset gpt5 new.yml")
    answer.file("config.json", json.dumps({"model_type": "bert", "hidden_size": 8}))
    answer("swarmtrain import config.json")
    scaled = {"model_type": "llama", "hidden_act": "relu", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    answer.file("scaled.json", json.dumps(scaled))
    answer("swarmtrain import scaled.json")


def test_no_checkpoint(answer: Answer) -> None:
    """Nothing to export

    Nothing is written.
    """
    pytest.importorskip("torch")
    answer("swarmtrain export runs/none out")
    answer("swarmtrain export runs/none out --shard-size much")
    answer("swarmtrain export runs/none out --tokenizer tokenizer.json")


def test_nothing_to_use(answer: Answer) -> None:
    """No model to ask, or nothing to ask it

    A model is a run's folder, a checkpoint, or a folder as Hugging Face has it.
    """
    pytest.importorskip("torch")
    answer("swarmtrain sample runs/none --prompt Once")
    answer("swarmtrain sample runs/none --prompts prompts.txt")
    answer("swarmtrain sample runs/none --prompt ''")
    answer("swarmtrain embed runs/none")
    answer.file("texts.txt", "one\n\nthree\n")
    answer("swarmtrain embed runs/none --texts texts.txt")
    answer.file("config.yml", "trainer: {save_dir: runs/none}")
    answer("swarmtrain evaluate config.yml")
    answer("swarmtrain evaluate config.yml -o trainer.save_dir=null")
    answer("swarmtrain evaluate config.yml --tasks hellaswag")
