"""WHAT is computed: the decoder and its named sizes. Imports nothing but torch."""

from models import llama

FAMILIES = {"llama": llama.SIZES}
