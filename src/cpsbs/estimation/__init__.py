"""From beams to expectations.

``estimate`` weights f of the sequences, ``uncertainty`` says how far off that may be, ``functions``
has ready-made f, ``inclusion`` estimates the inclusion probability of a sequence over all paths,
``scoring`` scores given sequences, and ``metrics`` compares texts.
"""
