"""The prefix cache around a toy model with a full and a linear (recurrent) attention layer."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np

from uhrc_core import build_kv_cache

DIM, VOCAB, CONTEXT = 16, 97, 64
EMBED = jax.random.normal(jax.random.key(0), (VOCAB, DIM))
FULL, LINEAR = jax.random.normal(jax.random.key(1), (2, 3, DIM, DIM)) / DIM**0.5
Request = namedtuple("Request", "rid token_ids extra_key dp_rank priority", defaults=(None, 0, 0))


@jax.jit
def forward(kv, state, tokens, start, stop, row):  # kv[K or V, index]; padding from stop on
    positions = start + jnp.arange(CONTEXT)
    x, places = EMBED[tokens[positions]], jnp.where(positions < stop, row[positions], kv.shape[1])
    kv = kv.at[:, places].set(jnp.stack([x @ FULL[1], x @ FULL[2]]), mode="drop")
    seen = jnp.arange(CONTEXT) <= positions[:, None]
    x += jax.nn.softmax(x @ FULL[0] @ kv[0, row].T, where=seen) @ kv[1, row]
    keys, values = (positions < stop)[:, None] * (x @ LINEAR[1]), x @ LINEAR[2]
    after = state + jnp.cumsum(keys[:, :, None] * values[:, None], 0)  # the state after each token
    x += jnp.einsum("ti,tij->tj", x @ LINEAR[0], after)
    return kv, after[-1], (x @ EMBED.T).argmax(-1)  # the token that follows each


def serve(req, length, kv, states):
    held = cache.admit_req(req, cache.match_req(req), length)
    while (known := len(req.token_ids)) < length:
        start = held.computed_len
        stop = min([known, *cache.cuts(req, start, known)])  # a state is kept at each cut
        cache.extend_req(req, stop - start)
        slots = cache.state_slots(req, start, stop)
        if slots.clone_src is not None:  # a hit: the snapshot stays, the request gets a copy
            states = states.at[slots.running].set(states[slots.clone_src])
            cache.started_req(req)  # the copy is dispatched
        tokens, row = (np.resize(each, CONTEXT) for each in (req.token_ids, held.indices(0, stop)))
        state = states[slots.running] * (start > 0)  # what a fresh slot holds is of no use
        kv, state, following = forward(kv, state, tokens, start, stop, row)
        for slot in {slots.running, slots.track} - {None}:
            states = states.at[slot].set(state)
        cache.advance_req(req, stop - start)
        cache.cache_unfinished_req(req)
        req.token_ids.extend([int(following[stop - start - 1])] if stop == known else [])
    print(f"request {req.rid}: {held.cached_len} of 51 prompt tokens came from the cache")
    cache.cache_finished_req(req)
    return kv, states


cache = build_kv_cache(page_size=8, full_tokens=256, recurrent_slots=12, recurrent_backend="gla")
kv, states = jnp.zeros((2, 256, DIM)), jnp.zeros((12, DIM, DIM))
for n, end in enumerate((60, 70, 60, 80)):
    kv, states = serve(req := Request(str(n), [*range(50), end]), CONTEXT, kv, states)
    alone = (np.array(req.token_ids), 0, CONTEXT, np.arange(CONTEXT))  # in one go, without a cache
    *_, following = forward(kv * 0, states[0] * 0, *alone)
    assert req.token_ids[51:] == following[50:-1].tolist()
