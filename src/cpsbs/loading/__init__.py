"""Loads pretrained models. A checkpoint is data that somebody else wrote, and is treated as such.

transformers follows some of the file names in a checkpoint, even to pickles, and samples happily
from weights that do not belong to the configuration. So the names in the files are checked before
anything is loaded, and the model afterwards. ``checkpoint`` finds the files, ``checks`` says what
is refused, and ``loader`` loads what is left.
"""

from cpsbs.loading.checkpoint import EMBEDDED, embedded_models
from cpsbs.loading.checks import limit
from cpsbs.loading.loader import configuration, dtype_on, outlined, pretrained

__all__ = [
    "EMBEDDED",
    "configuration",
    "dtype_on",
    "embedded_models",
    "limit",
    "outlined",
    "pretrained",
]
