"""The paper's experiments: what to compute, computing it anywhere, and drawing what was computed.

``plan`` lists independent cells, ``compute`` does one, ``engines`` does many, here or on a Ray
cluster, and ``store`` keeps what came out, a file each. ``figures``, ``claims`` and ``report`` read
only what is stored.
"""
