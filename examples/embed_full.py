"""The prefix cache around a toy model with full attention. Its KV pool is a jax array."""

from collections import namedtuple
from itertools import zip_longest

import jax
import jax.numpy as jnp
import numpy as np

import uhrc_core as uhrc

DIM, VOCAB, TOKENS, CONTEXT = 32, 97, 80, 64
EMBED = jax.random.normal(jax.random.key(0), (VOCAB, DIM))
LAYERS = jax.random.normal(jax.random.key(1), (2, 3, DIM, DIM)) / DIM**0.5
Request = namedtuple("Request", "rid token_ids extra_key dp_rank priority", defaults=(None, 0, 0))


@jax.jit
def forward(pool, tokens, start, stop, row):  # pool[layer, K or V, index]; padding from stop on
    positions = start + jnp.arange(CONTEXT)
    x, places = EMBED[tokens[positions]], jnp.where(positions < stop, row[positions], TOKENS)
    seen = jnp.arange(CONTEXT) <= positions[:, None]
    for layer, (wq, wk, wv) in enumerate(LAYERS):
        pool = pool.at[layer, :, places].set(jnp.stack([x @ wk, x @ wv], 1), mode="drop")
        keys, values = pool[layer][:, row]
        x += jax.nn.softmax(x @ wq @ keys.T, where=seen) @ values
    return pool, (x @ EMBED.T).argmax(-1)  # the token that follows each


def serve(req, length, state=None):  # a step a turn, until the request has this length
    global pool
    while (stop := len(req.token_ids)) < length:
        if state is None:  # it is new, or gave way
            match = cache.match_req(req)
            state = cache.admit_req(req, match, length - match.hit_len)  # None: it waits
        if state and cache.extend_req(req, stop - state.computed_len) is None:
            state = cache.retract_req(req)  # None; others took the room, so it comes again
        if state:
            start, row = state.computed_len, np.resize(state.indices(0, stop), CONTEXT)
            tokens = np.resize(req.token_ids, CONTEXT)  # shapes that do not change compile once
            pool, following = forward(pool, tokens, start, stop, row)
            cache.advance_req(req, stop - start)  # dispatched,
            cache.cache_unfinished_req(req)  # so others may read it
            req.token_ids.append(int(following[stop - start - 1]))
        yield
    print(f"request {req.rid}: {state.cached_len} of 51 prompt tokens came from the cache")
    cache.cache_finished_req(req)


cache = uhrc.build_kv_cache(page_size=8, full_tokens=TOKENS, max_context_len=CONTEXT)
pool = jnp.zeros((2, 2, TOKENS, DIM))
requests = [Request(str(n), [*range(50), end]) for n, end in enumerate((60, 70, 60, 80))]
list(zip_longest(*(serve(req, CONTEXT) for req in requests)))  # round and round, to the end
for req in requests:  # the same answers, without the cache
    tokens, row = np.array(req.token_ids), np.arange(CONTEXT)
    _, following = forward(jnp.zeros_like(pool), tokens, 0, CONTEXT, row)
    assert req.token_ids[51:] == following[50:-1].tolist()
