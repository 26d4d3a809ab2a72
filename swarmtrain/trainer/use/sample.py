"""`python -m swarmtrain.trainer sample`: what our own command line starts, once a rank."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmtrain.trainer import agreement
from swarmtrain.trainer.ending import verb
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.use import source
from swarmtrain.trainer.use.generate import How, encoded, generate, of_all
from swarmtrain.trainer.use.shared import ready
from swarmtrain.trainer.use.source import Source
from swarmtrain.trainer.use.text import Stream

_PLACE = "sample"


@dataclass(frozen=True)
class Asked:
    """The options of `sample`."""

    source: str
    base: str | None
    prompts: list[str]
    most: int
    temperature: float
    top_k: int
    top_p: float
    stop: list[str]
    seed: int | None
    tokenizer: str | None
    json: bool


@verb
def main(question: Mapping[str, Any]) -> None:
    """Write what a model makes of prompts. Raises SwarmtrainError."""
    asked = Asked(**question)
    model = source.opened(Path(asked.source), Path(asked.base) if asked.base else None)
    encoder = model.encoder(asked.tokenizer)
    prompts = [encoded(encoder, prompt, model.shape.sequence_length, f"{_PLACE} --prompt") for prompt in asked.prompts]
    with ready(model) as (shared, here):
        seed = agreement.by_first_rank(lambda: secrets.randbits(31)) if asked.seed is None else asked.seed
        how = How(asked.temperature, asked.top_k, asked.top_p, seed)
        streams = [Stream(encoder, asked.stop) for _ in prompts]
        aloud = here.first and not asked.json and len(prompts) == 1
        if aloud:
            _print(asked.prompts[0])
        tokens = generate(
            shared.local,
            prompts,
            how,
            most=asked.most,
            ends=encoders.ends(encoder),
            whole=of_all(shared.mesh.tensor_group),
            done=lambda number: streams[number].stopped,
        )
        for drawn in tokens:
            for stream, token in zip(streams, drawn, strict=True):
                new = "" if token is None or stream.stopped else stream.add(token)
                if aloud:
                    _print(new)
        if here.first:
            _tell(asked, streams, model, aloud=aloud)
            rooms = [model.shape.sequence_length - len(prompt) for prompt in prompts]
            if any(len(stream.tokens) == room < asked.most for stream, room in zip(streams, rooms, strict=True)):
                sys.stderr.write(f"note: ended at {model.shape.sequence_length} tokens, the most that the model was made for\n")


def _tell(asked: Asked, streams: Sequence[Stream], model: Source, *, aloud: bool) -> None:
    rows = [
        {"prompt": prompt, "text": stream.text, "tokens": len(stream.tokens)} for prompt, stream in zip(asked.prompts, streams, strict=True)
    ]
    if asked.json:
        _print(f"{json.dumps({'source': str(model.place), 'step': model.step, 'samples': rows}, ensure_ascii=False)}\n")
    elif aloud:
        _print(f"{streams[0].end()}\n")
    else:
        _print("\n".join(f"{row['prompt']}{row['text']}\n" for row in rows))


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
