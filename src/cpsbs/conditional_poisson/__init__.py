"""The conditional Poisson distribution over subsets of K items, computed from coin flips.

A conditional Poisson design needs one number and its relatives: the sum over all subsets of
size K of the product of their weights (the paper's ``eq:naive``),

    Z = e_K(w) = Σ_{|Y| = K} Π_{n ∈ Y} w_n .

The textbook recurrence costs O(N·K) and its table spans hundreds of orders of magnitude. We use
what the design means instead: *independent coin flips, given that K of them came up heads*.
Multiply every weight by the same factor e^s (which changes nothing about the design) and read
w_n e^s as the odds of coin n:

    p_n = w_n e^s / (1 + w_n e^s),      S = number of heads,
    Z   = P(S = K) · Π_n (1 + w_n e^s) · e^{−sK},
    π_n = p_n · P(S without coin n = K − 1) / P(S = K).

Every quantity is now a probability. Choose s so that about K − ½ heads are expected (the *tilt*)
and all the probabilities above are large ones, of order 1/√K, whatever the weights were; there is
nothing left to overflow, to underflow or to cancel. A handful of values of the characteristic
function of S then gives them to rounding error.

The modules, in the order in which a candidate meets them:

``weights``
    provides the N weights of a row, from a tensor or from a model's scores.
``population``
    splits the N weights of a row into a *head*, the M largest, kept one by one, and a *tail*,
    of which a few power sums are enough.
``bernoulli_sum``
    finds the tilt and the law (the distribution) of S.
``sampling``
    draws samples, by flipping the coins until K come up heads, and computes π and joint π.
``normalizer``, ``gradients``, ``fitting``
    compute log Z and the entropy, derivatives, and weights for prescribed π.
``distribution``
    has ``ConditionalPoisson``, the design that users see.
"""
