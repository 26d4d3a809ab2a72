"""The model families of Hugging Face Transformers that can be imported and exported: one module each, without torch."""

from swarmtrain.config.families.gpt2 import GPT2
from swarmtrain.config.families.gpt_neox import GPT_NEOX
from swarmtrain.config.families.llama import LLAMA
from swarmtrain.config.families.mistral import MISTRAL
from swarmtrain.config.families.qwen import QWEN2, QWEN3

FAMILIES = (LLAMA, QWEN2, QWEN3, MISTRAL, GPT_NEOX, GPT2)
