"""Samples during training: the model's completions of the prompts in trainer.sampling_config."""

from __future__ import annotations

import torch

from swarmtrain.config.schema.trainer import SamplingConfig
from swarmtrain.trainer import collectives
from swarmtrain.trainer.health.step_timer import VALIDATION, StepTimer
from swarmtrain.trainer.inference import model_source
from swarmtrain.trainer.inference.generation import SamplingParams, build_logits_gather, encode_prompt, generate_tokens
from swarmtrain.trainer.inference.text_stream import decode_continuation
from swarmtrain.trainer.metrics.sinks.metrics_lines import GeneratedSample
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.random_seeds import derive_seed
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.tokenize import tokenizer_backends
from swarmtrain.trainer.tokenize.chat_template import ChatTemplate
from swarmtrain.trainer.tokenize.tokenizer_backends import BaseTokenizer


class TrainingSampler:
    """Generates completions of the configured prompts. All methods are collective: every rank must call them."""

    def __init__(self, runtime: Runtime, model: ParallelModel) -> None:
        """Encode the configured prompts.

        Raises TrainingError if the tokenizer is unknown or does not match the model, or if a prompt is too long.
        """
        self._runtime, self._model = runtime, model
        self._config = runtime.config.trainer.sampling_config
        self._tokenizer: BaseTokenizer | None = None
        self._prompts: list[list[int]] = []
        self._eos_tokens: set[int] = set()
        if self._config:
            config = self._config
            self._prompts, self._eos_tokens = collectives.run_on_rank_zero(lambda: self._encode_prompts(config))

    def generate_samples(self, step: int, timer: StepTimer, *, is_last: bool) -> list[GeneratedSample]:
        """Generate completions of the prompts if they are due after `step`, and return them on rank 0.

        `is_last`: whether `step` is the last step. The completions are the same in every topology. The list is empty if none are due,
        and on all ranks other than rank 0.
        """
        config, local = self._config, self._model.local_model
        if config is None or step == 0 or (step % config.interval and not is_last):
            return []
        sampling_params = SamplingParams(
            config.temperature, config.top_k, config.top_p, derive_seed(self._runtime.config.trainer.seed, step)
        )
        gather_logits, completions = build_logits_gather(self._model.mesh.tensor_group), []
        local.eval()
        # torch.compile would recompile the model for each text length.
        with timer.time_phase(VALIDATION), torch.compiler.set_stance("force_eager"):
            for prompt in self._prompts:  # one by one: in a batch, the model would have to mask the padding of shorter prompts
                sampled = generate_tokens(
                    local, [prompt], sampling_params, max_tokens=config.max_tokens, eos_tokens=self._eos_tokens, gather_logits=gather_logits
                )
                completions.append([token for (token,) in sampled if token is not None])
        local.train()
        if self._tokenizer is None:
            return []
        return [
            {"prompt": prompt, "text": decode_continuation(self._tokenizer, prompt_tokens, tokens)}
            for prompt, prompt_tokens, tokens in zip(config.prompts, self._prompts, completions, strict=True)
        ]

    def _encode_prompts(self, config: SamplingConfig) -> tuple[list[list[int]], set[int]]:
        architecture, place = self._runtime.config.transformer_architecture, "config trainer.sampling_config"
        tokenizer_names = (config.tokenizer,) if config.tokenizer else model_source.list_tokenizer_candidates(self._runtime.config)
        self._tokenizer = encoder = model_source.open_model_tokenizer(
            tokenizer_names, architecture, place, "trainer.sampling_config.tokenizer"
        )
        added_tokens = model_source.read_added_tokens(self._runtime.config)
        begin_tokens = encoder.begin_tokens if added_tokens is None else added_tokens.begin
        template = ChatTemplate(encoder, source=model_source.read_chat_template(self._runtime.config)) if config.chat else None
        max_length, stop_tokens = architecture.sequence_length, {*(template.end_of_turn_tokens if template else ())}
        prompts = [
            encode_prompt(encoder, prompt, max_length, f"{place}.prompts", begin_tokens=begin_tokens, template=template)
            for prompt in config.prompts
        ]
        return prompts, stop_tokens | tokenizer_backends.find_eos_token_ids(encoder) | model_source.read_stop_tokens(self._runtime.config)
