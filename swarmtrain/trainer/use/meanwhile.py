"""What a model says while it is trained, behind trainer.sampling_config."""

from __future__ import annotations

import torch

from swarmtrain.config.sampling import SamplingConfig
from swarmtrain.trainer import agreement
from swarmtrain.trainer.metrics.sinks.texts import Sample
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parts import EVALUATION, Parts
from swarmtrain.trainer.passes import autocast
from swarmtrain.trainer.prepare import encoders
from swarmtrain.trainer.prepare.encoders import Encoder
from swarmtrain.trainer.runtime import Runtime, derived_seed
from swarmtrain.trainer.use import source
from swarmtrain.trainer.use.generate import How, encoded, generate, of_all


class Sampling:
    """The prompts of a run. All methods are called by all ranks together."""

    def __init__(self, here: Runtime, model: ParallelModel) -> None:
        """Raises TrainingError if the tokenizer is not known, or is another model's, or a prompt is too long."""
        self._here, self._model = here, model
        self._config = here.config.trainer.sampling_config
        self._encoder: Encoder | None = None
        self._prompts: list[list[int]] = []
        self._ends: set[int] = set()
        if self._config:
            config = self._config
            self._prompts, self._ends = agreement.by_first_rank(lambda: self._open(config))

    def samples(self, step: int, parts: Parts, *, done: bool) -> list[Sample]:
        """Return what is made of the prompts after `step`, if it is time; `done`: it is the last. In every world it is the same.

        Ranks other than the first have no texts.
        """
        config, local = self._config, self._model.local
        if config is None or step == 0 or (step % config.interval and not done):
            return []
        how = How(config.temperature, config.top_k, config.top_p, derived_seed(self._here.config.trainer.seed, step))
        whole, found = of_all(self._model.mesh.tensor_group), []
        local.eval()
        # Each length of a text would be compiled anew.
        with parts.of(EVALUATION), autocast(self._here), torch.compiler.set_stance("force_eager"):
            for prompt in self._prompts:  # one by one: of several lengths, the model would have to tell documents apart
                made = generate(local, [prompt], how, most=config.max_tokens, ends=self._ends, whole=whole)
                found.append([token for (token,) in made if token is not None])
        local.train()
        if self._encoder is None:
            return []
        texts = [self._encoder.decode(tokens) for tokens in found]
        return [{"prompt": prompt, "text": text} for prompt, text in zip(config.prompts, texts, strict=True)]

    def _open(self, config: SamplingConfig) -> tuple[list[list[int]], set[int]]:
        shape, place = self._here.config.transformer_architecture, "config trainer.sampling_config"
        names = (config.tokenizer,) if config.tokenizer else source.tokenizers(self._here.config)
        self._encoder = opened = source.encoder(names, shape, place, "trainer.sampling_config.tokenizer")
        prompts = [encoded(opened, prompt, shape.sequence_length, f"{place}.prompts") for prompt in config.prompts]
        return prompts, encoders.ends(opened)
