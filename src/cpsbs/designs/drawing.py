"""``DrawingDesign`` by the name of the module in which it used to be."""

from cpsbs.designs.base import DrawingDesign

__all__ = ["DrawingDesign"]
