"""WHAT is computed: the decoder and its named sizes. Imports nothing but torch."""

from models import llama, qwen

FAMILIES = {"llama": llama.SIZES, "qwen": qwen.SIZES}
