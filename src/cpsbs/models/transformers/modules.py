"""Lists the modules of a model without their names, which take many times as long to build."""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules in it; those that are shared come several times."""
    found = [model]
    for module in found:  # which grows meanwhile
        found += [child for child in module._modules.values() if child is not None]
    return found
