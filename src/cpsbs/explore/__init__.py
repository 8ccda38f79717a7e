"""The page: look at a search as a tree of tokens, draw again, force a token, compare designs.

``explorer`` draws what a page asks for, ``record`` turns beams into the JSON that the page reads,
and ``pieces`` says how tokens are written. ``page`` puts that JSON and the built page into one HTML
file, and ``server`` serves the same page on the loopback interface, with the model behind it. The
page itself is TypeScript, in the folder ``web`` of the repository.
"""
