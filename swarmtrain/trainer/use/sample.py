"""`python -m swarmtrain.trainer sample OPTIONS`: what our own command line starts, once a rank; OPTIONS is JSON."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain import world
from swarmtrain.config import Config
from swarmtrain.config.topology import TopologyConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import agreement, runtime
from swarmtrain.trainer.ending import verb
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import parallelize
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.step import autocast
from swarmtrain.trainer.use import source
from swarmtrain.trainer.use.generate import How, generate
from swarmtrain.trainer.use.source import Source
from swarmtrain.trainer.use.text import Stream

_PLACE = "sample"


@dataclass(frozen=True)
class Asked:
    """The options of `sample`."""

    source: str
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
def main(argv: Sequence[str]) -> None:
    """Write what a model makes of prompts. Raises SwarmtrainError."""
    asked = Asked(**json.loads(argv[0]))
    model = source.opened(Path(asked.source))
    encoder = model.encoder(asked.tokenizer)
    prompts = [_encoded(encoder, prompt, model.shape.sequence_length) for prompt in asked.prompts]
    with ready(model) as (local, here):
        seed = agreement.by_first_rank(lambda: secrets.randbits(31)) if asked.seed is None else asked.seed
        how = How(asked.temperature, asked.top_k, asked.top_p, seed)
        streams = [Stream(encoder, asked.stop) for _ in prompts]
        aloud = here.first and not asked.json and len(prompts) == 1
        if aloud:
            _print(asked.prompts[0])
        tokens = generate(
            local, prompts, how, most=asked.most, ends=_ends(encoder), whole=whole, done=lambda number: streams[number].stopped
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


@contextmanager
def ready(model: Source) -> Iterator[tuple[Transformer, runtime.Runtime]]:
    """Give a model that this world's ranks share, each with a part of every layer, to be used. Raises SwarmtrainError."""
    # Prompts of several lengths are told apart from what fills them up.
    shape = model.shape.model_copy(update={"reset_attention_mask": True, "reset_position_ids": True})
    ranks = int(world.find(os.environ)["WORLD_SIZE"])
    for name in ("num_attention_heads", "kv_heads", "vocab_size", "mlp_width"):
        if getattr(shape, name) % ranks:
            reason = f"{ranks} ranks cannot share its {name}, {getattr(shape, name)}"
            raise TrainingError(reason, place=f"{_PLACE} --ranks", hint="fewer, or one")
    topology = TopologyConfig(model_parallel_size=ranks, global_batch_size=1, micro_batch_size=1)
    config = Config(topology=topology, transformer_architecture=shape)
    with runtime.start(config) as here:
        made = Transformer(shape, 0)
        made.initial = model.value
        local = parallelize(made, here).local.eval()
        with autocast(here):
            yield local, here


def whole(logits: Tensor) -> Tensor:
    """Return the logits (batch, vocabulary) of all ranks, of which this one has its part."""
    if dist.get_world_size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, dim=-1)


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


def _encoded(encoder: Encoder, text: str, longest: int) -> list[int]:
    [found] = encoder.encode([text], special=True)
    if not len(found.tokens):
        raise TrainingError("a prompt holds nothing", place=f"{_PLACE} --prompt", hint="one character will do")
    if len(found.tokens) >= longest:
        reason = f"a prompt has {len(found.tokens)} tokens, and the model was made for {longest} at most"
        raise TrainingError(reason, place=f"{_PLACE} --prompt", hint="shorten it")
    return [int(token) for token in found.tokens]


def _ends(encoder: Encoder) -> set[int]:
    """Return the token that ends a text, if there is one."""
    try:
        token = encoders.end_token(encoder, None, own=True)
    except TrainingError:
        return set()
    return set() if token is None else {token}


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
