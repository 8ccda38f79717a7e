"""How the embedded English–French model is made; README.md says how to run it."""
