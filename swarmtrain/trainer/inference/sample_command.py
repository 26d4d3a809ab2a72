"""`python -m swarmtrain.trainer sample`: the command that `swarmtrain sample` starts on each rank."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmtrain.trainer import collectives
from swarmtrain.trainer.cli_exit import handle_cli_errors
from swarmtrain.trainer.inference import model_source
from swarmtrain.trainer.inference.generation import SamplingParams, build_logits_gather, encode_prompt, generate_tokens
from swarmtrain.trainer.inference.model_source import ModelSource
from swarmtrain.trainer.inference.parallel_model import open_parallel_model
from swarmtrain.trainer.inference.text_stream import TextStream
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate

_COMMAND = "sample"


@dataclass(frozen=True)
class SampleOptions:
    """Options of `swarmtrain sample`."""

    source: str
    base: str | None
    prompts: list[str]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: list[str]
    seed: int | None
    tokenizer: str | None
    chat: bool
    json: bool


@handle_cli_errors
def main(request: Mapping[str, Any]) -> None:
    """Print a model's completions of the prompts in `request`. Raises SwarmtrainError."""
    options = SampleOptions(**request)
    model = model_source.open_model(Path(options.source), Path(options.base) if options.base else None)
    tokenizer = model.open_tokenizer(options.tokenizer)
    begin_tokens, max_length, place = model.get_begin_tokens(tokenizer), model.architecture.sequence_length, f"{_COMMAND} --prompt"
    template = ChatTemplate(tokenizer, source=model.chat_template) if options.chat else None
    prompts = [
        encode_prompt(tokenizer, prompt, max_length, place, begin_tokens=begin_tokens, template=template) for prompt in options.prompts
    ]
    stop_tokens = {*model.find_stop_tokens(tokenizer), *(template.end_of_turn_tokens if template else ())}
    with open_parallel_model(model) as (parallel_model, runtime):
        seed = collectives.run_on_rank_zero(lambda: secrets.randbits(31)) if options.seed is None else options.seed
        sampling_params = SamplingParams(options.temperature, options.top_k, options.top_p, seed)
        streams = [TextStream(tokenizer, prompt, options.stop) for prompt in prompts]
        stream_output = runtime.is_rank_zero and not options.json and len(prompts) == 1
        if stream_output and not options.chat:
            _write_stdout(options.prompts[0])
        tokens = generate_tokens(
            parallel_model.local_model,
            prompts,
            sampling_params,
            max_tokens=options.max_tokens,
            eos_tokens=stop_tokens,
            gather_logits=build_logits_gather(parallel_model.mesh.tensor_group),
            is_done=lambda number: streams[number].stopped,
        )
        for sampled in tokens:
            for stream, token in zip(streams, sampled, strict=True):
                new_text = "" if token is None or stream.stopped else stream.add_token(token)
                if stream_output:
                    _write_stdout(new_text)
        if runtime.is_rank_zero:
            _write_samples(options, streams, model, stream_output=stream_output)
            token_budgets = [model.architecture.sequence_length - len(prompt) for prompt in prompts]
            if any(
                len(stream.tokens) == token_budget < options.max_tokens for stream, token_budget in zip(streams, token_budgets, strict=True)
            ):
                sys.stderr.write(f"note: ended at {model.architecture.sequence_length} tokens, the maximum sequence length of the model\n")


def _write_samples(options: SampleOptions, text_streams: Sequence[TextStream], model: ModelSource, *, stream_output: bool) -> None:
    rows = [
        {"prompt": prompt, "text": stream.text, "tokens": len(stream.tokens)}
        for prompt, stream in zip(options.prompts, text_streams, strict=True)
    ]
    if options.json:
        _write_stdout(f"{json.dumps({'source': str(model.path), 'step': model.step, 'samples': rows}, ensure_ascii=False)}\n")
    elif stream_output:
        _write_stdout(f"{text_streams[0].flush_text()}\n")
    else:
        separator = "\n" if options.chat else ""
        _write_stdout("\n".join(f"{row['prompt']}{separator}{row['text']}\n" for row in rows))


def _write_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
