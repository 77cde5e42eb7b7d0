"""The library's own engine, from a batch to blocks of its Jacobian.

1. `forward.record` runs the network once and records the calls of layers (`rules`) and, where these do not explain all
   tensors, of PyTorch's functions (`functions`, `steps`) that have random parameters.
2. `proof.make_plan` proves one rule for every parameter against autograd, or goes down the ladder of fallbacks.
   Whatever the data, calls must hold all that reads a parameter (`graph`). An engine keeps them
   (`proof_cache`).
3. `forward.ForwardPass` makes blocks for given cotangents by that plan (`autograd` runs the backward passes).
4. `kinds` chooses the cotangents, or products with vectors (`products`), and adds what they give to a sink.
"""
