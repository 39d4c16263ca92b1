#!/usr/bin/env python3
"""Train a scorer that Python computes, by the library's target and boundary loss; then the mask
that it leads to.

The scorer here is a weighted sum of a key's numbers, and its gradient is two lines, so nothing but Python is
needed. With PyTorch it is a module of yours, and kvpolicy.boundary_loss_of(library, rule)(scores,
target).backward() does the rest.
"""

import array
import random
import sys

import kvpolicy

LENGTH, DIM, RULE = 256, 8, kvpolicy.Rule(sinks=2, window=8, budget=22)


def floats(count):
    return array.array("f", bytes(4 * count))


def main(path):
    library = kvpolicy.Library(path)
    shape = (1, 1, LENGTH)
    draw = random.Random(1)
    # Queries that all look along the keys' first number: a large one draws attention.
    q = array.array("f", [4.0 if i % DIM == 0 else draw.gauss(0, 1) for i in range(2 * LENGTH * DIM)])
    k = array.array("f", [draw.gauss(0, 1) for _ in range(LENGTH * DIM)])
    target, scores, d_scores = floats(LENGTH), floats(LENGTH), floats(LENGTH)
    library.future_mass(q, k, shape, 2, DIM, RULE.window, target, beta=2.0)

    weight = [0.0] * DIM
    losses = []
    for _ in range(100):
        for t in range(LENGTH):
            scores[t] = sum(w * k[t * DIM + d] for d, w in enumerate(weight))
        losses.append(library.boundary_loss(scores, target, shape, RULE, d_scores))
        for d in range(DIM):
            weight[d] -= 3.0 * sum(d_scores[t] * k[t * DIM + d] for t in range(LENGTH))
    print("the loss fell by more than half:", "yes" if losses[-1] < 0.5 * losses[0] else "no")
    print("the first weight is the largest:", "yes" if weight[0] == max(weight, key=abs) else "no")

    expiry = array.array("i", bytes(4 * LENGTH))
    library.build_mask(scores, shape, RULE, expiry)
    print("keys that the last query sees:", sum(LENGTH - 1 < at for at in expiry), "of", LENGTH)
    # With a decay of scores by age, whose logarithm may be learned, too.
    log_gamma, d_log_gamma = array.array("f", [-0.01]), array.array("d", [0.0])
    library.boundary_loss(scores, target, shape, RULE, d_scores, log_gamma, d_log_gamma)
    print("the loss depends on the decay:", "yes" if d_log_gamma[0] != 0.0 else "no")
    for rule, to in ((kvpolicy.Rule(2, 0, 22), expiry), (RULE, scores)):
        try:
            library.build_mask(scores, shape, rule, to)
        except ValueError as error:
            print(error)


if __name__ == "__main__":
    main(sys.argv[1])

# Prints:
# the loss fell by more than half: yes
# the first weight is the largest: yes
# keys that the last query sees: 32 of 256
# the loss depends on the decay: yes
# window of layer 0, head 0: 0 is not allowed; it must be 1 or more, since a query sees itself
# expiry: 256 numbers of float32 is not allowed; it must be 256 of int32
