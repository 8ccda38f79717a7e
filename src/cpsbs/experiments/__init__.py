"""Reproduces the paper's experiments, on one machine or on a cluster.

``plan`` lists independent cells, ``compute`` computes one of them, ``engines`` computes many, in
local processes or on a Ray cluster, and ``store`` keeps the result of each in a file. ``analysis``,
``figures``, ``tables``, ``claims`` and ``report`` read stored results only. No other part of the
package imports these modules; the command ``cpsbs reproduce`` does when it is run.
"""
