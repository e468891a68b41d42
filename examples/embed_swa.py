"""The prefix cache around a toy model with a full and a sliding-window attention layer."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np

import uhrc_core as uhrc

FULL, SWA = uhrc.ComponentType.FULL, uhrc.ComponentType.SWA
DIM, VOCAB, CONTEXT, WINDOW = 32, 97, 64, 20
EMBED = jax.random.normal(jax.random.key(0), (VOCAB, DIM))
WEIGHTS = jax.random.normal(jax.random.key(1), (2, 3, DIM, DIM)) / DIM**0.5
Request = namedtuple("Request", "rid token_ids extra_key dp_rank priority", defaults=(None, 0, 0))


@jax.jit
def forward(pools, tokens, start, stop, rows):  # pools[kind][K or V, index]; padding from stop on
    positions = start + jnp.arange(CONTEXT)
    x, written, age = EMBED[tokens[positions]], {}, positions[:, None] - jnp.arange(CONTEXT)
    for kind, (wq, wk, wv) in zip((FULL, SWA), WEIGHTS, strict=True):
        places = jnp.where(positions < stop, rows[kind][positions], pools[kind].shape[1])
        written[kind] = pools[kind].at[:, places].set(jnp.stack([x @ wk, x @ wv]), mode="drop")
        keys, values = written[kind][:, rows[kind]]  # a row's -1: left the window, not seen
        seen = (age >= 0) & (age < (WINDOW if kind is SWA else CONTEXT))
        x += jax.nn.softmax(x @ wq @ keys.T, where=seen) @ values
    return written, (x @ EMBED.T).argmax(-1)  # the token that follows each


def serve(req, length, pools):
    match = cache.match_req(req)
    state = cache.admit_req(req, match, length - match.hit_len)
    while (stop := len(req.token_ids)) < length:
        start = state.computed_len
        cache.extend_req(req, stop - start)  # takes pages of both pools
        rows = cache.token_indices(req, stop)  # of the window pool: -1 for what has left the window
        rows = {kind: np.resize(row, CONTEXT) for kind, row in rows.items()}
        pools, following = forward(pools, np.resize(req.token_ids, CONTEXT), start, stop, rows)
        cache.advance_req(req, stop - start)  # frees the pages that the window has left
        cache.cache_unfinished_req(req)  # now, while the prompt's window is there
        req.token_ids.append(int(following[stop - start - 1]))
    print(f"request {req.rid}: {match.hit_len} of 51 prompt tokens came from the cache")
    cache.cache_finished_req(req)
    return pools


cache = uhrc.build_kv_cache(
    page_size=8, full_tokens=256, swa_tokens=96, window_tokens=WINDOW, max_context_len=CONTEXT
)
pools = {FULL: jnp.zeros((2, 256, DIM)), SWA: jnp.zeros((2, 96, DIM))}
for n, end in enumerate((60, 70, 60, 80)):
    pools = serve(req := Request(str(n), [*range(50), end]), CONTEXT, pools)
    empty, row = jax.tree.map(jnp.zeros_like, pools), np.arange(CONTEXT)  # without a cache
    rows = {FULL: row, SWA: row}
    _, following = forward(empty, np.array(req.token_ids), 0, CONTEXT, rows)
    assert req.token_ids[51:] == following[50:-1].tolist()
