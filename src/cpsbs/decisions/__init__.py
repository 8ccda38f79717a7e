"""What people do with beams: decide, and say how sure the model is.

``answers`` turns sequences into a distribution over answers, and ``keys`` says which sequences give
the same answer. Decisions see only finished beams and estimates.
"""
